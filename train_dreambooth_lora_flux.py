#!/usr/bin/env python
"""Train a FLUX.1 DreamBooth LoRA: from a few pictures of a subject to a LoRA file that draws it.

Usage: python train_dreambooth_lora_flux.py --config configs/demo_cpu.yaml [--flag value ...]
"""

import sys
from contextlib import nullcontext

from flux_db.child import end_with_parent
from flux_db.errors import run_guarded
from flux_db.hub_token import hide_token
from flux_db.interrupt import StopRequest


def main(argv: list[str]) -> int:
    end_with_parent()
    hide_token()
    # Before numpy and MindSpore are imported: both start threads, and every thread must leave the signals to one
    stop = StopRequest().listen()
    from flux_db.check import tell
    from flux_db.cli import read_config
    from flux_db.dataset import check_pictures
    from flux_db.hub import check_hub
    from flux_db.lock import OutputLock, is_first_process
    from flux_db.preflight import check, check_files

    given = read_config(argv)
    if given.config.output.dry_run:
        return tell(given)
    config = given.checked(check, check_files, check_pictures, check_hub)
    with OutputLock(config.output.output_dir) if is_first_process() else nullcontext():
        # Only now: a mistake in the settings is told within a second, without MindSpore
        from flux_db import pipeline, runtime
        from flux_db.prepare import prepare

        device = runtime.start(config.runtime)
        model, cache, dataset, start = prepare(config, device)
        return pipeline.train(config, device, model, cache, dataset, start, stop)


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:]), prints_results=False))
