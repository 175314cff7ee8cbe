"""What there is to train on: the pictures of subject and class with their prompts, decided once and in order."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flux_db.data import buckets
from flux_db.data.draw_order import DrawOrder
from flux_db.data.masks import Mask
from flux_db.data.pictures import Picture
from flux_db.data.selection import (
    Survey,
    find_subject,
    held_out_pictures,
    inspect_subject,
    masks_in_use,
    sound_class_pictures,
    trained_pictures,
)
from flux_db.errors import UserError
from flux_db.problem import Kind, Problem
from flux_db.settings.derived import fill_trigger
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

    def draw_order(self, seed: int, global_batch: int) -> DrawOrder:
        """In which order the examples are drawn."""
        groups = tuple(tuple(i for i, s in enumerate(self.examples) if s.size == size) for size in self.sizes)
        return DrawOrder(seed=seed, global_batch=global_batch, groups=groups)

    def fingerprint(self) -> str:
        """Changes with any picture, caption, crop, shape or mask."""
        digest = hashlib.sha256()
        for s in (*self.examples, *self.class_examples):
            # what is at its default leaves no trace, so that checkpoints from before there was a choice still fit
            height, width = s.size
            extra = [s.more_crops] if s.more_crops else []
            extra += [tuple(s.size)] if height != width else []
            extra += [s.mask.digest] if s.mask else []
            digest.update(f"{s.picture.digest} {s.prompt!r} {s.crop}{''.join(f' {e}' for e in extra)}\n".encode())
        return digest.hexdigest()


def preserved_prompts(config: Config, dataset: Dataset) -> list[str]:
    """Every distinct prompt of --preserve_class."""
    found = (preserved_prompt(example.prompt, config) for example in dataset.examples)
    return [prompt for prompt in dict.fromkeys(found) if prompt is not None]


def number_of_devices() -> int:
    """As msrun sets it for its processes; 1 without it."""
    given = os.environ.get("MS_WORKER_NUM", "1")
    if not re.fullmatch("[1-9][0-9]{0,5}", given):
        raise UserError(f"MS_WORKER_NUM={given}: msrun sets this variable to the number of devices; unset it")
    return int(given)


def read_dataset(config: Config, seen: Survey | None = None) -> tuple[Dataset, list[Problem]]:
    """The data of a run, and warnings about it. Class pictures beyond --num_class_images are left out.

    `seen`: the pictures of the subject, if they were looked at already.
    """
    data = config.data
    found = seen.found if seen else find_subject(config)
    subject = seen.subject if seen else inspect_subject(config, found)
    held_out = held_out_pictures(config, subject)
    trained = trained_pictures(config, subject)
    sizes = choose_sizes(config, trained)
    masks = masks_in_use(config, found.folder, trained)
    warnings = [*subject.warnings, *_scaled_up(config, trained, sizes), *masks.warnings, *held_out.warnings]
    known = {p.digest for p in trained}
    warnings += [Problem("held out, but also trained on", path=p.path) for p in held_out.pictures if p.digest in known]
    examples = [
        _example(
            p, fill_trigger(p.caption or data.instance_prompt, config), config, sizes, masks.by_picture.get(p.path)
        )
        for p in trained
    ]
    examples = [example for example in examples for _ in range(data.repeats)]
    square = Size.square(data.resolution)
    # the middle, so that the validation loss does not depend on --seed
    validation = [
        Example(
            picture=p,
            prompt=fill_trigger(p.caption or data.instance_prompt, config),
            crop=(0.5, 0.5),
            size=square,
        )
        for p in held_out.pictures
    ]
    class_examples: list[Example] = []
    if data.with_prior_preservation:
        pictures = sound_class_pictures(config)[: data.num_class_images]
        class_examples = [_example(p, data.class_prompt, config, [square]) for p in pictures]
    dataset = Dataset(examples=tuple(examples), class_examples=tuple(class_examples), held_out=tuple(validation))
    return dataset, warnings


def total_steps(config: Config, dataset: Dataset, batch: int) -> int:
    """Optimizer steps of the run. Epochs that end within a global batch are rounded up to a whole one."""
    if config.optim.max_train_steps is not None:
        return config.optim.max_train_steps
    return dataset.draw_order(config.output.seed, batch).steps(config.optim.num_train_epochs)


def choose_sizes(config: Config, pictures: Sequence[Picture]) -> list[Size]:
    """The sizes that the subject's pictures are cropped to."""
    data = config.data
    if data.aspect_ratio_buckets is None:
        return [Size.square(data.resolution)]
    if data.aspect_ratio_buckets.strip() == buckets.AUTO:
        return buckets.choose(data.resolution, [p.size for p in pictures], data.max_buckets)
    return buckets.parse(data.aspect_ratio_buckets)


def _scaled_up(config: Config, pictures: Sequence[Picture], sizes: Sequence[Size]) -> list[Problem]:
    """Warnings about small pictures, if there are buckets; without them the picture has its warning already."""
    if not config.data.aspect_ratio_buckets:
        return []
    warnings = []
    for picture in pictures:
        size, bucket = picture.size, buckets.nearest(picture.size, sizes)
        if size.width < bucket.width or size.height < bucket.height:
            text = f"{size} is smaller than its bucket, {bucket}, and will be scaled up"
            warnings.append(Problem(text, path=picture.path, kind=Kind.SMALL))
    return warnings


def _example(picture: Picture, prompt: str, config: Config, sizes: Sequence[Size], mask: Mask | None = None) -> Example:
    crops = [(0.5, 0.5)]
    if config.data.cache_latents and not config.data.center_crop:
        # keyed by content: adding a picture moves no other picture's crop
        key = int(picture.digest[:15], 16)
        rngs = [
            generator(config.output.seed, key, Purpose.CROP, stream_id) for stream_id in range(config.data.cache_crops)
        ]
        crops = [(round(float(rng.random()), 6), round(float(rng.random()), 6)) for rng in rngs]
    size = buckets.nearest(picture.size, sizes)
    return Example(picture=picture, prompt=prompt, crop=crops[0], more_crops=tuple(crops[1:]), size=size, mask=mask)
