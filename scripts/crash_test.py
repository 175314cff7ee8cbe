#!/usr/bin/env python
"""Kill a run again and again, resume it each time, and compare it with a run that was left alone.

    python scripts/crash_test.py --kills 50

The tiny model trains to the end once. Then the same run is killed with SIGKILL at random moments, every second time
inside a save. After each kill the newest checkpoint must hold the very bytes that the undisturbed run had at that step;
in the end the LoRA file and the metrics must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flux_db import checkpoint  # noqa: E402  a script finds its package beside it
from flux_db.atomic import leftovers  # noqa: E402
from flux_db.demo_pictures import write_demo_pictures  # noqa: E402
from flux_db.tiny_model import write_tiny_model  # noqa: E402

LORA = "pytorch_lora_weights.safetensors"
SAVE_EVERY = 5
# As a user's, whatever MindSpore has set in the process that calls crash_test()
BARE = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


@dataclass
class Result:
    kills: int = 0
    in_save: int = 0
    identical: int = 0
    lost: int = 0
    """Kills after which more than the steps since the last checkpoint were gone."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and self.identical == self.kills and self.lost == 0


def command(folder: Path, output: Path, steps: int) -> list[str]:
    flags = {
        "pretrained_model_name_or_path": folder / "model",
        "instance_data_dir": folder / "pictures",
        "instance_prompt": "a photo of sks dog",
        "encode_cache_dir": folder / "cache",
        "output_dir": output,
        "resolution": 32,
        "max_sequence_length": 16,
        "rank": 4,
        # LoRA in the last block only: the step compiles in seconds
        "lora_layers": "single_transformer_blocks.1.attn.to_q,single_transformer_blocks.1.proj_out",
        "lora_dropout": 0.1,
        "max_train_steps": steps,
        "gradient_accumulation_steps": 2,
        "checkpointing_steps": SAVE_EVERY,
        "lr_scheduler": "cosine",
        "dataloader_num_workers": 0,
        "device": "CPU",
        "report_to": "none",
        "resume_from_checkpoint": "latest",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "train_dreambooth_lora_flux.py"), *words]


def crash_test(folder: Path, kills: int, seed: int = 0) -> Result:
    """Run the whole test below `folder`. A run that comes to its end between two kills is compared and begun anew."""
    steps = max(30, min(8 * kills, 200))
    write_tiny_model(folder / "model", "tiny")
    write_demo_pictures(folder / "pictures", count=3, size=64)
    _finish(command(folder, folder / "first", steps=1))  # fills the cache, so that every later start takes equally long
    calm, shaken = folder / "calm", folder / "shaken"
    started = time.monotonic()
    _finish(command(folder, calm, steps))
    seconds = time.monotonic() - started
    rng = random.Random(seed)
    result = Result()
    while result.kills < kills:
        before = _newest(shaken)
        process = subprocess.Popen(
            command(folder, shaken, steps), env=BARE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        in_save = result.kills % 2 == 1
        if not _kill(process, shaken, None if in_save else rng.uniform(0.5, seconds)):
            _finished(calm, shaken, process.returncode, result)
            continue
        result.kills += 1
        result.in_save += in_save
        _compare_checkpoint(calm, shaken, before, result)
    _finish(command(folder, shaken, steps))
    _compare_end(calm, shaken, result)
    return result


def _finished(calm: Path, shaken: Path, code: int, result: Result) -> None:
    if code:
        raise RuntimeError(f"the run failed with exit code {code} after {result.kills} kills")
    _compare_end(calm, shaken, result)
    shutil.rmtree(shaken)


def _finish(words: list[str]) -> None:
    done = subprocess.run(words, env=BARE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}:\n{done.stderr[-3000:]}")


def _kill(process: subprocess.Popen, output: Path, delay: float | None) -> bool:
    """SIGKILL after a delay; without one, as soon as a save is under way. False if the run ended before."""
    end = time.monotonic() + (120 if delay is None else delay)
    while time.monotonic() < end and process.poll() is None:
        if delay is None and output.is_dir() and any(path.is_dir() for path in leftovers(output)):
            break
        time.sleep(0.0005 if delay is None else 0.01)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return alive


def _newest(output: Path) -> int:
    return max((step for step, _ in checkpoint.numbered(output)), default=0) if output.is_dir() else 0


def _compare_checkpoint(calm: Path, shaken: Path, before: int, result: Result) -> None:
    found, _ = checkpoint.find_latest(shaken) if shaken.is_dir() else (None, [])
    if (found.step if found else 0) < before:
        result.lost += 1
    if found is None:
        result.identical += 1  # killed before the first checkpoint: nothing to compare, nothing lost
        return
    names = (LORA, "optimizer.safetensors")
    expected = checkpoint.load(calm / f"checkpoint-{found.step}")
    same = all(found.files[name] == expected.files[name] for name in names)
    result.identical += same
    if not same:
        result.problems.append(f"checkpoint {found.step} differs from the undisturbed run's")


def _compare_end(calm: Path, shaken: Path, result: Result) -> None:
    if (calm / LORA).read_bytes() != (shaken / LORA).read_bytes():
        result.problems.append("the final LoRA file differs")
    if _metrics(calm) != _metrics(shaken):
        result.problems.append("the metrics differ")


def _metrics(output: Path) -> list[dict]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in ("seconds", "memory_mb")} for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="how often to kill the run (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = crash_test(Path(folder), arguments.kills, arguments.seed)
    print(f"{result.kills} kills ({result.in_save} inside a save): {result.identical} identical, {result.lost} lost")
    for problem in result.problems:
        print(f"problem: {problem}")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
