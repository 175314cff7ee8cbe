"""What a run would do with its pictures: sizes, steps, epochs, and how often each picture is seen."""

from __future__ import annotations

import collections
import os
from dataclasses import dataclass

from flux_db.config import Config, global_batch, total_steps
from flux_db.dataset import Dataset, Sample


@dataclass(frozen=True, kw_only=True)
class Plan:
    cards: int
    batch: int
    """Pictures of the subject behind one optimizer step, over all cards."""
    samples: int
    """Of the subject in an epoch, with their repeats."""
    pictures: int
    steps: int
    seen: tuple[int, int]
    """How often a picture is seen at least and at most."""
    sizes: dict[tuple[int, int], int]
    """Height and width of every graph to compile -> number of pictures."""

    @property
    def steps_per_epoch(self) -> float:
        return self.samples / self.batch

    @property
    def epochs(self) -> float:
        return self.steps * self.batch / self.samples


def make(config: Config, dataset: Dataset) -> Plan:
    cards = number_of_cards()
    batch, samples = global_batch(config, cards), len(dataset.samples)
    steps = total_steps(config, samples, batch)
    pictures = one_each(dataset)
    return Plan(
        cards=cards,
        batch=batch,
        samples=samples,
        pictures=len(pictures),
        steps=steps,
        seen=times_seen(samples, config.data.repeats, steps * batch),
        sizes=dict(collections.Counter(size_of(sample, config) for sample in pictures)),
    )


def size_of(sample: Sample, config: Config) -> tuple[int, int]:
    """Height and width at which the model sees a sample."""
    return config.data.resolution, config.data.resolution


def one_each(dataset: Dataset) -> list[Sample]:
    """The samples of the subject, without their repeats."""
    return list({sample.picture.path: sample for sample in dataset.samples}.values())


def number_of_cards() -> int:
    """As msrun tells its processes; 1 without it."""
    return int(os.environ.get("MS_WORKER_NUM", "1"))


def times_seen(samples: int, repeats: int, draws: int) -> tuple[int, int]:
    """How often a picture is drawn at least and at most, if each stands `repeats` times among the samples."""
    rounds, rest = divmod(draws, samples)
    return rounds * repeats + max(0, rest - (samples - repeats)), rounds * repeats + min(rest, repeats)
