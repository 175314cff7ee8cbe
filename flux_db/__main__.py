"""`python -m flux_db COMMAND`: what there is besides training."""

import os
import sys

if __name__ == "__main__":
    # Python looks for modules first in the user's folder, or in this one if started by its path. What lies there must
    # not take the place of a library, so the package is imported from where it is, and the rest from elsewhere.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import flux_db  # noqa: F401

    del sys.path[0]

import argparse
import signal
from collections.abc import Callable
from pathlib import Path

from flux_db import lora_commands
from flux_db.check.values import check, check_files
from flux_db.child import end_with_parent
from flux_db.data.dataset import check_pictures
from flux_db.errors import UserError, run_guarded
from flux_db.interrupt import default_signals
from flux_db.settings.command_line import lasting_flags, parse_config, store_config
from flux_db.settings.secrets import hide_token


def tiny_model(argv: list[str]) -> None:
    """Write a small FLUX.1 folder with random weights."""
    from flux_db.demo.tiny_model import write_tiny_model

    parser = argparse.ArgumentParser(prog="python -m flux_db tiny-model", description=tiny_model.__doc__)
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--size", choices=["tiny", "mid"], default="tiny", help="tiny: 0.1 M parameters; mid: 9 M")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (default: 0)")
    arguments = parser.parse_args(argv)
    write_tiny_model(arguments.folder, arguments.size, arguments.seed)
    print(arguments.folder)


def demo_pictures(argv: list[str]) -> None:
    """Draw a few pictures of a cartoon dog to train on."""
    from flux_db.demo.pictures import write_demo_pictures

    parser = argparse.ArgumentParser(prog="python -m flux_db demo-pictures", description=demo_pictures.__doc__)
    parser.add_argument("folder", type=Path, help="where to write them")
    parser.add_argument("--count", type=_whole(1000), default=5, help="how many (default: 5)")
    parser.add_argument("--size", type=_whole(4096), default=256, help="side in pixels (default: 256)")
    arguments = parser.parse_args(argv)
    write_demo_pictures(arguments.folder, arguments.count, arguments.size)
    print(arguments.folder)


def _whole(most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {most}")
        return int(text)

    return convert


def check_run(argv: list[str]) -> int:
    """Tell what a run would do: pictures, problems, steps, contact sheet; takes the trainer's flags."""
    from flux_db.check.dry_run import run

    return run(argv)


def prepare(argv: list[str]) -> None:
    """Draw class pictures and encode everything, as the trainer would first; takes the trainer's flags."""
    config = parse_config(argv, checks=(check, check_files, check_pictures))
    from flux_db.run.lock import OutputLock
    from flux_db.training import prepare

    with OutputLock(config.output.output_dir):
        prepare.prepare(config, prepare.Alone())


def encode(argv: list[str]) -> None:
    """Encode prompts and pictures into the cache; takes the trainer's flags."""
    config = parse_config(argv, checks=(check, check_files))
    from flux_db.training.prepare import encode_all

    encode_all(config)


def class_images(argv: list[str]) -> None:
    """Draw the class pictures that prior preservation lacks; takes the trainer's flags."""
    config = parse_config(argv, checks=(check, check_files))
    from flux_db.training.prepare import make_class_images

    make_class_images(config)


def launch(argv: list[str]) -> int:
    """Prepare, then train on several cards under msrun; what scripts/train_multi.sh calls."""
    parser = argparse.ArgumentParser(
        prog="python -m flux_db launch",
        description=launch.__doc__,
        usage="%(prog)s --cards N [options] -- FLAGS OF THE TRAINER",
    )
    parser.add_argument("--cards", type=int, required=True, help="cards on each server, one process for each")
    parser.add_argument("--port", type=int, help="of the scheduler (default: a free one; 8118 on several servers)")
    parser.add_argument("--log_dir", type=Path, help="default: logs in --output_dir")
    parser.add_argument("--nodes", type=int, default=1, help="servers (default: 1)")
    parser.add_argument("--node_rank", type=int, default=0, help="number of this server, from 0 (default: 0)")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of the first server")
    arguments = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    flags = argv[argv.index("--") + 1 :] if "--" in argv else []
    from flux_db.training import launch as launcher

    config = parse_config(flags, checks=(check, check_files))
    log_dir = arguments.log_dir or Path(config.output.output_dir, config.output.logging_dir)
    # the workers cannot read a pipe again
    flags = lasting_flags(flags, lambda: store_config(config, log_dir))
    where = launcher.Cards(
        cards=arguments.cards,
        nodes=arguments.nodes,
        node_rank=arguments.node_rank,
        master_addr=arguments.master_addr,
        port=arguments.port,
    )
    return launcher.launch(config, flags, where, log_dir)


def selftest(argv: list[str]) -> int:
    """Compare this machine's results with those of diffusers on torch."""
    parser = argparse.ArgumentParser(
        prog="python -m flux_db selftest",
        description=f"{selftest.__doc__} Prints a table; the exit code is 0 if everything is within its tolerance, "
        "otherwise 1. Takes one to two minutes, most of it for compiling.",
    )
    parser.add_argument("--device", choices=["auto", "Ascend", "CPU"], default="auto", help="default: auto")
    parser.add_argument(
        "--mixed_precision", choices=["no", "fp16", "bf16"], help="default: bf16 on Ascend, no on the CPU"
    )
    arguments = parser.parse_args(argv)
    from flux_db.model import runtime
    from flux_db.parity import compare as comparison
    from flux_db.parity import golden
    from flux_db.settings.schema import RuntimeConfig

    golden.read()  # tells what is missing before MindSpore starts
    device, _ = runtime.choose_device(arguments.device)
    precision = arguments.mixed_precision or ("bf16" if device == "Ascend" else "no")
    machine = runtime.start(RuntimeConfig(device=arguments.device, mixed_precision=precision))
    return comparison.run(machine, precision)


def report(argv: list[str]) -> None:
    """Write the report of a run, or compare several runs on one page."""
    parser = argparse.ArgumentParser(prog="python -m flux_db report", description=report.__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="OUT", help="output folder of a run, finished or not")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: report.html in OUT, or comparison.html",
    )
    arguments = parser.parse_args(argv)
    from flux_db.atomic import write_file
    from flux_db.report.comparison_page import render_comparison
    from flux_db.report.run_page import REPORT, render
    from flux_db.run.record import read_run

    runs = [read_run(folder) for folder in arguments.runs]
    if len(runs) == 1:
        text, path = render(runs[0]), arguments.output or runs[0].folder / REPORT
    else:
        text, path = render_comparison(runs), arguments.output or Path("comparison.html")
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}; make it first")
    write_file(path, text.encode())
    print(path)


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "tiny-model": tiny_model,
    "demo-pictures": demo_pictures,
    "check": check_run,
    "prepare": prepare,
    "encode": encode,
    "class-images": class_images,
    "launch": launch,
    "selftest": selftest,
    "report": report,
    **lora_commands.COMMANDS,
}


def main(argv: list[str]) -> int:
    return run_guarded(lambda: _run(argv))


def _run(argv: list[str]) -> int | None:
    default_signals()
    if end_with_parent() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # its parent answers the person who pressed Ctrl-C
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m flux_db COMMAND [flags]\n\ncommands (each has --help):")
        print("\n".join(f"  {name:14} {command.__doc__}" for name, command in COMMANDS.items()))
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        raise UserError(f"no such command: {argv[0]}; there are {', '.join(COMMANDS)}")
    hide_token()
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
