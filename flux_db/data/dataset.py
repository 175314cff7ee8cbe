"""What there is to train on: the pictures of subject and class with their prompts, decided once and in order."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flux_db.data import buckets
from flux_db.data.draw_order import DrawOrder
from flux_db.data.masks import Mask
from flux_db.data.pictures import Picture
from flux_db.data.selection import (
    Subject,
    Survey,
    held_out_pictures,
    masks_in_use,
    read_subjects,
    sound_class_pictures,
    trained_pictures,
)
from flux_db.errors import UserError
from flux_db.problem import Kind, Problem
from flux_db.settings.concepts import Concept, concepts_of
from flux_db.settings.preserved import preserved_prompt
from flux_db.settings.schema import Config
from flux_db.size import Size
from flux_db.stream import Purpose, generator


@dataclass(frozen=True, kw_only=True)
class Example:
    """A picture, the prompt it is trained with, its size, and where it is cropped when its latents are cached."""

    picture: Picture
    prompt: str
    crop: tuple[float, float]
    more_crops: tuple[tuple[float, float], ...] = ()
    """With --cache_crops."""
    size: Size
    """What it is cropped to."""
    mask: Mask | None = None
    """None: all of it counts."""
    concept: int = 0
    """Number of its concept."""
    weight: float = 1.0
    """Factor on its loss."""

    @property
    def versions(self) -> tuple[Example, ...]:
        """The same example once for each of its crops."""
        return tuple(replace(self, crop=crop, more_crops=()) for crop in (self.crop, *self.more_crops))


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """`examples` are of the subject; `class_examples` are empty without prior preservation."""

    examples: tuple[Example, ...]
    class_examples: tuple[Example, ...] = ()
    """Each is cropped to the size of the subject's example that it is drawn with."""
    held_out: tuple[Example, ...] = ()
    """For the validation loss; not trained on, and no part of the fingerprint."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """Every distinct prompt, in order of appearance."""
        return tuple(dict.fromkeys(s.prompt for s in (*self.examples, *self.class_examples, *self.held_out)))

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """Every size in use, from wide to tall."""
        return tuple(sorted({s.size for s in self.examples}))

    @cached_property
    def masked(self) -> bool:
        """Whether the loss is weighted by masks."""
        return any(s.mask for s in self.examples)

    @cached_property
    def weighted(self) -> bool:
        """Whether every latent has a weight of its loss: by masks or by concepts."""
        return self.masked or self.is_of_several or any(s.weight != 1 for s in self.examples)

    @cached_property
    def is_of_several(self) -> bool:
        """Whether there are several concepts."""
        return any(s.concept for s in self.examples)

    def draw_order(self, seed: int, global_batch: int) -> DrawOrder:
        """In which order the examples are drawn."""
        groups = tuple(tuple(i for i, s in enumerate(self.examples) if s.size == size) for size in self.sizes)
        return DrawOrder(seed=seed, global_batch=global_batch, groups=groups)

    def fingerprint(self) -> str:
        """Changes with any picture, caption, crop, shape or mask."""
        digest = hashlib.sha256()
        has_sizes = len({s.size for s in self.examples if s.size.height == s.size.width}) > 1
        for s in (*self.examples, *self.class_examples):
            # what is at its default leaves no trace, so that checkpoints from before there was a choice still fit
            height, width = s.size
            extra = [s.more_crops] if s.more_crops else []
            extra += [tuple(s.size)] if height != width or has_sizes else []
            extra += [s.mask.digest] if s.mask else []
            digest.update(f"{s.picture.digest} {s.prompt!r} {s.crop}{''.join(f' {e}' for e in extra)}\n".encode())
        return digest.hexdigest()


def preserved_prompts(config: Config, dataset: Dataset) -> list[str]:
    """Every distinct prompt of --preserve_class."""
    concepts = concepts_of(config)
    found = (preserved_prompt(example.prompt, concepts[example.concept]) for example in dataset.examples)
    return [prompt for prompt in dict.fromkeys(found) if prompt is not None]


def number_of_devices() -> int:
    """As msrun sets it for its processes; 1 without it."""
    given = os.environ.get("MS_WORKER_NUM", "1")
    if not re.fullmatch("[1-9][0-9]{0,5}", given):
        raise UserError(f"MS_WORKER_NUM={given}: msrun sets this variable to the number of devices; unset it")
    return int(given)


def read_dataset(config: Config, seen: Survey | None = None) -> tuple[Dataset, list[Problem]]:
    """The data of a run, and warnings about it. Class pictures beyond --num_class_images are left out.

    `seen`: the pictures of the concepts, if they were looked at already.
    """
    subjects = (seen.subjects if seen else None) or read_subjects(config)
    trained = [trained_pictures(config, subject) for subject in subjects]
    sizes = choose_all_sizes(config, subjects)
    examples: list[Example] = []
    validation: list[Example] = []
    warnings: list[Problem] = []
    for number, (subject, pictures) in enumerate(zip(subjects, trained, strict=True)):
        concept, masks = subject.concept, masks_in_use(config, subject.concept, subject.found.folder, pictures)
        held_out = held_out_pictures(config, subject)
        warnings += [*subject.inspection.warnings, *_scaled_up(config, concept, pictures, sizes)]
        warnings += [*masks.warnings, *held_out.warnings]
        known = {p.digest for p in pictures}
        twice = [p for p in held_out.pictures if p.digest in known]
        warnings += [Problem("held out, but also trained on", path=p.path) for p in twice]
        for picture in pictures:
            own = _example(picture, _prompt(picture, concept), config, masks.by_picture.get(picture.path))
            own = replace(own, concept=number, weight=concept.weight)
            for size in sizes_of(picture.size, concept, sizes):
                examples += [replace(own, size=size)] * concept.repeats
        validation += [_held_out(picture, concept, number, config) for picture in held_out.pictures]
    class_examples: list[Example] = []
    if config.data.with_prior_preservation:
        pictures = sound_class_pictures(config)[: config.data.num_class_images]
        class_examples = [_example(p, config.data.class_prompt, config) for p in pictures]
    dataset = Dataset(examples=tuple(examples), class_examples=tuple(class_examples), held_out=tuple(validation))
    return dataset, warnings


def _prompt(picture: Picture, concept: Concept) -> str:
    return concept.fill_trigger(picture.caption or concept.raw_prompt)


def _held_out(picture: Picture, concept: Concept, number: int, config: Config) -> Example:
    """Cropped in the middle, so that the validation loss does not depend on --seed."""
    size = Size.square(config.data.resolution)
    return Example(picture=picture, prompt=_prompt(picture, concept), crop=(0.5, 0.5), size=size, concept=number)


def total_steps(config: Config, dataset: Dataset, batch: int) -> int:
    """Optimizer steps of the run. Epochs that end within a global batch are rounded up to a whole one."""
    if config.optim.max_train_steps is not None:
        return config.optim.max_train_steps
    return dataset.draw_order(config.output.seed, batch).steps(config.optim.num_train_epochs)


def choose_all_sizes(config: Config, subjects: Sequence[Subject]) -> dict[int, list[Size]]:
    """Side of the square of the same area -> the sizes to crop to, chosen by the pictures of all concepts that have it.

    So concepts share their graphs.
    """
    pictures: dict[int, list[Picture]] = {}
    for subject in subjects:
        for side in subject.concept.resolutions:
            pictures.setdefault(side, []).extend(trained_pictures(config, subject))
    return {side: choose_sizes(config, side, of_side) for side, of_side in pictures.items()}


def choose_sizes(config: Config, side: int, pictures: Sequence[Picture]) -> list[Size]:
    """The sizes of about `side` squared pixels that pictures are cropped to."""
    data = config.data
    if data.aspect_ratio_buckets is None:
        return [Size.square(side)]
    if data.aspect_ratio_buckets.strip() == buckets.AUTO:
        return buckets.choose(side, [p.size for p in pictures], data.max_buckets)
    return buckets.parse(data.aspect_ratio_buckets)


def sizes_of(picture: Size, concept: Concept, sizes: Mapping[int, Sequence[Size]]) -> list[Size]:
    """The sizes at which a picture is shown: for each resolution the one of nearest shape.

    Of several resolutions those are left out to which the picture would be scaled up; the smallest always stays.
    """
    nearest = [buckets.nearest(picture, sizes[side]) for side in sorted(concept.resolutions)]
    return [nearest[0], *(size for size in nearest[1:] if not _is_scaled_up(picture, size))]


def _is_scaled_up(picture: Size, size: Size) -> bool:
    return picture.width < size.width or picture.height < size.height


def _scaled_up(
    config: Config, concept: Concept, pictures: Sequence[Picture], sizes: Mapping[int, Sequence[Size]]
) -> list[Problem]:
    """Warnings about small pictures, if there are several sizes; with one the picture has its warning already."""
    has_buckets = bool(config.data.aspect_ratio_buckets)
    if not has_buckets and len(concept.resolutions) == 1:
        return []
    warnings = []
    for picture in pictures:
        size, smallest = picture.size, sizes_of(picture.size, concept, sizes)[0]
        if _is_scaled_up(size, smallest):
            what = "its bucket" if has_buckets else "the smallest size"
            text = f"{size} is smaller than {what}, {smallest}, and will be scaled up"
            warnings.append(Problem(text, path=picture.path, kind=Kind.SMALL))
    return warnings


def _example(picture: Picture, prompt: str, config: Config, mask: Mask | None = None) -> Example:
    """An example in the size of a square of --resolution."""
    crops = [(0.5, 0.5)]
    if config.data.cache_latents and not config.data.center_crop:
        # keyed by content: adding a picture moves no other picture's crop
        key = int(picture.digest[:15], 16)
        rngs = [
            generator(config.output.seed, key, Purpose.CROP, stream_id) for stream_id in range(config.data.cache_crops)
        ]
        crops = [(round(float(rng.random()), 6), round(float(rng.random()), 6)) for rng in rngs]
    size = Size.square(config.data.resolution)
    return Example(picture=picture, prompt=prompt, crop=crops[0], more_crops=tuple(crops[1:]), size=size, mask=mask)
