"""What a run would do with its pictures: sizes, steps, epochs, and how often each picture is seen."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path

from flux_db.data.dataset import Dataset, Example, number_of_devices, total_steps
from flux_db.settings.derived import global_batch
from flux_db.settings.schema import Config
from flux_db.size import Size


@dataclass(frozen=True, kw_only=True)
class Plan:
    devices: int
    batch: int
    """Pictures of the subject behind one optimizer step, over all devices."""
    examples: int
    """Of the subject in an epoch, with their repeats."""
    pictures: int
    steps: int
    seen: tuple[int, int]
    """How often a picture is seen at least and at most."""
    sizes: dict[Size, int]
    """Of every graph to compile -> number of pictures."""

    @property
    def steps_per_epoch(self) -> float:
        """On average: an epoch may end within a batch, and with several sizes its batches are filled up."""
        return self.examples / self.batch

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch


def make(config: Config, dataset: Dataset) -> Plan:
    devices = number_of_devices()
    batch, examples = global_batch(config, devices), len(dataset.examples)
    steps = total_steps(config, dataset, batch)
    pictures = one_each(dataset)
    return Plan(
        devices=devices,
        batch=batch,
        examples=examples,
        pictures=len(pictures),
        steps=steps,
        seen=_times_seen(config, dataset, steps, batch),
        sizes=dict(collections.Counter(example.size for example in pictures)),
    )


def _times_seen(config: Config, dataset: Dataset, steps: int, batch: int) -> tuple[int, int]:
    if len(dataset.sizes) == 1:
        return times_seen(len(dataset.examples), config.data.repeats, steps * batch)
    counts: collections.Counter[Path] = collections.Counter()
    for example, count in zip(
        dataset.examples, dataset.draw_order(config.output.seed, batch).counts(steps), strict=True
    ):
        counts[example.picture.path] += int(count)
    return min(counts.values()), max(counts.values())


def one_each(dataset: Dataset) -> list[Example]:
    """The examples of the subject, without their repeats."""
    return list({example.picture.path: example for example in dataset.examples}.values())


def times_seen(examples: int, repeats: int, draws: int) -> tuple[int, int]:
    """How often a picture is drawn at least and at most, if each is `repeats` times among the examples."""
    rounds, rest = divmod(draws, examples)
    return rounds * repeats + max(0, rest - (examples - repeats)), rounds * repeats + min(rest, repeats)
