#!/usr/bin/env python
"""Time and peak memory of check, encode and training with few and with many pictures; on the tiny model, on the CPU.

    python scripts/bench_pictures.py                 # 50 and 5,000 pictures of 256 px, as in docs/pictures.md
    python scripts/bench_pictures.py --counts 50 500

Memory must not grow with the number of pictures.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flux_db.demo.tiny_model import write_tiny_model  # noqa: E402  a script finds its package beside it

SIDE = 256


class Cost(NamedTuple):
    seconds: float
    megabytes: float
    """Largest resident size of the process."""


def write_pictures(folder: Path, count: int) -> None:
    """Textures that look different, every other one JPEG, each with a caption among ten."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        picture = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.int16)
        picture = np.clip(picture + rng.integers(-20, 20, picture.shape, dtype=np.int16), 0, 255)
        path = folder / f"{number:05}.{('png', 'jpg')[number % 2]}"
        Image.fromarray(picture.astype(np.uint8)).save(path)
        path.with_suffix(".txt").write_text(f"a photo of sks texture number {number % 10}")


def measure(words: list[str]) -> Cost:
    start = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(log.read().decode(errors="replace")[-3000:])
    return Cost(time.monotonic() - start, usage.ru_maxrss / 1024)


def costs(folder: Path, count: int, steps: int) -> list[Cost]:
    pictures = folder / f"pictures-{count}"
    write_pictures(pictures, count)
    flags = (
        f"--pretrained_model_name_or_path {folder}/model --instance_data_dir {pictures} "
        f"--output_dir {folder}/run-{count} --resolution 64 --max_sequence_length 32 --max_train_steps {steps} "
        f"--checkpointing_steps {steps} --lora_layers single_transformer_blocks.1.attn.to_q --device CPU"
    ).split()
    flags += ["--report_to", "none", "--instance_prompt", "a photo of sks texture"]
    stages = (["-m", "flux_db", "check"], ["-m", "flux_db", "encode"], [str(ROOT / "train_dreambooth_lora_flux.py")])
    return [measure([*stage, *flags]) for stage in stages]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 5000], help="default: 50 5000")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    arguments = parser.parse_args()
    print("| Pictures | check | encode | train |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        write_tiny_model(Path(name, "model"), "tiny")
        for count in arguments.counts:
            cells = [
                f"{cost.seconds:.1f} s, {cost.megabytes:.0f} MB" for cost in costs(Path(name), count, arguments.steps)
            ]
            print(f"| {count} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
