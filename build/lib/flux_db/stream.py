"""Which example, which noise, which timestep: pure functions of the seed and a position in the endless example stream.

There is no state to save. Position k is the k-th example that the run trains on, counted over all devices and
accumulation steps, so that the same seed sees the same examples however a batch is dealt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np


class Purpose(IntEnum):
    """Each kind of draw has a stream of its own."""

    ORDER = 0
    NOISE = 1
    POSTERIOR = 2
    TIMESTEP = 3
    FLIP = 4
    CROP = 5
    DROPOUT = 6
    LORA = 7
    SAMPLE = 8
    CIRCLE = 9
    PASS = 10
    BATCH_ORDER = 11
    CACHED_CROP = 12
    CAPTION = 13
    CLASS_PICTURE = 14
    VALIDATION = 20


def generator(seed: int, position: int, purpose: Purpose, stream_id: int = 0) -> np.random.Generator:
    """The random numbers of one purpose at one position; `stream_id` is 0 for the subject and 1 for the class."""
    return np.random.Generator(np.random.Philox(key=[seed, position], counter=[0, 0, stream_id, int(purpose)]))


# A dropout key is so many whole numbers below so much; model/dropout.py has the arithmetic that this suits.
DROPOUT_NUMBERS, DROPOUT_MODULUS = 3, 1019


def dropout_key(seed: int, position: int, stream_id: int = 0) -> np.ndarray:
    """[DROPOUT_NUMBERS] from which the LoRA dropout masks of one example are made."""
    rng = generator(seed, position, Purpose.DROPOUT, stream_id)
    return rng.integers(0, DROPOUT_MODULUS, DROPOUT_NUMBERS).astype(np.float32)


def item(seed: int, position: int, count: int, stream_id: int = 0) -> int:
    """Which of `count` pictures is at a position: each epoch is a new permutation of all of them."""
    epoch, place = divmod(position, count)
    return int(_permutation(seed, epoch, count, stream_id)[place])


@lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, count: int, stream_id: int) -> np.ndarray:
    return generator(seed, epoch, Purpose.ORDER, stream_id).permutation(count)


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How a global batch is dealt out over devices and accumulation steps."""

    batch: int
    accumulation: int = 1
    world_size: int = 1
    rank: int = 0

    @property
    def global_batch(self) -> int:
        return self.batch * self.accumulation * self.world_size

    def positions(self, micro_step: int) -> range:
        """The stream positions of this rank's micro-step."""
        step, part = divmod(micro_step, self.accumulation)
        start = step * self.global_batch + (part * self.world_size + self.rank) * self.batch
        return range(start, start + self.batch)

    def is_boundary(self, micro_step: int) -> bool:
        """True on the last micro-step before the weights change."""
        return micro_step % self.accumulation == self.accumulation - 1
