"""Several devices on the CPU: is it the same run, how long does the launch take, what does the all-reduce cost?

python scripts/bench_devices.py            # everything, about ten minutes on two cores
python scripts/bench_devices.py --equal    # only the comparison of 1, 2 and 4 processes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from flux_db.output_folder import LORA_FILE
from flux_db.training.launch import Devices, Supervisor

ROOT = Path(__file__).resolve().parents[1]
GLOBAL_BATCH = 4
REPEATS = 50


@dataclass(frozen=True, kw_only=True)
class Run:
    output: Path
    first_step: float
    """Seconds from the start of the script to the first line of metrics."""
    seconds: float
    """Median of a step, without the first."""

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return load_file(self.output / LORA_FILE)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in _rows(self.output) if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equal", action="store_true", help="only compare the results")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.length:
        time_all_reduce(arguments.length)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare_results(Path(folder))
    if not arguments.equal:
        with tempfile.TemporaryDirectory() as folder:
            measure_times(Path(folder))


def compare_results(folder: Path) -> None:
    make_inputs(folder, "tiny")
    flags = ["--resolution", "32", "--max_sequence_length", "16", "--learning_rate", "1e-3"]
    reference = train(folder, "one", 1, GLOBAL_BATCH, [*flags, "--max_train_steps", "10"])
    print("| 10 steps of 4 pictures on | largest difference of a weight from one device | of a loss (relative) |")
    print("|---|---|---|")
    for devices in (2, 4):
        run = train(folder, f"{devices}", devices, GLOBAL_BATCH // devices, [*flags, "--max_train_steps", "10"])
        report(f"{devices} devices x batch {GLOBAL_BATCH // devices}", run, reference)
    run = train(folder, "sharded", 2, 2, [*flags, "--max_train_steps", "10", "--shard_base"])
    report("2 devices, `--shard_base`", run, reference)
    train(folder, "moved", 2, 2, [*flags, "--max_train_steps", "5"])
    more = [*flags, "--max_train_steps", "10", "--resume_from_checkpoint", "latest"]
    report("2 devices for 5 steps, then 1 device", train(folder, "moved", 1, GLOBAL_BATCH, more), reference)
    prior = ["--with_prior_preservation", "--class_prompt", "a dog", "--num_class_images", "3"]
    prior += ["--validation_inference_steps", "2", "--sample_batch_size", "1", "--max_train_steps", "5"]
    runs = []
    for devices in (1, 2):
        classes = ["--class_data_dir", str(folder / f"class{devices}")]
        runs.append(train(folder, f"prior{devices}", devices, GLOBAL_BATCH // devices, [*flags, *prior, *classes]))
    report("2 devices, with class pictures, 5 steps", runs[1], runs[0])
    drawn = [[path.read_bytes() for path in sorted((folder / f"class{n}").iterdir())] for n in (1, 2)]
    print(
        f"class pictures drawn by one and by two devices: {'the same bytes' if drawn[0] == drawn[1] else 'they differ'}"
    )


def report(name: str, run: Run, reference: Run) -> None:
    weights, expected = run.weights, reference.weights
    weight = max(float(np.abs(weights[key] - expected[key]).max()) for key in expected)
    loss = max(abs(a / b - 1) for a, b in zip(run.losses, reference.losses, strict=True))
    print(f"| {name} | {weight:.1e} | {loss:.1e} |", flush=True)


def measure_times(folder: Path) -> None:
    make_inputs(folder, "mid")
    flags = ["--resolution", "128", "--max_sequence_length", "64", "--rank", "16", "--max_train_steps", "30"]
    train(folder, "encode", 1, 1, [*flags, "--max_train_steps", "1"])
    runs = {devices: train(folder, f"{devices}", devices, 1, flags) for devices in (1, 2)}
    print("\n| Processes | script start to first step | s/step |\n|---|---|---|")
    for devices, run in runs.items():
        print(f"| {devices} | {run.first_step:.1f} s | {run.seconds:.3f} |", flush=True)
    length = sum(value.size for value in runs[2].weights.values()) + 2
    with Supervisor(folder / "logs") as supervisor:
        code = supervisor.run_workers([__file__, "--length", str(length)], Devices(devices=2), 0)
    if code:
        sys.exit(code)
    text = (folder / "logs" / "worker_0.log").read_text()
    seconds = float(text.partition("all-reduce takes ")[2].split()[0])
    print(
        f"\nall-reduce of {length} numbers: {seconds:.4f} s, {seconds / runs[2].seconds:.1%} of a step of 2 processes"
    )


def time_all_reduce(length: int) -> None:
    """In a worker: the same operator on a vector of the same length as in the training step."""
    from flux_db.model import runtime
    from flux_db.settings.schema import RuntimeConfig

    here = runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))
    values = np.ones(length, np.float32)
    here.sum(values)
    times = []
    for _ in range(REPEATS):
        here.barrier()
        start = time.monotonic()
        here.sum(values)
        times.append(time.monotonic() - start)
    print(f"all-reduce takes {statistics.median(times)} s")


def make_inputs(folder: Path, size: str) -> None:
    run = [sys.executable, "-m", "flux_db"]
    subprocess.run([*run, "tiny-model", folder / "model", "--size", size], check=True, cwd=ROOT, capture_output=True)
    subprocess.run([*run, "demo-pictures", folder / "pictures"], check=True, cwd=ROOT, capture_output=True)


def train(folder: Path, name: str, devices: int, batch: int, flags: list[str]) -> Run:
    """The launch script for so many devices, on the CPU."""
    output, metrics = folder / name, folder / name / "metrics.jsonl"
    script = ROOT / "scripts" / ("train_multi.sh" if devices > 1 else "train_single.sh")
    command = ["bash", script, "--device", "CPU", "--output_dir", output, "--report_to", "none"]
    command += ["--pretrained_model_name_or_path", folder / "model", "--instance_data_dir", folder / "pictures"]
    command += ["--instance_prompt", "a photo of sks dog", "--encode_cache_dir", folder / "cache"]
    command += ["--train_batch_size", str(batch), *flags]
    start = time.monotonic()
    first_step = 0.0
    environment = os.environ | {"DEVICES": str(devices), "PYTHON": sys.executable}
    with (
        (folder / f"{name}.log").open("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        while process.poll() is None:
            if not first_step and metrics.exists() and metrics.stat().st_size:
                first_step = time.monotonic() - start
            time.sleep(0.1)
        if process.returncode:
            log.seek(0)
            sys.exit(f"the training on {devices} devices failed:\n{log.read()}")
    seconds = statistics.median([row["seconds"] for row in _rows(output) if "loss" in row][1:] or [0.0])
    return Run(output=output, first_step=first_step, seconds=seconds)


def _rows(output: Path) -> list[dict]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
