"""Small pictures inside a page: as data URIs, all together within a budget of bytes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from flux_db.atomic import write_file
from flux_db.console import printable, say
from flux_db.data.dataset import Dataset, Example
from flux_db.data.pixels import load_rgb, resize_and_crop
from flux_db.errors import UserError
from flux_db.files import read_text
from flux_db.output_folder import THUMBNAIL_INDEX, THUMBNAILS
from flux_db.settings.derived import background
from flux_db.settings.schema import Config

# Longest sides to try, the largest first.
EDGES = (384, 320, 256, 192, 144, 96, 64)
QUALITY = 80
# A picture with longer sides is a photograph to the eye. In a smaller one every pixel is to be seen.
SMALL = 128

MOST_TRAINING = 24
TRAINING_EDGE = 256


def data_uris(paths: Sequence[Path], budget: int) -> list[str]:
    """The pictures as data URIs, together at most `budget` characters, as large as that allows."""
    probe = paths[:: max(1, len(paths) // 4)][:4]
    for edge in EDGES[:-1]:
        if sum(len(_uri_of(path, edge)) for path in probe) * len(paths) > 1.3 * budget * len(probe):
            continue  # not even near
        uris = [_uri_of(path, edge) for path in paths]
        if sum(map(len, uris)) <= budget:
            return uris
    return [_uri_of(path, EDGES[-1]) for path in paths]


def _uri_of(path: Path, edge: int) -> str:
    return _uri(path, path.stat().st_mtime_ns, edge) if path.exists() else ""


@lru_cache(maxsize=2048)
def _uri(path: Path, changed: int, edge: int) -> str:
    """Of the file as it was changed last; a run that rewrites its report encodes only what is new."""
    try:
        picture = load_rgb(path)
    except UserError:
        return ""  # a damaged picture is shown by its description
    if max(picture.size) <= min(SMALL, edge):
        kind = "png"  # the page's style keeps the pixels of a PNG sharp
    else:
        kind = "webp"
        picture.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    return f"data:image/{kind};base64,{base64.b64encode(_encoded(picture, kind)).decode()}"


def _encoded(picture: Image.Image, kind: str, *, lossless: bool = False) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=QUALITY, lossless=lossless)  # PNG has neither option
    return buffer.getvalue()


# --- the training pictures, as the model saw them ----------------------------------------------------------------


@dataclass(frozen=True)
class TrainingPicture:
    file: str
    name: str
    caption: str


@dataclass(frozen=True)
class TrainingPictures:
    folder: Path
    total: int
    """Of the run; the pictures stored may be fewer."""
    pictures: tuple[TrainingPicture, ...]


def store_training_pictures(config: Config, dataset: Dataset) -> None:
    """Write small copies of the crops beside the run, so that a report needs neither pictures nor cache."""
    try:
        _store(config, dataset, Path(config.output.output_dir, THUMBNAILS))
    except Exception as problem:  # a report without them is no reason not to train
        say(f"warning: the report will not show the training pictures: {type(problem).__name__}: {problem}")


def _store(config: Config, dataset: Dataset, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    samples = list({sample.picture.path: sample for sample in dataset.examples}.values())
    pictures = []
    for number, sample in enumerate(samples[:MOST_TRAINING]):
        name = f"training-{number:02d}.webp"
        crop = _crop(sample, config)
        write_file(folder / name, _encoded(crop, "webp", lossless=max(crop.size) <= SMALL))
        pictures.append(TrainingPicture(name, printable(sample.picture.path.name), sample.prompt))
    content = {"total": len(samples), "pictures": [asdict(picture) for picture in pictures]}
    write_file(folder / THUMBNAIL_INDEX, (json.dumps(content, indent=1) + "\n").encode())


def _crop(sample: Example, config: Config) -> Image.Image:
    pixels = resize_and_crop(load_rgb(sample.picture.path, background(config)), sample.size, sample.crop)
    picture = Image.fromarray(((pixels.transpose(1, 2, 0) + 1) * 127.5).round().astype(np.uint8))
    picture.thumbnail((TRAINING_EDGE, TRAINING_EDGE), Image.Resampling.LANCZOS)
    return picture


def read_training_pictures(output: Path) -> TrainingPictures | None:
    """What `store_training_pictures` wrote; None where there is nothing."""
    folder = output / THUMBNAILS
    try:
        content = json.loads(read_text(folder / THUMBNAIL_INDEX))
        pictures = tuple(TrainingPicture(**entry) for entry in content["pictures"])
        pictures = tuple(p for p in pictures if Path(p.file).name == p.file and (folder / p.file).is_file())
        return TrainingPictures(folder, int(content["total"]), pictures[:MOST_TRAINING])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
