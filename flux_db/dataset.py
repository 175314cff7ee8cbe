"""What there is to train on: the pictures of subject and class with their prompts, decided once and in order."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from flux_db.config import Config
from flux_db.images import Inspection, Picture, find_pictures, inspect_pictures
from flux_db.stream import Purpose, generator


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
    held_out: tuple[Sample, ...] = ()
    """For the validation loss; not trained on, and no part of the fingerprint."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """Every distinct prompt, in order of appearance."""
        return tuple(dict.fromkeys(s.prompt for s in (*self.samples, *self.class_samples, *self.held_out)))

    def fingerprint(self) -> str:
        """Changes with any picture, caption or crop."""
        digest = hashlib.sha256()
        for s in (*self.samples, *self.class_samples):
            digest.update(f"{s.picture.digest} {s.prompt!r} {s.crop}\n".encode())
        return digest.hexdigest()


def check_pictures(config: Config) -> list[str]:
    """Problems with the pictures; looked for before any model is loaded."""
    subject = _inspect(config.data.instance_data_dir, config.data.resolution)
    problems = list(subject.problems)
    if config.data.with_prior_preservation and config.data.class_data_dir:
        # damaged class pictures are replaced, and missing ones made: only captions could stop the run
        found = find_pictures(Path(config.data.class_data_dir), may_be_empty=True)
        problems += found.problems
    if not problems:
        problems += _held_out_problems(config, subject)
    return [p if p.startswith("--") else f"--instance_data_dir: {p}" for p in problems]


def _inspect(folder: str, resolution: int) -> Inspection:
    return inspect_pictures(find_pictures(Path(folder)), resolution)


def _held_out_problems(config: Config, subject: Inspection) -> list[str]:
    """Problems with the pictures of the validation loss."""
    folder, share = config.validation.validation_data_dir, config.validation.validation_share
    if folder is not None:
        # that the folder is missing, the check of the settings has told
        problems = _inspect(folder, config.data.resolution).problems if Path(folder).is_dir() else ()
        return [f"--validation_data_dir: {problem}" for problem in problems]
    places = sorted(_place(picture) for picture in subject.pictures)
    if share > 0 and places[0] >= share:
        smallest = math.ceil(places[0] * 1000 + 1e-6) / 1000
        hint = f"{smallest} holds out one" if smallest < 1 and places[-1] >= smallest else "use --validation_data_dir"
        return [f"--validation_share {share}: holds out none of the {len(places)} pictures; {hint}"]
    if share > 0 and places[-1] < share:
        return [f"--validation_share {share}: holds out all {len(places)} pictures; nothing is left to train on"]
    return []


def _place(picture: Picture) -> float:
    """Where a picture stands between 0 and 1, by its content alone; below --validation_share it is held out."""
    return int(hashlib.sha256(f"held out {picture.digest}".encode()).hexdigest()[:12], 16) / 16**12


def _held_out(config: Config, subject: Inspection) -> Inspection:
    """The pictures of the validation loss."""
    if config.validation.validation_data_dir is not None:
        return _inspect(config.validation.validation_data_dir, config.data.resolution)
    share = config.validation.validation_share
    return Inspection(tuple(p for p in subject.pictures if _place(p) < share), (), ())


def read_dataset(config: Config) -> tuple[Dataset, list[str]]:
    """The data of a run, and warnings about it. Class pictures beyond --num_class_images are left out."""
    data = config.data
    subject = _inspect(data.instance_data_dir, data.resolution)
    held_out = _held_out(config, subject)
    warnings = [*subject.warnings, *held_out.warnings]
    share = config.validation.validation_share
    pictures = [p for p in subject.pictures if _place(p) >= share]
    known = {p.digest for p in pictures}
    warnings += [f"{p.path}: held out, but also trained on" for p in held_out.pictures if p.digest in known]
    samples = [_sample(p, p.caption or data.instance_prompt, config) for p in pictures for _ in range(data.repeats)]
    # the middle, so that the validation loss does not depend on --seed
    validation = [
        Sample(picture=p, prompt=p.caption or data.instance_prompt, crop=(0.5, 0.5)) for p in held_out.pictures
    ]
    class_samples: list[Sample] = []
    if data.with_prior_preservation:
        pictures = sound_class_pictures(config)[: data.num_class_images]
        class_samples = [_sample(p, data.class_prompt, config) for p in pictures]
    dataset = Dataset(samples=tuple(samples), class_samples=tuple(class_samples), held_out=tuple(validation))
    return dataset, warnings


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
