"""What there is to train on: the pictures of subject and class with their prompts, decided once and in order."""

from __future__ import annotations

import hashlib
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


def check_pictures(config: Config) -> list[str]:
    """Problems with the pictures; looked for before any model is loaded."""
    problems = list(_inspect(config.data.instance_data_dir, config.data.resolution).problems)
    if config.data.with_prior_preservation and config.data.class_data_dir:
        # damaged class pictures are replaced, and missing ones made: only captions could stop the run
        found = find_pictures(Path(config.data.class_data_dir), may_be_empty=True)
        problems += found.problems
    return [p if p.startswith("--") else f"--instance_data_dir: {p}" for p in problems]


def _inspect(folder: str, resolution: int) -> Inspection:
    return inspect_pictures(find_pictures(Path(folder)), resolution)


def read_dataset(config: Config) -> tuple[Dataset, list[str]]:
    """The data of a run, and warnings about it. Class pictures beyond --num_class_images are left out."""
    data = config.data
    subject = _inspect(data.instance_data_dir, data.resolution)
    warnings = list(subject.warnings)
    samples = [
        _sample(p, p.caption or data.instance_prompt, config) for p in subject.pictures for _ in range(data.repeats)
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


def lacks_class_images(config: Config) -> bool:
    """Whether class pictures must be drawn before training."""
    return config.data.with_prior_preservation and len(sound_class_pictures(config)) < config.data.num_class_images


def _sample(picture: Picture, prompt: str, config: Config) -> Sample:
    crop = (0.5, 0.5)
    if config.data.cache_latents and not config.data.center_crop:
        # keyed by content: adding a picture moves no other picture's crop
        rng = generator(config.output.seed, int(picture.digest[:15], 16), Purpose.CROP)
        crop = (round(float(rng.random()), 6), round(float(rng.random()), 6))
    return Sample(picture=picture, prompt=prompt, crop=crop)
