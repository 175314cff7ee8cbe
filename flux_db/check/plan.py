"""What a run would do with its pictures: sizes, steps, epochs, and how often each picture is seen."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flux_db.data.dataset import Dataset, Example, number_of_devices, total_steps
from flux_db.settings.concepts import Concept, concepts_of
from flux_db.settings.derived import global_batch
from flux_db.settings.schema import Config
from flux_db.size import Size


@dataclass(frozen=True, kw_only=True)
class ConceptPlan:
    """What a run does with the pictures of one concept."""

    concept: Concept
    pictures: int
    examples: int
    """In an epoch: each picture at each of its sizes, with its repeats."""
    seen: tuple[int, int]
    """How often a picture is seen at least and at most, in all its sizes."""


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
    concepts: tuple[ConceptPlan, ...] = ()

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
    shown = one_each(dataset)
    concepts = tuple(_concept_plans(config, dataset, steps, batch))
    return Plan(
        devices=devices,
        batch=batch,
        examples=examples,
        pictures=len({example.picture.path for example in shown}),
        steps=steps,
        seen=(min(concept.seen[0] for concept in concepts), max(concept.seen[1] for concept in concepts)),
        sizes=dict(collections.Counter(example.size for example in shown)),
        concepts=concepts,
    )


def _concept_plans(config: Config, dataset: Dataset, steps: int, batch: int) -> Iterator[ConceptPlan]:
    counts = None
    if len(dataset.sizes) > 1:
        counts = dataset.draw_order(config.output.seed, batch).counts(steps)
    for number, concept in enumerate(concepts_of(config)):
        own = [i for i, example in enumerate(dataset.examples) if example.concept == number]
        paths = {dataset.examples[i].picture.path for i in own}
        if counts is None:
            seen = times_seen(len(dataset.examples), concept.repeats, steps * batch)
        else:
            drawn: collections.Counter[Path] = collections.Counter()
            for i in own:
                drawn[dataset.examples[i].picture.path] += int(counts[i])
            seen = min(drawn.values(), default=0), max(drawn.values(), default=0)
        yield ConceptPlan(concept=concept, pictures=len(paths), examples=len(own), seen=seen)


def one_each(dataset: Dataset) -> list[Example]:
    """The examples of the concepts, without their repeats: each picture once at each of its sizes."""
    return list({(example.picture.path, example.size): example for example in dataset.examples}.values())


def times_seen(examples: int, repeats: int, draws: int) -> tuple[int, int]:
    """How often a picture is drawn at least and at most, if each is `repeats` times among the examples."""
    rounds, rest = divmod(draws, examples)
    return rounds * repeats + max(0, rest - (examples - repeats)), rounds * repeats + min(rest, repeats)
