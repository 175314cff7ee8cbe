"""Commands around a training run. Those without flags of their own take the trainer's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from flux_db.check.device import check_device, describe_device
from flux_db.check.everything import check_everything
from flux_db.check.files import check_files
from flux_db.check.values import check_values
from flux_db.commands.command import Command
from flux_db.console import program_name
from flux_db.errors import CommandParser
from flux_db.lora import init_lora
from flux_db.settings.command_line import lasting_flags, parse_config, read_config, store_config


def train(argv: list[str]) -> NoReturn:
    """Train, as train_dreambooth_lora_flux.py does; takes its flags."""
    from flux_db.child import SCRIPT

    os.execv(sys.executable, [sys.executable, SCRIPT, *argv])


def check_run(argv: list[str]) -> int:
    """Report what a run would do: pictures, problems, steps, contact sheet; takes the trainer's flags."""
    from flux_db.check import dry_run
    from flux_db.report.hub import check_hub
    from flux_db.training.prepare import demand_resumable

    return dry_run.run(init_lora.resolve(read_config(argv)), demand_resumable, check_hub)


def prepare(argv: list[str]) -> None:
    """Draw class pictures and encode everything, as the trainer would first; takes the trainer's flags."""
    config, seen = check_everything(init_lora.resolve(read_config(argv)), check_device)
    from flux_db.run.lock import OutputLock
    from flux_db.training import prepare

    with OutputLock(config.output.output_dir):
        prepare.prepare(config, prepare.Alone(), seen)


def encode(argv: list[str]) -> None:
    """Encode prompts and pictures into the cache; takes the trainer's flags."""
    config = parse_config(argv, checks=(check_values, check_files, check_device))
    from flux_db.training.prepare import encode_all

    encode_all(config)


def class_images(argv: list[str]) -> None:
    """Draw the class pictures that prior preservation lacks; takes the trainer's flags."""
    config = parse_config(argv, checks=(check_values, check_files, check_device))
    from flux_db.training.prepare import make_class_images

    make_class_images(config)


def device(argv: list[str]) -> None:
    """Print which device a run would use, or why it cannot; takes the trainer's flags."""
    print(f"Device: {describe_device(parse_config(argv, checks=(check_values, check_files, check_device)))}")


def launch(argv: list[str]) -> int:
    """Prepare, then train on several devices under msrun; what scripts/train_multi.sh calls."""
    parser = CommandParser(
        prog=f"{program_name()} launch",
        description=launch.__doc__,
        usage="%(prog)s --devices N [options] -- FLAGS OF THE TRAINER",
    )
    parser.add_argument(
        "--devices", "--cards", type=int, required=True, help="devices on each server, one process for each"
    )
    parser.add_argument("--port", type=int, help="of the scheduler (default: a free one; 8118 on several servers)")
    parser.add_argument("--log_dir", type=Path, help="default: logs in --output_dir")
    parser.add_argument("--nodes", type=int, default=1, help="servers (default: 1)")
    parser.add_argument("--node_rank", type=int, default=0, help="number of this server, from 0 (default: 0)")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of the first server")
    parser.add_argument(
        "--bind_core", action="store_true", help="tie each worker to CPU cores near its device (msrun's --bind_core)"
    )
    arguments = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    flags = argv[argv.index("--") + 1 :] if "--" in argv else []
    from flux_db.training import launch as launcher

    config = parse_config(flags, checks=(check_values, check_files))
    log_dir = arguments.log_dir or Path(config.output.output_dir, config.output.logging_dir)
    # the workers cannot read a pipe again
    flags = lasting_flags(flags, lambda: store_config(config, log_dir))
    where = launcher.Devices(
        devices=arguments.devices,
        nodes=arguments.nodes,
        node_rank=arguments.node_rank,
        master_addr=arguments.master_addr,
        port=arguments.port,
        bind_core=arguments.bind_core,
    )
    return launcher.launch(config, flags, where, log_dir)


def dry_run_ascend(argv: list[str]) -> int:
    """Compute a run's device memory on a machine with CANN and no free device; takes the trainer's flags.

    MindSpore compiles the training step for Ascend and simulates one call of it. Not tried by its authors, who have no
    machine with CANN."""
    config = init_lora.resolve(read_config(argv)).checked(check_values, check_files)
    from flux_db.doctor import simulation

    if simulation.IN_CHILD in os.environ:
        from flux_db.doctor import simulated_step

        simulated_step.call_once(config)
        return 0
    return simulation.run(config)


COMMANDS = {
    "train": Command(train),
    "check": Command(check_run, takes_trainer_flags=True),
    "prepare": Command(prepare, takes_trainer_flags=True),
    "encode": Command(encode, takes_trainer_flags=True),
    "class-images": Command(class_images, takes_trainer_flags=True),
    "device": Command(device, takes_trainer_flags=True),
    "launch": Command(launch),
    "dry-run-ascend": Command(dry_run_ascend, takes_trainer_flags=True),
}
