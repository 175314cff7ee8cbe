"""Which picture is at which position of the example stream: pure functions of the seed, without state.

With one size it is the stream's own order: every epoch is a new permutation, and batches run across its end. With
several sizes every global batch (over devices and accumulation) is of one size and full:

- After E epochs a size with n pictures has had ceil(E * n / batch) batches. So in the long run every picture is seen
  equally often; after E epochs E times or once more, if its size has at least as many pictures as the global batch.
- A size goes through its pictures in a fixed circle, and an epoch takes the next piece of it, shuffled. So within a
  size the counts of one epoch, and of any row of epochs, differ by at most one. Over all sizes those of one epoch
  differ by at most two, because a size may have taken its share early.
- The batches of an epoch come in a shuffled order.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flux_db import stream
from flux_db.stream import Purpose


@dataclass(frozen=True, kw_only=True)
class DrawOrder:
    """The order of a run's examples."""

    seed: int
    global_batch: int
    groups: tuple[tuple[int, ...], ...]
    """The examples of each size, by number."""

    def item(self, position: int) -> int:
        """The number of the example at a position."""
        if len(self.groups) == 1:
            return self.groups[0][stream.item(self.seed, position, len(self.groups[0]))]
        step, place = divmod(position, self.global_batch)
        epoch = self.epoch(step)
        return int(_batches(self, epoch)[step - self.steps(epoch), place])

    def steps(self, epochs: int) -> int:
        """Optimizer steps of so many epochs from the start. The last batch of each size is filled up."""
        return sum(_batches_of(len(group), epochs, self.global_batch) for group in self.groups)

    def counts(self, steps: int) -> np.ndarray:
        """How often each example is drawn in the first steps, if there are several sizes."""
        drawn = np.zeros(sum(map(len, self.groups)), np.int64)
        epoch = self.epoch(steps)
        for number, group in enumerate(self.groups):
            rounds, rest = divmod(_batches_of(len(group), epoch, self.global_batch) * self.global_batch, len(group))
            drawn[list(group)] += rounds
            drawn[_circle(self, number)[:rest]] += 1
        np.add.at(drawn, _batches(self, epoch)[: steps - self.steps(epoch)], 1)
        return drawn

    def epoch(self, step: int) -> int:
        """The epoch that a step, counted from 0, lies in."""
        pictures = sum(map(len, self.groups))
        latest = step * self.global_batch // pictures + 1  # begins after the step, for no epoch has too few batches
        return bisect_right(range(latest + 1), step, key=self.steps) - 1


def _batches_of(pictures: int, epochs: int, batch: int) -> int:
    return -(-epochs * pictures // batch)  # rounded up


def _circle(order: DrawOrder, number: int) -> np.ndarray:
    """The circle in which a size goes through its pictures."""
    return stream.generator(order.seed, number, Purpose.CIRCLE).permutation(order.groups[number])


@lru_cache(maxsize=8)
def _batches(order: DrawOrder, epoch: int) -> np.ndarray:
    """[batches of the epoch, global batch] numbers of examples."""
    size, rows = order.global_batch, []
    for number, group in enumerate(order.groups):
        first, last = (_batches_of(len(group), e, size) * size for e in (epoch, epoch + 1))
        items = _circle(order, number)[np.arange(first, last) % len(group)]
        rng = stream.generator(order.seed, epoch, Purpose.PASS, stream_id=number)
        for start in range(0, len(items), len(group)):
            rng.shuffle(items[start : start + len(group)])  # each time round by itself: no picture comes twice in a row
        rows.append(items.reshape(-1, size))
    return stream.generator(order.seed, epoch, Purpose.BATCH_ORDER).permutation(np.concatenate(rows))
