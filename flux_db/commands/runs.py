"""Commands that look at finished runs, and at the machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from flux_db.atomic import write_file
from flux_db.commands.command import Command, whole_number
from flux_db.errors import UserError


def report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="OUT", help="output folder of a run, finished or not")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: report.html in OUT, or comparison.html"
    )


def report(arguments: argparse.Namespace) -> None:
    """Write the report of a run, or compare several runs on one page."""
    from flux_db.output_folder import REPORT
    from flux_db.report.comparison_page import render_comparison
    from flux_db.report.run_page import render
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


def selftest_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "Ascend", "CPU"], default="auto", help="default: auto")
    parser.add_argument(
        "--mixed_precision", choices=["no", "fp16", "bf16"], help="default: bf16 on Ascend, no on the CPU"
    )


def selftest(arguments: argparse.Namespace) -> int:
    """Compare this machine's results with those of diffusers on torch.

    Prints a table; the exit code is 0 if everything is within its tolerance, otherwise 1. Takes one to two minutes,
    most of it for compiling."""
    from flux_db.parity import golden

    golden.read()  # reports what is missing before MindSpore starts
    from flux_db.model import runtime
    from flux_db.parity import compare
    from flux_db.settings.schema import RuntimeConfig

    device, _ = runtime.choose_device(arguments.device)
    precision = arguments.mixed_precision or ("bf16" if device == "Ascend" else "no")
    settings = RuntimeConfig(device=arguments.device, mixed_precision=precision, compile_cache="off")
    machine = runtime.start(settings)
    return compare.run(machine, precision)


def doctor_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "Ascend", "CPU"], default="auto", help="default: auto")
    parser.add_argument(
        "--devices", type=whole_number(256), default=1, help="also time an all-reduce over so many devices (default: 1)"
    )
    parser.add_argument(
        "--all_reduce_mb",
        type=whole_number(4096),
        default=179,
        help="size of the all-reduce (default: 179, the gradients of a LoRA of rank 16 in FLUX.1-dev)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--row_file", type=Path, help=argparse.SUPPRESS)  # for the workers that it starts


def doctor(arguments: argparse.Namespace) -> int:
    """Check whether this machine can train, before any model is loaded.

    Prints a table of checks with pass, fail or "not here", and what to do; the exit code is 0 if none failed,
    otherwise 1. Takes about a minute."""
    from flux_db.doctor import examination

    if arguments.row_file:
        return examination.work(arguments.device, arguments.all_reduce_mb, arguments.row_file)
    return examination.examine(arguments.device, arguments.devices, arguments.all_reduce_mb, json=arguments.json)


def score_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="output folder of a run, or a folder of pictures drawn by generate")
    parser.add_argument(
        "--dino",
        metavar="FOLDER",
        help="DINOv2 as a folder or its name on the hub, such as facebook/dinov2-base: measures DINO, PRES and DIV",
    )
    parser.add_argument(
        "--clip",
        metavar="FOLDER",
        help="CLIP as a folder or its name on the hub, such as openai/clip-vit-large-patch14: measures CLIP-I, and "
        "CLIP-T with the prompt without the subject's word",
    )
    parser.add_argument(
        "--instance_data_dir",
        type=Path,
        metavar="FOLDER",
        help="the training pictures; of a run, its settings name them",
    )
    parser.add_argument(
        "--instance_prompt",
        help='prompt that names the subject; of a run, its own (default for a folder: "a photo of sks dog")',
    )
    parser.add_argument("--trigger_word", help="the subject's word, if it is not a rare one such as sks")
    parser.add_argument("--device", choices=["auto", "Ascend", "CPU"], default="auto", help="default: auto")


def score(arguments: argparse.Namespace) -> None:
    """Score samples: the subject, the prompts, the class, diversity, copies.

    By the features of DINOv2 and CLIP (--dino, --clip; DreamBooth's measures DINO, CLIP-I, CLIP-T, PRES and DIV), or,
    without both, by the judge of the small model's drawn world. Of a run, every round of samples is scored; the result
    is stored in scores.json and shown in report.html."""
    from flux_db.output_folder import CONFIG
    from flux_db.report.run_page import write_report
    from flux_db.score.runs import Given, as_table, score_folder, score_run
    from flux_db.score.scorer import locate

    folder = arguments.folder
    given = Given(
        pictures=arguments.instance_data_dir, prompt=arguments.instance_prompt, trigger_word=arguments.trigger_word
    )
    folders = locate(arguments.dino, arguments.clip)
    if folders:
        from flux_db.model import runtime
        from flux_db.settings.schema import RuntimeConfig

        runtime.start(RuntimeConfig(device=arguments.device), alone=True)
    if (folder / CONFIG).is_file():
        rounds = score_run(folder, given, folders)
        write_report(folder)
    else:
        rounds = [score_folder(folder, given, folders)]
    print(as_table(rounds))


COMMANDS = {
    "doctor": Command(doctor, doctor_flags),
    "report": Command(report, report_flags),
    "score": Command(score, score_flags),
    "selftest": Command(selftest, selftest_flags),
}
