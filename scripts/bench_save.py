#!/usr/bin/env python
"""What a checkpoint costs, and how soon a resumed run takes its first step; on the mid model, 128 px, batch 1, rank 16.

    python scripts/bench_save.py

Prints the share of the time that saving every 50 steps takes, and the seconds to the first step of a fresh second run
and of a resumed one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flux_db.demo.pictures import write_demo_pictures  # noqa: E402
from flux_db.demo.tiny_model import write_tiny_model  # noqa: E402
from flux_db.run import checkpoint  # noqa: E402  a script finds its package beside it

STEPS = 50


def start(folder: Path, output: Path, steps: int, *flags: str) -> subprocess.Popen:
    words = (
        f"--pretrained_model_name_or_path {folder}/model --instance_data_dir {folder}/pictures --resolution 128 "
        f"--max_sequence_length 64 --output_dir {output} --encode_cache_dir {folder}/cache --max_train_steps {steps} "
        f"--checkpointing_steps {STEPS} --dataloader_num_workers 0 --device CPU --report_to none"
    ).split()
    script = str(ROOT / "train_dreambooth_lora_flux.py")
    command = [sys.executable, script, *words, "--instance_prompt", "a photo of sks dog", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def seconds_to_first_step(process: subprocess.Popen, output: Path, rows_before: int) -> float:
    begin = time.monotonic()
    path = output / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) > rows_before:
            return time.monotonic() - begin
        time.sleep(0.02)
    raise RuntimeError(process.stderr.read()[-2000:])


def finish(process: subprocess.Popen) -> None:
    text = process.communicate()[1]
    if process.returncode:
        raise RuntimeError(text[-2000:])


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", "mid")
        write_demo_pictures(folder / "pictures")
        finish(start(folder, folder / "encode", 1))
        fresh = start(folder, folder / "run", STEPS)
        to_first = seconds_to_first_step(fresh, folder / "run", 0)
        finish(fresh)
        resumed = start(folder, folder / "run", STEPS + 5, "--resume_from_checkpoint", "latest")
        to_first_resumed = seconds_to_first_step(resumed, folder / "run", STEPS)
        finish(resumed)
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        step = statistics.median(row["seconds"] for row in rows[1:])
        saved = checkpoint.load(folder / "run" / f"checkpoint-{STEPS}")
        begin = time.monotonic()
        for number in range(10):
            checkpoint.save(folder / "again", number, saved.files)
        save = (time.monotonic() - begin) / 10
    size = sum(len(data) for data in saved.files.values())
    print(f"step {step:.3f} s; writing a checkpoint of {size / 1e6:.1f} MB {save:.3f} s")
    print(f"saving every {STEPS} steps: {100 * save / (STEPS * step):.2f} % of the training time")
    print(f"seconds to the first step: fresh second run {to_first:.1f}, resumed {to_first_resumed:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
