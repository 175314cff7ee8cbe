"""The measures as formulas on features: plain numpy, whatever network the features come from.

Rows of features have length 1, so that a scalar product is a cosine. None is a measure for which there is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

# Pictures are compared pixel by pixel at this side.
SIDE = 64

# A sample that is nearer than this to a training picture, in the root mean square of pixels from 0 to 1, is a copy.
COPY = 0.06

Key = tuple[str, int]
"""Prompt and number of a sample: the same at every step."""


def unit_rows(features: np.ndarray) -> np.ndarray:
    """Each row divided by its length."""
    rows = np.asarray(features, np.float64)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def likeness(features: np.ndarray, others: np.ndarray) -> float | None:
    """Mean cosine of all pairs: DINO and CLIP-I of samples and training pictures, PRES of class samples and those."""
    return mean(features @ others.T)


def agreement(pictures: np.ndarray, texts: np.ndarray) -> float | None:
    """Mean cosine of each picture and its own text: CLIP-T."""
    return mean((pictures * texts).sum(axis=1))


def diversity(prompts: Sequence[str], features: np.ndarray) -> float | None:
    """DIV: 1 - mean cosine of all pairs of samples that share a prompt."""
    distances: list[float] = []
    for prompt in dict.fromkeys(prompts):
        rows = features[[i for i, other in enumerate(prompts) if other == prompt]]
        upper = np.triu_indices(len(rows), k=1)
        distances += list(1.0 - (rows @ rows.T)[upper])
    return mean(np.array(distances))


def change(keys: Sequence[Key], features: np.ndarray, before: Sequence[Key], old: np.ndarray) -> float | None:
    """1 - mean cosine between samples of the same prompt and noise, now and before."""
    places = {key: i for i, key in enumerate(before)}
    pairs = [(i, places[key]) for i, key in enumerate(keys) if key in places]
    if not pairs:
        return None
    now, then = zip(*pairs, strict=True)
    return mean(1.0 - (features[list(now)] * old[list(then)]).sum(axis=1))


def nearest_likeness(features: np.ndarray, others: np.ndarray) -> float | None:
    """Mean cosine of each sample and the training picture that is most like it."""
    return mean((features @ others.T).max(axis=1)) if len(others) else None


def small_pixels(picture: Image.Image) -> np.ndarray:
    """[3, 64, 64] from 0 to 1"""
    small = picture.convert("RGB")
    if small.size != (SIDE, SIDE):
        small = small.resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(small, np.float32).transpose(2, 0, 1) / 255.0


def nearest_distance(picture: Image.Image, pixels: np.ndarray) -> float:
    """To the nearest of [N, 3, 64, 64]: root mean square of pixels from 0 to 1."""
    differences = small_pixels(picture)[None] - pixels
    return float(np.sqrt((differences**2).mean(axis=(1, 2, 3))).min())


def overall(*values: float | None) -> float | None:
    """The score: the geometric mean of the values that there are.

    Relative changes count the same in each of them, although a cosine of texts and pictures is small by nature.
    """
    found = [max(value, 0.0) for value in values if value is not None]
    return float(np.prod(found) ** (1 / len(found))) if found else None


def mean(values: np.ndarray) -> float | None:
    return float(np.mean(values)) if np.size(values) else None
