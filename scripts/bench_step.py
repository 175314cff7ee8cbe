"""Seconds per step, time to the first step and peak memory of the real training command, on the mid model.

python scripts/bench_step.py            # the figures of docs/evidence.md
python scripts/bench_step.py --big-t5   # the same with a T5 of 1.2 GB: the training process must not grow
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from flux_db.demo.tiny_model import draw_all, json_bytes

ROOT = Path(__file__).resolve().parents[1]
BIG_D_FF = 131_072  # four layers of it make 1.2 GB in float32
POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Figures:
    seconds: float
    """Median over all steps but the first."""
    first_step: float
    """Seconds from the start of the program, encoding and compiling included, to the first line of metrics."""
    encode_peak: int
    """Largest resident size of the encode process, in MB."""
    train_peak: int
    """Largest resident size of the training process, in MB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--resolution", type=int, default=128)
    parser.add_argument("--max_sequence_length", type=int, default=64, help="text tokens (default: 64)")
    parser.add_argument("--big-t5", action="store_true", help="compare with a T5 of 1.2 GB")
    arguments, flags = parser.parse_known_args()
    flags += ["--max_train_steps", str(arguments.steps), "--resolution", str(arguments.resolution)]
    flags += ["--max_sequence_length", str(arguments.max_sequence_length), "--rank", "16", "--train_batch_size", "1"]
    print("| T5 | s/step | first step after | peak of encode process | peak of training process |")
    print("|---|---|---|---|---|")
    for big in (False, True) if arguments.big_t5 else (False,):
        with tempfile.TemporaryDirectory() as folder:
            size = make_inputs(Path(folder), big)
            figures = measure(Path(folder), flags)
        print(
            f"| {size} MB | {figures.seconds:.3f} | {figures.first_step:.1f} s "
            f"| {figures.encode_peak} MB | {figures.train_peak} MB |",
            flush=True,
        )


def make_inputs(folder: Path, big_t5: bool) -> int:
    """Write model and pictures; returns the size of T5 in MB."""
    run = [sys.executable, "-m", "flux_db"]
    subprocess.run([*run, "tiny-model", folder / "model", "--size", "mid"], check=True, cwd=ROOT, capture_output=True)
    subprocess.run([*run, "demo-pictures", folder / "pictures"], check=True, cwd=ROOT, capture_output=True)
    t5 = folder / "model" / "text_encoder_2"
    if big_t5:
        config = json.loads((t5 / "config.json").read_text()) | {"d_ff": BIG_D_FF}
        (t5 / "config.json").write_bytes(json_bytes(config))
        (t5 / "model.safetensors").write_bytes(draw_all("text_encoder_2", config, seed=0))
    return (t5 / "model.safetensors").stat().st_size // 10**6


def measure(folder: Path, flags: list[str]) -> Figures:
    metrics = folder / "run" / "metrics.jsonl"
    command = [sys.executable, "train_dreambooth_lora_flux.py", "--device", "CPU", "--output_dir", metrics.parent]
    command += ["--pretrained_model_name_or_path", folder / "model", "--instance_data_dir", folder / "pictures"]
    command += ["--instance_prompt", "a photo of sks dog", *flags]
    start = time.monotonic()
    first_step = 0.0
    encode_peak = train_peak = 0
    with (folder / "log").open("w+") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        while process.poll() is None:
            train_peak = max(train_peak, peak_memory(process.pid))
            encode_peak = max([encode_peak, *map(peak_memory, children(process.pid))])
            if not first_step and metrics.exists() and metrics.stat().st_size:
                first_step = time.monotonic() - start
            time.sleep(POLL_SECONDS)
        if process.returncode:
            log.seek(0)
            sys.exit(f"the training failed:\n{log.read()}")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Figures(
        seconds=statistics.median(step["seconds"] for step in steps[1:]),
        first_step=first_step,
        encode_peak=encode_peak,
        train_peak=train_peak,
    )


def peak_memory(pid: int) -> int:
    """In MB, of this process alone: rusage would count its children and what it was forked from. psutil has no peak."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024 // 10**6 if "VmHWM:" in text else 0


def children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    main()
