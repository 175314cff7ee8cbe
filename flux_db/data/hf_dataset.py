"""Pictures and captions of a Hugging Face dataset, written once as a folder like any other.

From there on nobody needs to know where they came from. The package `datasets` is imported only when such a folder has
to be made.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from flux_db.atomic import write_folder
from flux_db.console import say
from flux_db.errors import UserError, did_you_mean, unwritable
from flux_db.files import PICTURE_LIMIT, read_bytes
from flux_db.progress import progress_bar
from flux_db.settings.derived import cache_path
from flux_db.settings.schema import Config

SCHEMA = 1

# Formats that are kept as they are. The second picture of an MPO file, which phones write, is not looked at.
_EXTENSIONS = {"JPEG": ".jpg", "MPO": ".jpg", "PNG": ".png", "WEBP": ".webp", "BMP": ".bmp", "TIFF": ".tif"}
_SAVED_TO_DISK = ("dataset_dict.json", "state.json")
_TEXT, _BYTES = ("string", "large_string"), ("binary", "large_binary")


def export(config: Config) -> Path:
    """The folder with the pictures of --dataset_name; made if it is not there yet.

    A local dataset is exported again when its files change. One from the hub is fetched once for each cache.
    """
    folder = cache_path(config) / "datasets" / _key(config)
    if folder.is_dir():
        return folder
    rows = _load(config)
    _check_columns(rows, config)
    say(f"Writing the {len(rows)} pictures of {config.data.dataset_name} to {folder}")
    try:
        write_folder(folder, _files(rows, config))
    except OSError as error:
        if not folder.is_dir():  # otherwise another process was first, with the same pictures
            raise unwritable(f"--dataset_name: {folder} cannot be written", error) from error
    return folder


def _key(config: Config) -> str:
    data = config.data
    name: Any = data.dataset_name
    if os.path.isdir(name):
        paths = sorted(Path(root, file) for root, _, files in os.walk(name) for file in files)
        name = [(str(path.relative_to(name)), *_stamp(path)) for path in paths]
    content = [SCHEMA, name, data.dataset_config_name, data.image_column, data.caption_column]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:40]


def _stamp(path: Path) -> tuple[int, int]:
    """Changes with the file. Of what is no file the package would read for ever."""
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"--dataset_name: {path} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"--dataset_name: {path} is not a file; take it out of the dataset")
    return found.st_size, found.st_mtime_ns


def _load(config: Config) -> Any:
    """The rows of the split `train`, or of the only split there is; pictures not decoded."""
    name = config.data.dataset_name
    try:
        from datasets import disable_progress_bars, load_dataset, load_from_disk

        if sys.stderr is None or not sys.stderr.isatty():
            disable_progress_bars()  # they fill a log, as ours would
    except ImportError as error:
        raise UserError(
            f'--dataset_name {name}: needs the package datasets ({error}); pip install -e ".[datasets]", or put the '
            "pictures in a folder and use --instance_data_dir"
        ) from None
    try:
        if any(Path(name, file).is_file() for file in _SAVED_TO_DISK):
            loaded = load_from_disk(name)
        else:
            loaded = load_dataset(name, config.data.dataset_config_name, cache_dir=config.model.cache_dir)
    except Exception as error:  # the package raises anything: of the network, of the hub, of file formats
        cause: BaseException = error
        while cause.__cause__:
            cause = cause.__cause__
        reason = str(cause).strip().partition("\n")[0]
        raise UserError(f"--dataset_name {name}: cannot be loaded ({type(cause).__name__}: {reason})") from error
    if isinstance(loaded, dict):
        if "train" not in loaded and len(loaded) != 1:
            raise UserError(f"--dataset_name {name}: has no split train, only {', '.join(loaded)}")
        loaded = loaded["train" if "train" in loaded else next(iter(loaded))]
    return loaded


def _check_columns(rows: Any, config: Config) -> None:
    data, problems = config.data, []
    for flag, wanted, kinds in (("image_column", "pictures", _BYTES), ("caption_column", "texts", _TEXT)):
        name = getattr(data, flag)
        if name is None:
            continue
        if name not in rows.column_names:
            there = ", ".join(rows.column_names)
            hint = did_you_mean(name, rows.column_names)
            problems.append(f"--{flag} {name}: {data.dataset_name} has no such column, only {there}{hint}")
        elif not (wanted == "pictures" and _is_image(rows.features[name])):
            kind = getattr(rows.features[name], "dtype", type(rows.features[name]).__name__)
            if kind not in kinds:
                problems.append(f"--{flag} {name}: this column of {data.dataset_name} holds {kind}, not {wanted}")
    if not len(rows):
        problems.append(f"--dataset_name {data.dataset_name}: has no rows")
    if problems:
        raise UserError(problems)
    if data.caption_column is None and (texts := [n for n in rows.column_names if n in ("text", "prompt", "caption")]):
        say(f"The captions in column {texts[0]} are not used: --caption_column {texts[0]} would use them")


def _is_image(feature: Any) -> bool:
    from datasets import Image as ImageFeature

    return isinstance(feature, ImageFeature)


def _files(rows: Any, config: Config) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file of the folder, one after the other, so that memory does not grow."""
    from datasets import Image as ImageFeature

    data = config.data
    rows = rows.select_columns([name for name in (data.image_column, data.caption_column) if name])
    if _is_image(rows.features[data.image_column]):
        rows = rows.cast_column(data.image_column, ImageFeature(decode=False))
    captions, problems = [], []
    for number, row in enumerate(progress_bar(rows, desc="pictures", unit="picture")):
        content = _content(row[data.image_column])
        if content is None:
            problems.append(f"--dataset_name {data.dataset_name}: row {number} has no picture")
            continue
        content, extension = _as_file(content)
        name = f"row-{number:06d}{extension}"
        yield name, content
        if data.caption_column and row[data.caption_column] is not None:
            captions.append(json.dumps({"file_name": name, "text": row[data.caption_column]}) + "\n")
    if problems:
        raise UserError(problems)
    if captions:
        yield "metadata.jsonl", "".join(captions).encode()


def _content(cell: Any) -> bytes | None:
    """The bytes of a picture, from the cell itself or from the file that it names."""
    if not isinstance(cell, dict):
        return cell
    if cell["bytes"] is None and cell["path"] is not None:
        with contextlib.suppress(OSError):
            return read_bytes(cell["path"], PICTURE_LIMIT)
    return cell["bytes"]


def _as_file(content: bytes) -> tuple[bytes, str]:
    """The picture as it is, with the extension of its format; one of a format that is not read here as PNG."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.format in _EXTENSIONS:
                return content, _EXTENSIONS[image.format]
            if image.format == "EPS":  # a program, which PIL would have Ghostscript run
                return content, ".png"
            buffer = io.BytesIO()
            image.convert("RGBA").save(buffer, "PNG")
            return buffer.getvalue(), ".png"
    except Exception:  # the check of the pictures reports what is wrong with it
        return content, ".png"
