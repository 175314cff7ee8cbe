"""What the training scripts of the small model share: the pictures, the clock, checkpoints.

Everything goes to a work folder (default outputs/small_base). A script that was stopped goes on where it was: random
numbers depend on the seed and the step, and the clock counts only the time that was spent training.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import numpy as np
import torch

from flux_db.demo.world import draw, random_scene

WORK = Path("outputs/small_base")
SEED = 0
HELD_OUT_SEED = 1
SIZE = 64


def arguments(description: str, *, minutes: float, **switches: str) -> argparse.Namespace:
    """Flags of a training script; `switches` are its own, with their help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, default=WORK, help="folder for pictures and checkpoints")
    parser.add_argument("--minutes", type=float, default=minutes, help="time to train; the schedule ends with it")
    parser.add_argument("--threads", type=int, default=2, help="cores to use")
    for name, text in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.work.mkdir(parents=True, exist_ok=True)
    return given


def pictures(work: Path, count: int, seed: int = SEED) -> np.ndarray:
    """The first pictures of a seed as [N, H, W, 3] of bytes, drawn once and then read."""
    path = work / f"pictures_{seed}_{count}.npy"
    if not path.exists():
        array = np.lib.format.open_memmap(work / "drawing.npy", "w+", np.uint8, (count, SIZE, SIZE, 3))
        for i in range(count):
            array[i] = np.asarray(draw(random_scene(seed, i), SIZE))
        array.flush()
        os.replace(work / "drawing.npy", path)
    return np.load(path, mmap_mode="r")


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """[N, H, W, 3] of bytes -> [N, 3, H, W] in -1..1"""
    return torch.from_numpy(np.array(array)).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def rng_of(step: int, purpose: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[SEED * 1000 + sum(purpose.encode()), step]))


class Clock:
    """How much of the time is spent, whatever else the machine does. Look at it at every step."""

    def __init__(self, minutes: float, spent: float = 0.0) -> None:
        self.total = minutes * 60
        self._spent = spent
        self._last = time.monotonic()

    @property
    def spent(self) -> float:
        now = time.monotonic()
        # a longer pause: the process was stopped, or the machine slept
        self._spent += min(now - self._last, 20.0)
        self._last = now
        return self._spent

    @property
    def progress(self) -> float:
        return self.spent / self.total


def learning_rate(peak: float, step: int, progress: float, warmup: int = 100) -> float:
    return peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def save(path: Path, state: dict) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load(path: Path) -> dict | None:
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
