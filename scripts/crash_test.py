#!/usr/bin/env python
"""Kill a run again and again, resume it each time, and compare it with a run that was left alone.

    python scripts/crash_test.py --kills 200

The tiny model trains with samples, validation loss, --keep_best, TensorBoard and a limit of checkpoints. Two runs are
left alone: the first compiles the step, the second loads it, and both must leave the same files. The same run is then
killed with SIGKILL in turns inside a save, inside a validation round, after some steps and at any time, and resumed
with the same command until it ends; then it is begun anew. Every file of its output folder must be that of the run left
alone, but for the few in MAY_DIFFER. A kill counts as identical if the run ended so.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from small_run import ROOT, keep_one_block

from flux_db.atomic import leftovers
from flux_db.demo.pictures import write_demo_pictures
from flux_db.demo.tiny_model import write_tiny_model
from flux_db.output_folder import REPORT
from flux_db.report import run_page
from flux_db.run import checkpoint, record

STEPS, SAVE_EVERY, VALIDATE_EVERY, KEPT = 22, 5, 4, 3

# Files that two equal runs need not have in common, and why.
MAY_DIFFER = {
    "logs/": "TensorBoard begins a file at every start, named and filled with times",
    "metrics.jsonl": "seconds and memory_mb of each step; all else is compared",
    "train_state.json": "the time it was written; all else is compared",
    "report.html": "shows these; it must be what the other files of its folder give",
}

# What a validation round writes, in this order: a kill is timed by one of them.
ROUND_FILES = ("best_lora.safetensors", "samples/step-*", "samples/step-*/*.png", "samples/grid.png")


@dataclass
class Result:
    kills: Counter = field(default_factory=Counter)
    """By what the run was doing."""
    identical: int = 0
    lost: int = 0
    """Kills after which an earlier checkpoint was gone."""
    ends: int = 0
    """Runs that came to their end and were compared."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and self.identical == self.kills.total() and self.lost == 0


def command(folder: Path) -> list[str]:
    flags = {
        "pretrained_model_name_or_path": folder / "model",
        "instance_data_dir": folder / "pictures",
        "instance_prompt": "a photo of sks dog",
        # encodings and the compiled step are stored by the first run, so that a kill costs seconds, not minutes
        "encode_cache_dir": folder / "cache",
        "compile_cache": "on",
        "compile_cache_dir": folder / "graphs",
        "output_dir": "out",  # below the working directory, so that the settings of all runs are the same
        "resolution": 32,
        "max_sequence_length": 16,
        "rank": 4,
        # LoRA in the last block only: the step compiles in seconds
        "lora_layers": "single_transformer_blocks.0.attn.to_q,single_transformer_blocks.0.proj_out",
        "lora_dropout": 0.1,
        "learning_rate": 0.01,
        "max_train_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "checkpointing_steps": SAVE_EVERY,
        "checkpoints_total_limit": KEPT,
        "lr_scheduler": "cosine",
        "validation_prompt": "a photo of sks dog in a bucket",
        "num_validation_images": 2,
        "validation_inference_steps": 2,
        "validation_steps": VALIDATE_EVERY,
        "validation_data_dir": folder / "held_out",
        "dataloader_num_workers": 0,
        "device": "CPU",
        "report_to": "tensorboard",
        "resume_from_checkpoint": "latest",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "train_dreambooth_lora_flux.py"), *words, "--keep_best"]


def crash_test(folder: Path, kills: int, seed: int = 0) -> Result:
    """Run the whole test below `folder`."""
    write_tiny_model(folder / "model", "tiny")
    keep_one_block(folder / "model" / "transformer")
    write_demo_pictures(folder / "pictures", count=3, size=64)
    write_demo_pictures(folder / "held_out", count=1, size=48)
    _finish(folder, "first")  # fills the caches, so that every later start takes equally long
    started = time.monotonic()
    _finish(folder, "calm")
    seconds = time.monotonic() - started
    calm, shaken = folder / "calm" / "out", folder / "shaken" / "out"
    rng = random.Random(seed)
    moments = itertools.cycle(("save", "round", "steps", "time"))
    result, pending = Result(problems=compare(calm, folder / "first" / "out")), 0
    while result.kills.total() < kills:
        moment, before = next(moments), _newest(shaken)
        process = _start(folder, "shaken")
        if _kill(process, _condition(moment, shaken, seconds, rng)):
            result.kills[moment] += 1
            pending += 1
            result.lost += _newest(shaken) < before
            continue
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {(folder / 'shaken' / 'log').read_text()[-3000:]}")
        pending = _compare_end(calm, shaken, pending, result)
        shutil.rmtree(shaken)
    _finish(folder, "shaken")
    _compare_end(calm, shaken, pending, result)
    return result


# --- processes ---------------------------------------------------------------------------------------------------


def _start(folder: Path, name: str) -> subprocess.Popen:
    """The trainer as a user starts it: what this process has in its environment stays here."""
    place = folder / name
    place.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": os.environ.get("HOME", str(folder)), "LANG": "C.UTF-8"}
    with (place / "log").open("w") as log:
        return subprocess.Popen(command(folder), cwd=place, env=environment, stdout=log, stderr=log)


def _finish(folder: Path, name: str) -> None:
    if code := _start(folder, name).wait():
        raise RuntimeError(f"exit code {code}: {(folder / name / 'log').read_text()[-3000:]}")


def _kill(process: subprocess.Popen, condition: Callable[[], bool]) -> bool:
    """SIGKILL as soon as the condition holds. False if the run ended before."""
    while process.poll() is None and not condition():
        time.sleep(0.001)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return alive


def _condition(moment: str, output: Path, seconds: float, rng: random.Random) -> Callable[[], bool]:
    """What to wait for, from now on."""
    started = time.time_ns()
    seen: set[tuple[Path, int]] = set()
    count = rng.randint(1, 3)

    def saving() -> bool:
        seen.update((path, 0) for path in leftovers(output) if path.is_dir())
        return len(seen) >= count

    pattern = rng.choice(ROUND_FILES)

    def drawing() -> bool:
        with contextlib.suppress(FileNotFoundError):  # a run that goes on removes what it makes again
            files = ((path, path.stat().st_mtime_ns) for path in output.glob(pattern))
            seen.update(entry for entry in files if entry[1] > started)
        return len(seen) >= count

    steps = len(_lines(output)) + rng.randint(1, STEPS // 2)
    end = time.monotonic() + rng.uniform(0.5, 0.7 * seconds)
    return {
        "save": saving,
        "round": drawing,
        "steps": lambda: len(_lines(output)) >= steps,
        "time": lambda: time.monotonic() > end,
    }[moment]


def _lines(output: Path) -> list[str]:
    path = output / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _newest(output: Path) -> int:
    return max((step for step, _ in checkpoint.numbered(output)), default=0)


# --- files -------------------------------------------------------------------------------------------------------


def _compare_end(calm: Path, shaken: Path, kills: int, result: Result) -> int:
    """Compare a run that was killed so often and has ended; returns the kills that still wait for an end: none."""
    problems = compare(calm, shaken)
    result.ends += 1
    result.problems += problems
    result.identical += 0 if problems else kills
    return 0


def compare(calm: Path, shaken: Path) -> list[str]:
    """How the output folder of a run differs from that of one left alone."""
    one, two = _files(calm), _files(shaken)
    problems = [f"{name} is missing" for name in sorted(one - two)]
    problems += [f"{name} is too much" for name in sorted(two - one)]
    problems += [f"{name} differs" for name in sorted(one & two) if _content(calm, name) != _content(shaken, name)]
    for output in (calm, shaken):
        if (output / REPORT).read_text() != run_page.render(record.read_run(output)):
            problems.append(f"{output / REPORT} is not what the other files give")
    return problems


def _files(output: Path) -> set[str]:
    found = {path.relative_to(output).as_posix() for path in output.rglob("*") if not path.is_dir()}
    return {name for name in found if not name.startswith("logs/")}


def _content(output: Path, name: str) -> object:
    data = (output / name).read_bytes()
    if name == "metrics.jsonl":
        return [_without(json.loads(line), "seconds", "memory_mb") for line in data.splitlines()]
    if name == "train_state.json":
        return _without(json.loads(data), "time")
    return b"" if name == REPORT else data


def _without(values: dict, *names: str) -> dict:
    return {name: value for name, value in values.items() if name not in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8, help="how often to kill the run (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = crash_test(Path(folder), arguments.kills, arguments.seed)
    moments = ", ".join(f"{moment} {count}" for moment, count in result.kills.items())
    print(f"{result.kills.total()} kills ({moments}): {result.identical} identical, {result.lost} lost; ", end="")
    print(f"{result.ends} runs came to their end and were compared; {time.monotonic() - started:.0f} s in all")
    print("\n".join(f"compared without: {name} ({why})" for name, why in MAY_DIFFER.items()))
    for problem in result.problems:
        print(f"problem: {problem}")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
