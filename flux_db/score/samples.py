"""Samples and training pictures, read for scoring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from flux_db.data.pixels import load_rgb
from flux_db.errors import UserError
from flux_db.run.sample_files import SampleFile

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}

# Of more training pictures, so many are compared with the samples, evenly chosen.
MOST_PICTURES = 500


Pictures = Callable[[Sequence[Image.Image]], np.ndarray]
"""Pictures to features, in rows of length 1."""
Texts = Callable[[Sequence[str]], np.ndarray]
"""Texts to features, in rows of length 1."""


@dataclass(frozen=True)
class Sample:
    prompt: str
    number: int
    """Which of the prompt's pictures: it has the same starting noise at every step."""
    picture: Image.Image
    options: str = ""
    """Of the prompt's line; samples with other options are not compared with each other."""

    @property
    def title(self) -> str:
        return f"{self.prompt} {self.options}".strip()

    @property
    def key(self) -> tuple[str, int]:
        """The same for the samples of all steps that differ by their step only."""
        return self.title, self.number


def read_samples(files: Sequence[SampleFile]) -> list[Sample]:
    return [Sample(file.prompt, file.number, Image.open(file.path).convert("RGB"), file.options) for file in files]


def read_pictures(paths: Sequence[Path]) -> list[Image.Image]:
    """Training pictures."""
    if len(paths) > MOST_PICTURES:
        paths = [paths[i * len(paths) // MOST_PICTURES] for i in range(MOST_PICTURES)]
    return [load_rgb(path) for path in paths]


def pictures_in(folder: Path) -> list[Path]:
    """The pictures of a folder; a UserError if there are none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    if not paths:
        raise UserError(f"{folder}: no pictures in it")
    return paths
