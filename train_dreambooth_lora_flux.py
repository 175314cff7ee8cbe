#!/usr/bin/env python
"""Train a FLUX.1 DreamBooth LoRA: from a few pictures of a subject to a LoRA file that draws it.

Usage: python train_dreambooth_lora_flux.py --config configs/demo_cpu.yaml [--flag value ...]
"""

import sys
from contextlib import nullcontext

import flux_db.early_interrupt
import flux_db.missing_package  # noqa: F401  both before the other imports
from flux_db.child import end_with_parent
from flux_db.errors import run_guarded
from flux_db.interrupt import StopRequest
from flux_db.settings.secrets import hide_token


def main(argv: list[str]) -> int:
    end_with_parent()
    hide_token()
    # Before numpy and MindSpore are imported: both start threads, and every thread must leave the signals to one
    stop = StopRequest().listen()
    from flux_db.check import dry_run, peer_notes
    from flux_db.check.device import check_device, check_processes
    from flux_db.check.everything import check_everything
    from flux_db.lora import init_lora
    from flux_db.report.hub import check_hub
    from flux_db.run.lock import OutputLock, is_first_process
    from flux_db.settings.command_line import read_config

    given = init_lora.resolve(read_config(argv))
    if given.config.output.dry_run:
        from flux_db.training.prepare import demand_resumable

        return dry_run.run(given, demand_resumable, check_hub)
    config, seen = check_everything(given, check_processes, check_device, check_hub)
    with OutputLock(config.output.output_dir) if is_first_process() else nullcontext():
        from flux_db.training.prepare import start

        device, prepared, encoding = start(config, seen)
        # Only now: MindSpore takes seconds, which pass while prompts and pictures are encoded
        from flux_db.training.build import build
        from flux_db.training.run import finish_encoding, publish, restore, train

        if device.is_main:
            peer_notes.say_notes(given, prepared.dataset, device.world_size)
        training = build(config, device, prepared.model, prepared.dataset)
        compiler = finish_encoding(config, device, prepared, encoding, training)
        ground = restore(config, device, prepared, training)
        outcome = train(config, device, prepared, training, compiler, ground, stop)
        return publish(config, device, outcome, stop)


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), prints_results=False))
