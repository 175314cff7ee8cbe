"""What there is to train on: the pictures of subject and class with their prompts, decided once and in order."""

from __future__ import annotations

import collections
import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from flux_db.check import folders
from flux_db.check.values import MOST_STEPS, check
from flux_db.data import buckets, hf_dataset
from flux_db.data.buckets import Size
from flux_db.data.draw_order import Order
from flux_db.data.masks import Mask, Masks, find_masks
from flux_db.data.pictures import Found, Inspection, Picture, Source, find_pictures, inspect_pictures
from flux_db.errors import UserError
from flux_db.settings.schema import Config, fill_trigger, global_batch, has_trigger
from flux_db.stream import Purpose, generator

# In a message about many.
FILES_NAMED = 20

# By repeats. More in an epoch help nobody, and each has its place in memory.
MOST_SAMPLES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A picture, the prompt it is trained with, its size, and where it is cropped when its latents are cached."""

    picture: Picture
    prompt: str
    crop: tuple[float, float]
    more_crops: tuple[tuple[float, float], ...] = ()
    """With --cache_crops."""
    size: Size
    """Height and width that it is cropped to."""
    mask: Mask | None = None
    """None: all of it counts."""

    @property
    def versions(self) -> tuple[Sample, ...]:
        """The same sample once for each of its crops."""
        return tuple(replace(self, crop=crop, more_crops=()) for crop in (self.crop, *self.more_crops))


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """`samples` are of the subject; `class_samples` are empty without prior preservation."""

    samples: tuple[Sample, ...]
    class_samples: tuple[Sample, ...] = ()
    """Each is cropped to the size of the subject's sample that it is drawn with."""
    held_out: tuple[Sample, ...] = ()
    """For the validation loss; not trained on, and no part of the fingerprint."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """Every distinct prompt, in order of appearance."""
        return tuple(dict.fromkeys(s.prompt for s in (*self.samples, *self.class_samples, *self.held_out)))

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """Every size in use, from wide to tall."""
        return tuple(sorted({s.size for s in self.samples}))

    @cached_property
    def masked(self) -> bool:
        """Whether the loss is weighted by masks."""
        return any(s.mask for s in self.samples)

    def order(self, seed: int, global_batch: int) -> Order:
        """In which order the samples are drawn."""
        groups = tuple(tuple(i for i, s in enumerate(self.samples) if s.size == size) for size in self.sizes)
        return Order(seed=seed, global_batch=global_batch, groups=groups)

    def fingerprint(self) -> str:
        """Changes with any picture, caption, crop, shape or mask."""
        digest = hashlib.sha256()
        for s in (*self.samples, *self.class_samples):
            # what is at its default leaves no trace, so that checkpoints from before there was a choice still fit
            height, width = s.size
            extra = [s.more_crops] if s.more_crops else []
            extra += [s.size] if height != width else []
            extra += [s.mask.digest] if s.mask else []
            digest.update(f"{s.picture.digest} {s.prompt!r} {s.crop}{''.join(f' {e}' for e in extra)}\n".encode())
        return digest.hexdigest()


class Survey(NamedTuple):
    """The pictures of the subject, where they could be looked for, and the problems with all pictures."""

    found: Found | None
    subject: Inspection | None
    problems: list[str]


def check_pictures(config: Config) -> list[str]:
    """Problems with the pictures; looked for before any model is loaded."""
    return survey(config).problems


def survey(config: Config) -> Survey:
    data = config.data
    if (data.instance_data_dir is None) == (data.dataset_name is None) or folders.problems(config):
        return Survey(None, None, [])  # told already: exactly one is needed, and apart from all other folders
    found = subject = None
    try:
        found = find_subject(config)
        subject = inspect_pictures(found, _warn_below(config))
        problems = [*subject.problems, *_masks(config, found.folder, subject.pictures).problems]
    except UserError as error:
        problems = list(error.problems)
    if found and data.dataset_name is None:
        problems += folders.strays(config, "instance_data_dir", (s.path for s in found.sources))
    if data.with_prior_preservation and data.class_data_dir:
        # damaged class pictures are replaced, and missing ones made: only captions could stop the run
        classes = find_pictures(Path(data.class_data_dir), may_be_empty=True)
        strays = folders.strays(config, "class_data_dir", (s.path for s in classes.sources))
        problems += [f"--class_data_dir: {problem}" for problem in (*classes.problems, *strays)]
    if not problems:
        problems += _held_out_problems(config, subject)
    if not problems and not check(config):
        problems += _length_problems(config, subject)
    flag = "--instance_data_dir" if data.dataset_name is None else "--dataset_name"
    return Survey(found, subject, [p if p.startswith("--") else f"{flag}: {p}" for p in problems])


def _warn_below(config: Config) -> int:
    """The short side below which a picture is scaled up; with buckets it depends on the shape, and is told later."""
    return 0 if config.data.aspect_ratio_buckets else config.data.resolution


def _masks(config: Config, folder: Path, pictures: Sequence[Picture]) -> Masks:
    data = config.data
    if data.unmasked_weight == 1:
        return Masks({}, (), ())
    return find_masks(pictures, folder, Path(data.mask_dir) if data.mask_dir else None, data.alpha_mask)


def find_subject(config: Config) -> Found:
    """The pictures of the subject and their captions; those of a dataset are written to a folder first."""
    data = config.data
    found = find_pictures(Path(data.instance_data_dir) if data.dataset_name is None else hf_dataset.export(config))
    return _with_trigger_checked(config, found)


def _with_trigger_checked(config: Config, found: Found) -> Found:
    without_word = [s.path for s in found.sources if config.data.trigger_word is None and _has_trigger(s)]
    if without_word:
        shown = ", ".join(str(path) for path in without_word[:FILES_NAMED])
        more = f" and {len(without_word) - FILES_NAMED} more" if len(without_word) > FILES_NAMED else ""
        problem = f"--trigger_word is missing: {{trigger}} stands in the captions of {shown}{more}"
        found = replace(found, problems=(*found.problems, problem))
    return found


def _has_trigger(source: Source) -> bool:
    return source.caption is not None and has_trigger(source.caption)


def _held_out_problems(config: Config, subject: Inspection) -> list[str]:
    """Problems with the pictures of the validation loss."""
    folder, share = config.validation.validation_data_dir, config.validation.validation_share
    if folder is not None:
        # that the folder is missing, the check of the settings has told
        seen = _held_out(config, subject) if os.path.isdir(folder) else Inspection((), (), ())
        problems = [*seen.problems, *folders.strays(config, "validation_data_dir", (p.path for p in seen.pictures))]
        return [p if p.startswith("--") else f"--validation_data_dir: {p}" for p in problems]
    places = sorted(_place(picture) for picture in subject.pictures)
    if share > 0 and places[0] >= share:
        smallest = math.ceil(places[0] * 1000 + 1e-6) / 1000
        hint = f"{smallest} holds out one" if smallest < 1 and places[-1] >= smallest else "use --validation_data_dir"
        return [f"--validation_share {share}: holds out none of the {len(places)} pictures; {hint}"]
    if share > 0 and places[-1] < share:
        return [f"--validation_share {share}: holds out all {len(places)} pictures; nothing is left to train on"]
    return []


def _length_problems(config: Config, subject: Inspection) -> list[str]:
    """Problems with the number of samples and steps, which without the pictures cannot be known."""
    optim, repeats = config.optim, config.data.repeats
    trained = _trained(config, subject)
    if repeats > 1 and repeats * len(trained) > MOST_SAMPLES:
        return [
            f"--repeats {repeats}: makes {repeats * len(trained)} samples of the {len(trained)} pictures; at most"
            f" {MOST_SAMPLES} are possible"
        ]
    if optim.max_train_steps is not None:
        return []
    sizes = choose_sizes(config, trained)
    counts = collections.Counter(buckets.nearest(p.size[::-1], sizes) for p in trained)
    groups = tuple(tuple(range(count * repeats)) for count in counts.values())
    batch = global_batch(config, number_of_cards())
    steps = Order(seed=config.output.seed, global_batch=batch, groups=groups).steps(optim.num_train_epochs)
    if steps > MOST_STEPS:
        return [f"--num_train_epochs {optim.num_train_epochs}: makes {steps} steps; at most {MOST_STEPS} are possible"]
    if optim.lr_warmup_steps > steps:
        return [
            f"--lr_warmup_steps {optim.lr_warmup_steps}: longer than the run of --num_train_epochs"
            f" {optim.num_train_epochs}, which has {steps} steps; shorten the warm-up"
        ]
    return []


def number_of_cards() -> int:
    """As msrun tells its processes; 1 without it."""
    told = os.environ.get("MS_WORKER_NUM", "1")
    if not re.fullmatch("[1-9][0-9]{0,5}", told):
        raise UserError(f"MS_WORKER_NUM={told}: msrun sets this variable to the number of cards; unset it")
    return int(told)


def _trained(config: Config, subject: Inspection) -> list[Picture]:
    """The pictures of the subject that are not held out."""
    return [p for p in subject.pictures if _place(p) >= config.validation.validation_share]


def _place(picture: Picture) -> float:
    """Where a picture stands between 0 and 1, by its content alone; below --validation_share it is held out."""
    return int(hashlib.sha256(f"held out {picture.digest}".encode()).hexdigest()[:12], 16) / 16**12


def _held_out(config: Config, subject: Inspection) -> Inspection:
    """The pictures of the validation loss."""
    folder = config.validation.validation_data_dir
    if folder is not None:
        found = _with_trigger_checked(config, find_pictures(Path(folder)))
        return inspect_pictures(found, config.data.resolution)
    share = config.validation.validation_share
    return Inspection(tuple(p for p in subject.pictures if _place(p) < share), (), ())


def read_dataset(config: Config, seen: Survey | None = None) -> tuple[Dataset, list[str]]:
    """The data of a run, and warnings about it. Class pictures beyond --num_class_images are left out.

    `seen`: the pictures of the subject, if they were looked at already.
    """
    data = config.data
    found = seen.found if seen else find_subject(config)
    subject = seen.subject if seen else inspect_pictures(found, _warn_below(config))
    held_out = _held_out(config, subject)
    trained = _trained(config, subject)
    sizes = choose_sizes(config, trained)
    masks = _masks(config, found.folder, trained)
    warnings = [*subject.warnings, *_scaled_up(config, trained, sizes), *masks.warnings, *held_out.warnings]
    known = {p.digest for p in trained}
    warnings += [f"{p.path}: held out, but also trained on" for p in held_out.pictures if p.digest in known]
    samples = [
        _sample(p, fill_trigger(p.caption or data.instance_prompt, config), config, sizes, masks.by_picture.get(p.path))
        for p in trained
    ]
    samples = [sample for sample in samples for _ in range(data.repeats)]
    square = (data.resolution, data.resolution)
    # the middle, so that the validation loss does not depend on --seed
    validation = [
        Sample(
            picture=p,
            prompt=fill_trigger(p.caption or data.instance_prompt, config),
            crop=(0.5, 0.5),
            size=square,
        )
        for p in held_out.pictures
    ]
    class_samples: list[Sample] = []
    if data.with_prior_preservation:
        pictures = sound_class_pictures(config)[: data.num_class_images]
        class_samples = [_sample(p, data.class_prompt, config, [square]) for p in pictures]
    dataset = Dataset(samples=tuple(samples), class_samples=tuple(class_samples), held_out=tuple(validation))
    return dataset, warnings


def total_steps(config: Config, dataset: Dataset, batch: int) -> int:
    """Optimizer steps of the run. Epochs that end within a global batch are rounded up to a whole one."""
    if config.optim.max_train_steps is not None:
        return config.optim.max_train_steps
    return dataset.order(config.output.seed, batch).steps(config.optim.num_train_epochs)


def sound_class_pictures(config: Config) -> list[Picture]:
    """The class pictures that can be opened."""
    found = find_pictures(Path(config.data.class_data_dir), may_be_empty=True)
    return list(inspect_pictures(found, config.data.resolution).pictures)


def lacks_class_images(config: Config) -> bool:
    """Whether class pictures must be drawn before training."""
    return config.data.with_prior_preservation and len(sound_class_pictures(config)) < config.data.num_class_images


def choose_sizes(config: Config, pictures: Sequence[Picture]) -> list[Size]:
    """The sizes that the subject's pictures are cropped to."""
    data = config.data
    if data.aspect_ratio_buckets is None:
        return [(data.resolution, data.resolution)]
    if data.aspect_ratio_buckets.strip() == buckets.AUTO:
        return buckets.choose(data.resolution, [p.size[::-1] for p in pictures], data.max_buckets)
    return buckets.parse(data.aspect_ratio_buckets)


def _scaled_up(config: Config, pictures: Sequence[Picture], sizes: Sequence[Size]) -> list[str]:
    """Warnings about small pictures, if there are buckets; otherwise they were told with the picture."""
    if not config.data.aspect_ratio_buckets:
        return []
    warnings = []
    for picture in pictures:
        (width, height), (to_height, to_width) = picture.size, buckets.nearest(picture.size[::-1], sizes)
        if width < to_width or height < to_height:
            warnings.append(
                f"{picture.path}: {width} x {height} is smaller than its bucket, {to_width} x {to_height}, "
                "and will be scaled up"
            )
    return warnings


def _sample(picture: Picture, prompt: str, config: Config, sizes: Sequence[Size], mask: Mask | None = None) -> Sample:
    crops = [(0.5, 0.5)]
    if config.data.cache_latents and not config.data.center_crop:
        # keyed by content: adding a picture moves no other picture's crop
        key = int(picture.digest[:15], 16)
        rngs = [generator(config.output.seed, key, Purpose.CROP, lane) for lane in range(config.data.cache_crops)]
        crops = [(round(float(rng.random()), 6), round(float(rng.random()), 6)) for rng in rngs]
    size = buckets.nearest(picture.size[::-1], sizes)
    return Sample(picture=picture, prompt=prompt, crop=crops[0], more_crops=tuple(crops[1:]), size=size, mask=mask)
