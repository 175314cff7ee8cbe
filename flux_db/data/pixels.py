"""The pixels of a picture: opened upright as RGB, and brought to size.

No randomness: where to crop and whether to flip is decided by the caller.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features

from flux_db.data import near_duplicates
from flux_db.errors import UserError
from flux_db.files import PICTURE_LIMIT, open_regular, read_bytes
from flux_db.size import Size

_opening = threading.Lock()

MAX_PIXELS = 128_000_000
WHITE = (255, 255, 255)
# EXIF orientations of pictures whose height and width are exchanged.
SIDEWAYS = (5, 6, 7, 8)


# By name, because PIL would otherwise hand a PostScript file called .jpg to Ghostscript.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")

# Formats that need a library: extension -> name in PIL, and how to install what reads it.
_OPTIONAL = {".avif": "AVIF", ".heic": "HEIF", ".heif": "HEIF", ".hif": "HEIF"}
_INSTALLED_BY = {"AVIF": "pip install -U pillow", "HEIF": 'pip install -e ".[heic]"'}


@functools.cache
def extensions() -> tuple[str, ...]:
    """Of the pictures that can be read here."""
    there = {
        "AVIF": "avif" in features.modules and features.check_module("avif"),
        "HEIF": importlib.util.find_spec("pillow_heif") is not None,
    }
    return (*_EXTENSIONS, *(name for name, kind in _OPTIONAL.items() if there[kind]))


def unread_formats(paths: Sequence[Path]) -> list[str]:
    """What to do about files that are pictures, but of formats that cannot be read here; a text for each format."""
    found: dict[str, list[str]] = {}
    for path in paths:
        if (suffix := path.suffix.lower()) in _OPTIONAL and suffix not in extensions():
            found.setdefault(_OPTIONAL[suffix], []).append(path.name)
    return [
        f"pictures left alone: {listed(names)}; to read them, {_INSTALLED_BY[kind]}, or convert them to JPEG, as in: "
        f"magick mogrify -format jpg *{Path(names[0]).suffix}"
        for kind, names in found.items()
    ]


def listed(names: Sequence[str], most: int = 10) -> str:
    """The count, and the first names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} ({', '.join(names[:most])}{more})"


# The values of white in the modes deeper than 8 bits; the first that is not exceeded is taken.
_WHITE_LEVELS = {"I;16": (65535,), "I;16B": (65535,), "I": (65535,), "F": (1, 255, 65535)}


def demand_picture(path: Path) -> None:
    """By its first bytes: what is none may be larger than memory, and is not read whole."""
    with open_regular(path) as stream:
        if not stream.peek(1):
            raise UserError(f"{path}: the file is empty")
        _open(stream, path)


def decode(data: bytes, path: Path) -> tuple[Size, bytes]:
    """Size and perceptual hash of the upright picture."""
    with _open(io.BytesIO(data), path) as image:
        full_size = Size.of(image)
        # A JPEG is still read to its end, but at down to an eighth of its size, in a seventh of the time.
        reduced = image.draft(image.mode, (near_duplicates.SIDE, near_duplicates.SIDE))
        thumb = near_duplicates.thumbnail(to_rgb(image))
        size = full_size if reduced else Size.of(image)  # decoding may change it: PIL itself turns TIFFs upright
        orientation = _orientation(image)
        hash_ = near_duplicates.perceptual_hash(_upright(thumb, orientation))
        return Size(*reversed(size)) if orientation in SIDEWAYS else size, hash_


def load_rgb(path: Path, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """The picture upright, in 8-bit RGB, transparent parts on `background`. Of an animation, the first frame."""
    with blame(path):
        return to_rgb(load_upright(path), background)


def load_unchanged(path: Path, digest: str) -> Image.Image:
    """As `load_upright`, but of a file known by its digest; a UserError if it has changed since."""
    with blame(path):
        data = read_bytes(path, PICTURE_LIMIT)  # once: what is compared is what is decoded
        if hashlib.sha256(data).hexdigest() != digest:
            raise UserError(f"{path}: has changed since the run looked at it; start again, to use it as it is now")
        with _open(io.BytesIO(data), path) as image:
            image.load()
            return _upright(image, _orientation(image))


def load_upright(path: Path) -> Image.Image:
    """The picture upright, in the mode it was saved in (so with its alpha channel)."""
    with blame(path), open_regular(path) as stream, _open(stream, path) as image:
        image.load()
        return _upright(image, _orientation(image))


def to_rgb(image: Image.Image, background: tuple[int, int, int] = WHITE) -> Image.Image:
    if image.mode in _WHITE_LEVELS:
        return _to_8_bits(image).convert("RGB")
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, (*background, 255))
        canvas.alpha_composite(image.convert("RGBA"))
        return canvas.convert("RGB")
    return image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    # PIL's own conversion clips instead of scaling: almost all of a 16-bit picture would become white.
    values = np.array(image, dtype=np.float32)
    values[~np.isfinite(values)] = 0
    black, peak = min(0.0, float(values.min())), float(values.max())
    white = next((level for level in _WHITE_LEVELS[image.mode] if peak <= level), peak)
    values = (values - black) * (255 / (white - black))
    return Image.fromarray(values.round().astype(np.uint8))


def _open(stream: BinaryIO, path: Path) -> Image.Image:
    """Reads the header only, and refuses what is too large to be decoded."""
    with _opening:
        # PIL's own limit warns at a size that is fine here, and its error does not say what size was met.
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(stream, formats=_formats(path))
        finally:
            Image.MAX_IMAGE_PIXELS = limit
    pixels = image.height * image.width
    if pixels > MAX_PIXELS:
        raise UserError(
            f"{path}: {Size.of(image)} is {pixels / 1e6:,.0f} megapixels, more than the limit of "
            f"{MAX_PIXELS / 1e6:,.0f}; scale it down"
        )
    return image


def _formats(path: Path) -> tuple[str, ...]:
    """Those that may be in the file."""
    kind = _OPTIONAL.get(path.suffix.lower())
    if kind == "HEIF":
        import pillow_heif

        pillow_heif.register_heif_opener()
    return _FORMATS if kind is None else (*_FORMATS, kind)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged EXIF raises anything, and is no reason to refuse a good picture
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    """A copy, turned as its EXIF says; `orientation` was read with care."""
    if orientation == 1:
        return image.copy()
    image.info.pop("exif", None)  # or it would be written anew, which fails if another tag of it is damaged
    image.getexif()[ExifTags.Base.Orientation] = orientation
    return ImageOps.exif_transpose(image)


@contextmanager
def blame(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong with a picture into a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{path}: not a {', '.join(_FORMATS)} picture, whatever its name says") from None
    except Exception as error:  # decoders raise anything on damaged data: OSError, SyntaxError, struct.error, ...
        is_file_error = isinstance(error, OSError) and error.errno is not None
        reason = f"cannot be read ({error.strerror})" if is_file_error else f"damaged or cut short ({error})"
        raise UserError(f"{path}: {reason}") from error


def crop_box(source: Size, size: Size, crop: tuple[float, float]) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) in a picture of size `source` of what becomes `size`.

    The largest part of that shape; `crop` places it across and down: 0 left or top, 0.5 centre, 1 right or bottom.
    """
    (source_height, source_width), (height, width), (u, v) = source, size, crop
    scale = max(width / source_width, height / source_height)
    left, right = _span(source_width, width, scale, u)
    top, bottom = _span(source_height, height, scale, v)
    return left, top, right, bottom


def _span(length: int, target: int, scale: float, position: float) -> tuple[float, float]:
    # In whole pixels of the result, so that at scale 1 pixels are copied, not resampled. 1e-6: the scale is rounded.
    play = int(max(0.0, length * scale - target) + 1e-6)
    start = round(position * play) / scale
    return start, min(start + target / scale, length)


def resize_and_crop(
    image: Image.Image, size: Size, crop: tuple[float, float] = (0.5, 0.5), flip: bool = False
) -> np.ndarray:
    """The part of an RGB picture that `crop_box` gives, then flipped: float32 [3, height, width] in [-1, 1]."""
    box = crop_box(Size.of(image), size, crop)
    pixels = np.asarray(image.resize(Size(*size).for_pil, Image.Resampling.LANCZOS, box=box), dtype=np.float32)
    pixels = pixels[:, ::-1] if flip else pixels
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) / 127.5 - 1  # [H, W, 3] -> [3, H, W]
