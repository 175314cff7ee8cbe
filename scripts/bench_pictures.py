#!/usr/bin/env python
"""Time and peak memory of check, encode and training with few and with many pictures; on the tiny model, on the CPU.

    python scripts/bench_pictures.py                 # 50 and 5,000 pictures of 256 px
    python scripts/bench_pictures.py --counts 50 2000  # as in docs/pictures.md

Memory must not grow with the number of pictures. The last two columns are the seconds from the start to the end of the
first step with everything encoded, in one process and in two under msrun.
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
from flux_db.output_folder import METRICS  # noqa: E402

TRAINER = ROOT / "train_dreambooth_lora_flux.py"
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


def costs(folder: Path, count: int, steps: int) -> tuple[list[Cost], list[str]]:
    """What the three stages take, and their flags."""
    pictures = folder / f"pictures-{count}"
    write_pictures(pictures, count)
    flags = (
        f"--pretrained_model_name_or_path {folder}/model --instance_data_dir {pictures} "
        f"--output_dir {folder}/run-{count} --resolution 64 --max_sequence_length 32 --max_train_steps {steps} "
        f"--checkpointing_steps {steps} --lora_layers single_transformer_blocks.1.attn.to_q --device CPU"
    ).split()
    flags += ["--compile_cache", "off", "--report_to", "none", "--instance_prompt", "a photo of sks texture"]
    stages = (["-m", "flux_db", "check"], ["-m", "flux_db", "encode"], [str(TRAINER)])
    return [measure([*stage, *flags]) for stage in stages], flags


def first_step(words: list[str], output: Path) -> float:
    """Seconds until the first line of metrics, in a fresh output folder."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*words, "--output_dir", str(output)], cwd=ROOT, stdout=log, stderr=log)
        metrics = output / METRICS
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(log.read().decode(errors="replace")[-3000:])
            time.sleep(0.02)
        seconds = time.monotonic() - start
        process.wait()
    return seconds


def starts(folder: Path, count: int, flags: list[str]) -> tuple[float, float]:
    """Of one process, and of two."""
    flags = [*flags, "--encode_cache_dir", f"{folder}/run-{count}/cache", "--max_train_steps", "2"]
    two = [sys.executable, "-m", "flux_db", "launch", "--devices", "2", "--", *flags]
    one = first_step([sys.executable, str(TRAINER), *flags], folder / f"one-{count}")
    return one, first_step(two, folder / f"two-{count}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 5000], help="default: 50 5000")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    arguments = parser.parse_args()
    print("| Pictures | check | encode | train | first step | in two processes |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        write_tiny_model(Path(name, "model"), "tiny")
        for count in arguments.counts:
            found, flags = costs(Path(name), count, arguments.steps)
            cells = [f"{cost.seconds:.1f} s, {cost.megabytes:.0f} MB" for cost in found]
            cells += [f"{seconds:.1f} s" for seconds in starts(Path(name), count, flags)]
            print(f"| {count} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
