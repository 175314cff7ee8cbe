"""A picture as a vision network sees it: resized, cropped and normalised by its folder's preprocessor_config.json."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flux_db.errors import UserError
from flux_db.model.part_weights import read_object

FILE = "preprocessor_config.json"

# Of most networks, and far above any.
BICUBIC = 3
LARGEST_SIDE = 4096
CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class Processing:
    """The steps, in their order; None leaves one out."""

    shortest_edge: int | None
    size: tuple[int, int] | None
    """Height and width to resize to, whatever the shape; instead of `shortest_edge`."""
    resample: int
    """PIL's number of the filter."""
    crop: tuple[int, int] | None
    """Height and width."""
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def result(self) -> tuple[int, int] | None:
        """Height and width of every picture; None if they depend on it."""
        return self.crop or self.size


# Of the processors of transformers, for what a file does not say.
DEFAULTS: Mapping[str, Any] = {
    "size": {"shortest_edge": 224},
    "crop_size": 224,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

# Of the published networks, for a folder without such a file.
PUBLISHED: dict[str, Mapping[str, Any]] = {
    "dinov2": {
        "size": {"shortest_edge": 256},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    "clip": {},
}


def read(folder: Path, network: str) -> Processing:
    """Of a folder with a DINOv2 ("dinov2") or a CLIP ("clip"); a UserError names a setting that makes no sense."""
    config = read_object(folder / FILE) if os.path.lexists(folder / FILE) else PUBLISHED[network]
    given = {**DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
    try:
        return _processing(given)
    except ValueError as problem:
        raise UserError(f"{folder.name}/{FILE}: {problem}") from None


def _processing(given: Mapping[str, Any]) -> Processing:
    shortest, size = _size(given["size"]) if _switch(given, "do_resize") else (None, None)
    crop = _size(given["crop_size"], square=True)[1] if _switch(given, "do_center_crop") else None
    normalised = _switch(given, "do_normalize")
    return Processing(
        shortest_edge=shortest,
        size=size,
        resample=_whole("resample", given.get("resample", BICUBIC), 0, 5),
        crop=crop,
        factor=_number("rescale_factor", given.get("rescale_factor", 1 / 255)) if _switch(given, "do_rescale") else 1.0,
        mean=_numbers(given, "image_mean") if normalised else (0.0,) * CHANNELS,
        std=_numbers(given, "image_std") if normalised else (1.0,) * CHANNELS,
    )


def prepare(picture: Image.Image, processing: Processing) -> np.ndarray:
    """[3, H, W] in float32"""
    picture = _resized(picture.convert("RGB"), processing)
    pixels = np.asarray(picture)
    if processing.crop:
        pixels = _cropped(pixels, *processing.crop)
    # in the order and with the types of transformers, so that the numbers are the same
    x = (pixels.astype(np.float64) * processing.factor).astype(np.float32)
    x = (x - np.asarray(processing.mean, np.float32)) / np.asarray(processing.std, np.float32)
    return np.ascontiguousarray(x.transpose(2, 0, 1))


def _resized(picture: Image.Image, processing: Processing) -> Image.Image:
    width, height = picture.size
    if processing.shortest_edge:
        short, long = min(width, height), max(width, height)
        new = processing.shortest_edge, int(processing.shortest_edge * long / short)
        width, height = new if width <= height else new[::-1]
    elif processing.size:
        height, width = processing.size
    else:
        return picture
    return picture.resize((width, height), Image.Resampling(processing.resample))


def _cropped(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle; what is smaller gets a black edge."""
    rows, columns = pixels.shape[:2]
    top, left = (rows - height) // 2, (columns - width) // 2
    above, before = max(0, -top), max(0, -left)
    below, behind = max(0, top + height - rows), max(0, left + width - columns)
    padded = np.pad(pixels, ((above, below), (before, behind), (0, 0)))
    top, left = max(0, top), max(0, left)
    return padded[top : top + height, left : left + width]


# ---- settings ----


def _size(value: Any, *, square: bool = False) -> tuple[int | None, tuple[int, int] | None]:
    """(shortest edge, height and width): one of them. A plain number is a shortest edge, or the side of a square."""
    name = "crop_size" if square else "size"
    if isinstance(value, Mapping):
        if "shortest_edge" in value and not square:
            return _side(name, value["shortest_edge"]), None
        return None, (_side(name, value.get("height")), _side(name, value.get("width")))
    side = _side(name, value)
    return (None, (side, side)) if square else (side, None)


def _side(name: str, value: Any) -> int:
    return _whole(name, value, 1, LARGEST_SIDE)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} {reprlib.repr(value)}: must be a whole number from {least} to {most}")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise ValueError(f"{name} {reprlib.repr(value)}: must be above 0 and at most 1")
    return float(value)


def _numbers(given: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = given[name]
    sound = isinstance(values, list) and len(values) == CHANNELS and all(type(v) in (int, float) for v in values)
    if not sound or (name == "image_std" and min(values) <= 0):
        raise ValueError(f"{name} {reprlib.repr(values)}: must be {CHANNELS} numbers, of a deviation above 0")
    return tuple(float(value) for value in values)


def _switch(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, True)
    if not isinstance(value, bool):
        raise ValueError(f"{name} {reprlib.repr(value)}: must be true or false")
    return value
