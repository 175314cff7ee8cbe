#!/usr/bin/env python
"""Train a FLUX.1 DreamBooth LoRA: from a few pictures of a subject to a LoRA file that draws it.

python train_dreambooth_lora_flux.py --config configs/demo_cpu.yaml [--flag value ...]
"""

import sys
from contextlib import nullcontext

from flux_db.cli import parse_config
from flux_db.dataset import check_pictures
from flux_db.errors import run_guarded
from flux_db.lock import OutputLock
from flux_db.preflight import check, check_files


def main(argv: list[str]) -> int:
    config = parse_config(argv, checks=(check, check_files, check_pictures))

    # MindSpore is imported only now: a mistake in the settings is told within a second
    from flux_db import checkpoint, pipeline, runtime
    from flux_db.prepare import prepare

    device = runtime.start(config.runtime)
    with OutputLock(config.output.output_dir) if device.is_main else nullcontext():
        if device.is_main:
            checkpoint.clean_leftovers(config.output.output_dir)
        model, cache, dataset = prepare(config, device)
        return pipeline.train(config, device, model, cache, dataset)


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
