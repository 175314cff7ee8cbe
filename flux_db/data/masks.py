"""Masks: where in a picture the loss counts. White is the subject, black the rest, grey in between.

A mask is looked at as a viewer shows it, turned by its own EXIF tag, and must have the shape of its upright picture.
From then on it goes the picture's way: same crop, same flip, same size.
"""

import hashlib
import math
import os
import unicodedata
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from flux_db.data.pictures import MASK_SUFFIX, Picture
from flux_db.data.pixels import crop_box, extensions, load_unchanged, load_upright, to_rgb
from flux_db.errors import UserError
from flux_db.files import PICTURE_LIMIT, read_bytes
from flux_db.problem import Problem
from flux_db.size import Size

BLACK = (0, 0, 0)

# Difference in shape that rounding makes when a mask is drawn at a smaller size.
SHAPE_TOLERANCE = 0.02

# Below this no part of a mask is meant to be white; a file of 0 and 1 instead of 0 and 255 shows by it.
DARKEST_WHITE = 128

_DECODING_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Mask:
    """A mask that was opened and fits its picture."""

    path: Path
    """The picture's own for an alpha channel."""
    digest: str
    """SHA-256 of the file."""
    is_alpha: bool = False


class Masks(NamedTuple):
    by_picture: dict[Path, Mask]
    """Pictures without a mask are absent."""
    problems: tuple[str, ...]
    warnings: tuple[Problem, ...]


# ---- finding ----


def find_masks(
    pictures: Sequence[Picture], folder: Path, mask_dir: Path | None, alpha_mask: bool, *, alpha_may_lack: bool = False
) -> Masks:
    """The masks of the pictures below `folder`: of `mask_dir`, else sidecars, else, if asked for, alpha channels.

    `alpha_may_lack`: it is no problem if none of them has an alpha channel.
    """
    problems: list[str] = []
    mask_dir = mask_dir if mask_dir and os.path.isdir(mask_dir) else None  # a missing folder is reported by check_files
    named = _named_masks(mask_dir, problems) if mask_dir else {}
    sidecars = _sidecars({picture.path.parent for picture in pictures})
    files = {}
    for picture in pictures:
        name = _without_extension(os.path.relpath(picture.path, folder))
        files[picture] = named.get(name) or sidecars.get(_without_extension(picture.path))
    with ThreadPoolExecutor(_DECODING_THREADS) as pool:
        results = list(pool.map(lambda p: _inspect(p, files[p], alpha_mask), pictures))

    by_picture = {p.path: found[0] for p, found in zip(pictures, results, strict=True) if isinstance(found, tuple)}
    problems += [problem for found in results if isinstance(found, UserError) for problem in found.problems]
    if mask_dir and not set(named.values()) & set(files.values()) and not problems:
        text = f"--mask_dir {mask_dir}: no mask has the name of a picture; dog1.png is the mask of dog1.jpg"
        problems.append(Problem(text, flag="mask_dir"))
    if alpha_mask and not alpha_may_lack and not any(mask.is_alpha for mask in by_picture.values()) and not problems:
        text = "--alpha_mask: no picture without another mask has an alpha channel; leave the flag out"
        problems.append(Problem(text, flag="alpha_mask"))
    return Masks(by_picture, tuple(problems), _warnings(pictures, by_picture, results, named, sidecars, files))


def _warnings(
    pictures: Sequence[Picture],
    by_picture: dict[Path, Mask],
    results: Sequence[object],
    named: dict[str, Path],
    sidecars: dict[str, Path],
    files: dict[Picture, Path | None],
) -> tuple[Problem, ...]:
    warnings = [Problem(f[1], path=f[0].path) for f in results if isinstance(f, tuple) and f[1]]
    if by_picture:
        warnings += [
            Problem("has no mask; all of it counts fully", path=picture.path)
            for picture, found in zip(pictures, results, strict=True)
            if found is None
        ]
    unused = sorted({*named.values(), *sidecars.values()} - set(files.values()))
    return (*warnings, *(Problem("a mask without a picture", path=path) for path in unused))


def _named_masks(folder: Path, problems: list[str]) -> dict[str, Path]:
    masks: dict[str, Path] = {}
    for root, folders, files in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(root, name)
            if path.suffix.lower() not in extensions() or name.startswith("."):
                continue
            first = masks.setdefault(_mask_name(os.path.relpath(path, folder)), path)
            if first != path:
                text = f"--mask_dir: {first} and {path} are masks of the same picture; keep one"
                problems.append(Problem(text, flag="mask_dir"))
    return masks


def _sidecars(folders: Iterable[Path]) -> dict[str, Path]:
    files = (path for folder in folders for path in folder.iterdir() if path.name.lower().endswith(MASK_SUFFIX))
    return {_mask_name(path): path for path in files if not path.name.startswith(".")}


def _mask_name(path: Path | str) -> str:
    """What a mask shares with its picture."""
    name = _without_extension(path)
    return name[: -len(".mask")] if name.lower().endswith(".mask") else name


def _without_extension(path: Path | str) -> str:
    # macOS writes accents decomposed (NFD), editors composed (NFC); the same name must match either way.
    return unicodedata.normalize("NFC", os.path.splitext(os.path.normpath(path))[0])


# ---- checking ----


def _inspect(picture: Picture, file: Path | None, alpha_mask: bool) -> tuple[Mask, str] | UserError | None:
    """The mask and a warning about it, if there is one; None without a mask."""
    try:
        if file is not None:
            mask = Mask(file, hashlib.sha256(read_bytes(file, PICTURE_LIMIT)).hexdigest())
        elif alpha_mask and _has_alpha(picture.path):
            mask = Mask(picture.path, picture.digest, is_alpha=True)
        else:
            return None
        image = open_mask(mask)
    except UserError as error:
        return error
    except OSError as error:
        return UserError(f"{file}: cannot be read ({error.strerror})")
    if problem := _shape_problem(Size.of(image), picture):
        return UserError(f"{mask.path}: {problem}")
    dark = image.getextrema()[1] < DARKEST_WHITE
    return mask, "nothing in this mask is white; white (255) is what counts" if dark else ""


def _has_alpha(path: Path) -> bool:
    return path.suffix.lower() not in (".jpg", ".jpeg") and load_upright(path).has_transparency_data


def _shape_problem(size: Size, picture: Picture) -> str | None:
    def differ(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return abs(math.log(a[0] / a[1]) - math.log(b[0] / b[1])) > SHAPE_TOLERANCE

    if not differ(size, picture.size):
        return None
    hint = "make it of the same shape"
    if not differ(size[::-1], picture.size):
        hint = "turn it as the picture is seen, upright"
    return f"{size} is not the shape of its picture {picture.path.name}, {picture.size}; {hint}"


# ---- using ----


def open_mask(mask: Mask) -> Image.Image:
    """The mask upright, in 8-bit grey."""
    image = load_unchanged(mask.path, mask.digest)
    if mask.is_alpha:
        return image.convert("RGBA").getchannel("A")
    return to_rgb(image, BLACK).convert("L")


def mask_at(
    mask: Mask,
    picture: Size,
    size: Size,
    crop: tuple[float, float],
    flip: bool,
    latent: tuple[int, int],
) -> np.ndarray:
    """The mask of one crop of a picture of this size, averaged over each latent: float32 [h, w] in 0..1."""
    image = open_mask(mask)
    across, down = image.width / picture.width, image.height / picture.height
    left, top, right, bottom = crop_box(picture, size, crop)
    box = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
    height, width = size
    values = np.asarray(image.resize(size.for_pil, Image.Resampling.BILINEAR, box=box), dtype=np.float32) / 255
    values = values[:, ::-1] if flip else values
    rows, columns = latent
    # [H, W] -> [h, H/h, w, W/w] -> [h, w]
    return values.reshape(rows, height // rows, columns, width // columns).mean(axis=(1, 3), dtype=np.float32)


def loss_weights(values: np.ndarray, unmasked_weight: float) -> np.ndarray:
    """From `unmasked_weight` where the mask is 0 to exactly 1 where it is 1."""
    return 1 - np.float32(1 - unmasked_weight) * (1 - values)
