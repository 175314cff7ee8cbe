"""What the training scripts of the small model share: the pictures, the clock, checkpoints.

Everything goes to a work folder (default outputs/small_base). A script that was stopped goes on where it was: random
numbers depend on the seed and the step, and the clock counts only the processor time that was spent training.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flux_db.demo.world import draw, random_scene

WORK = Path("outputs/small_base")
SEED = 0
HELD_OUT_SEED = 1
SIZE = 64


def arguments(description: str, *, minutes: float, **switches: str) -> argparse.Namespace:
    """Flags of a training script; `switches` are its own, with their help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, default=WORK, help="folder for pictures and checkpoints")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="processor time to train on each core; the schedule ends with it"
    )
    parser.add_argument("--threads", type=int, default=2, help="cores to use")
    for name, text in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.work.mkdir(parents=True, exist_ok=True)
    return given


def pictures(work: Path, count: int, seed: int = SEED) -> np.ndarray:
    """The first pictures of a seed as [N, H, W, 3] of bytes, drawn once and then read."""
    for known in work.glob(f"pictures_{seed}_*.npy"):
        if int(known.stem.rpartition("_")[2]) >= count:
            return np.load(known, mmap_mode="r")[:count]
    unfinished = work / f"drawing_{seed}_{count}.npy"
    array = np.lib.format.open_memmap(unfinished, "w+", np.uint8, (count, SIZE, SIZE, 3))
    for i in range(count):
        array[i] = np.asarray(draw(random_scene(seed, i), SIZE))
    array.flush()
    path = work / f"pictures_{seed}_{count}.npy"
    os.replace(unfinished, path)
    return np.load(path, mmap_mode="r")


def to_tensor(array: np.ndarray) -> Tensor:
    """[N, H, W, 3] of bytes -> [N, 3, H, W] in -1..1"""
    return torch.from_numpy(np.array(array)).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def rng_of(step: int, purpose: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[SEED * 1000 + sum(purpose.encode()), step]))


class Clock:
    """How much of the processor's time is spent, whatever else the machine does."""

    def __init__(self, minutes: float, spent: float = 0.0) -> None:
        self.total = minutes * 60
        self._before = spent - time.process_time()

    @property
    def spent(self) -> float:
        return self._before + time.process_time()

    @property
    def progress(self) -> float:
        return self.spent / self.total


class Workers:
    """Processes of one core that each take a part of a batch: they wait for each other once a step only."""

    def __init__(self, work: Path, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._parent = os.getppid()
        torch.set_num_threads(1)
        if count > 1:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{work.resolve()}/meet", rank=rank, world_size=count
            )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_orphan(self) -> bool:
        """Whether the process that started this one was stopped."""
        return os.getppid() != self._parent

    def sum(self, numbers: Tensor) -> Tensor:
        if self.count > 1:
            torch.distributed.all_reduce(numbers)
        return numbers

    def mean(self, numbers: Tensor) -> Tensor:
        return self.sum(numbers).div_(self.count)

    def average_gradients(self, parameters: list[nn.Parameter], loss: float, progress: float) -> tuple[float, float]:
        """Gradients and loss become the mean of all workers, and the progress that of the first one's clock."""
        parameters = [p for p in parameters if p.grad is not None]
        mine = progress * self.count if self.is_first else 0.0
        flat = self.mean(torch.cat([*(p.grad.flatten() for p in parameters), torch.tensor([loss, mine])]))
        for p, part in zip(parameters, flat[:-2].split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(part.view_as(p))
        return float(flat[-2]), float(flat[-1])


def run_workers(train: Callable[..., None], given: argparse.Namespace, *more: Any) -> None:
    """Call train(rank, given, ...) in as many processes as there are cores to use."""
    (given.work / "meet").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (given, *more), nprocs=given.threads)


def learning_rate(peak: float, step: int, progress: float, warmup: int = 100) -> float:
    return peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def save(path: Path, state: dict) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load(path: Path) -> dict | None:
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
