"""What there is to train on: the pictures of subject and class with their prompts, decided once and in order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from flux_db import hf_dataset
from flux_db.config import Config, fill_trigger, has_trigger
from flux_db.errors import UserError
from flux_db.images import Found, Inspection, Picture, Source, find_pictures, inspect_pictures
from flux_db.stream import Purpose, generator

# In a message about many.
FILES_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A picture, the prompt it is trained with, and where it is cropped when its latents are cached."""

    picture: Picture
    prompt: str
    crop: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """`samples` are of the subject; `class_samples` are empty without prior preservation."""

    samples: tuple[Sample, ...]
    class_samples: tuple[Sample, ...] = ()

    @property
    def prompts(self) -> tuple[str, ...]:
        """Every distinct prompt, in order of appearance."""
        return tuple(dict.fromkeys(s.prompt for s in (*self.samples, *self.class_samples)))

    def fingerprint(self) -> str:
        """Changes with any picture, caption or crop."""
        digest = hashlib.sha256()
        for s in (*self.samples, *self.class_samples):
            digest.update(f"{s.picture.digest} {s.prompt!r} {s.crop}\n".encode())
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
    if (data.instance_data_dir is None) == (data.dataset_name is None):
        return Survey(None, None, [])  # told already: exactly one is needed
    found = subject = None
    try:
        found = find_subject(config)
        subject = inspect_pictures(found, data.resolution)
        problems = list(subject.problems)
    except UserError as error:
        problems = error.problems
    if config.data.with_prior_preservation and config.data.class_data_dir:
        # damaged class pictures are replaced, and missing ones made: only captions could stop the run
        problems += find_pictures(Path(config.data.class_data_dir), may_be_empty=True).problems
    flag = "--instance_data_dir" if data.dataset_name is None else "--dataset_name"
    return Survey(found, subject, [p if p.startswith("--") else f"{flag}: {p}" for p in problems])


def find_subject(config: Config) -> Found:
    """The pictures of the subject and their captions; those of a dataset are written to a folder first."""
    data = config.data
    found = find_pictures(Path(data.instance_data_dir) if data.dataset_name is None else hf_dataset.export(config))
    without_word = [source.path for source in found.sources if data.trigger_word is None and _has_trigger(source)]
    if without_word:
        shown = ", ".join(str(path) for path in without_word[:FILES_NAMED])
        more = f" and {len(without_word) - FILES_NAMED} more" if len(without_word) > FILES_NAMED else ""
        problem = f"--trigger_word is missing: {{trigger}} stands in the captions of {shown}{more}"
        found = replace(found, problems=(*found.problems, problem))
    return found


def _has_trigger(source: Source) -> bool:
    return source.caption is not None and has_trigger(source.caption)


def read_dataset(config: Config, subject: Inspection | None = None) -> tuple[Dataset, list[str]]:
    """The data of a run, and warnings about it. Class pictures beyond --num_class_images are left out.

    `subject`: the pictures of the subject, if they were inspected already.
    """
    data = config.data
    subject = subject or inspect_pictures(find_subject(config), data.resolution)
    warnings = list(subject.warnings)
    samples = [
        _sample(p, fill_trigger(p.caption or data.instance_prompt, config), config)
        for p in subject.pictures
        for _ in range(data.repeats)
    ]
    class_samples: list[Sample] = []
    if data.with_prior_preservation:
        pictures = sound_class_pictures(config)[: data.num_class_images]
        class_samples = [_sample(p, data.class_prompt, config) for p in pictures]
    return Dataset(samples=tuple(samples), class_samples=tuple(class_samples)), warnings


def sound_class_pictures(config: Config) -> list[Picture]:
    """The class pictures that can be opened."""
    found = find_pictures(Path(config.data.class_data_dir), may_be_empty=True)
    return list(inspect_pictures(found, config.data.resolution).pictures)


def _sample(picture: Picture, prompt: str, config: Config) -> Sample:
    crop = (0.5, 0.5)
    if config.data.cache_latents and not config.data.center_crop:
        # keyed by content: adding a picture moves no other picture's crop
        rng = generator(config.output.seed, int(picture.digest[:15], 16), Purpose.CROP)
        crop = (round(float(rng.random()), 6), round(float(rng.random()), 6))
    return Sample(picture=picture, prompt=prompt, crop=crop)
