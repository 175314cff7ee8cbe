"""The captions of a folder of pictures.

`name.txt` next to `name.jpg`, or rows of `metadata.jsonl` / `metadata.csv` in the layout of Hugging Face image folders:
`file_name`, relative to the metadata file, and `text` or `prompt`. A `.txt` wins over a row.
"""

import csv
import io
import itertools
import json
import os
import reprlib
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flux_db.errors import UserError
from flux_db.files import read_text, text_problem
from flux_db.problem import Kind, Problem

# A caption has a few hundred bytes, and a dataset up to some hundred thousand of them.
CAPTION_LIMIT = 2**20
METADATA_LIMIT = 128 * 2**20
# Of each metadata file so many problems are named.
MOST_PROBLEMS = 100
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
TEXT_COLUMNS = ("text", "prompt")


@dataclass(frozen=True)
class Captions:
    by_picture: dict[Path, str]
    """Pictures without a caption are absent."""
    warnings: dict[Path, tuple[Problem, ...]]
    problems: tuple[str, ...]
    files: frozenset[Path]
    """The files that captions were read from."""


@dataclass(frozen=True)
class _Row:
    place: str
    """File and line, for messages."""
    picture: Path
    text: str


def read_captions(folder: Path, files: Sequence[Path], pictures: Sequence[Path]) -> Captions:
    """The captions among `files` for `pictures`, all below the folder; problems are collected, never raised."""
    sidecars = _sidecars(files, pictures)
    metadata = [path for path in files if path.name in METADATA_NAMES]
    strays = _links_out(folder, [*sidecars.values(), *metadata], pictures)
    why = "is a link out of the folder, and is not read; put the file itself here"
    problems = [f"{path}: {why}" for path in sorted(strays)]
    rows = _metadata_rows([path for path in metadata if path not in strays], pictures, problems)

    by_picture: dict[Path, str] = {}
    warnings: dict[Path, tuple[Problem, ...]] = {}
    for picture in pictures:
        candidates = []
        if picture in sidecars and sidecars[picture] not in strays:
            try:
                candidates.append((str(sidecars[picture]), _sidecar_text(sidecars[picture])))
            except UserError as error:
                problems += error.problems
        if picture in rows:
            candidates.append((rows[picture].place, rows[picture].text))
        if text := next((text for _, text in candidates if text), None):
            by_picture[picture] = text
        empty = [place for place, text in candidates if not text]
        if empty:
            warnings[picture] = tuple(Problem(f"empty caption in {place}", kind=Kind.EMPTY_CAPTION) for place in empty)
    return Captions(by_picture, warnings, tuple(dict.fromkeys(problems)), frozenset([*sidecars.values(), *metadata]))


def _links_out(folder: Path, files: Sequence[Path], pictures: Sequence[Path]) -> set[Path]:
    """Files that are links out of the folder, unless the target is a caption file beside the target of a picture.

    Captions are shown and stored, so that a link could publish any text of this machine.
    """
    root = folder.resolve()
    links = {path: Path(os.path.realpath(path)) for path in files if path.is_symlink()}
    out = {path: target for path, target in links.items() if not target.is_relative_to(root)}
    if not out:
        return set()
    real, targets = [Path(os.path.realpath(picture)) for picture in pictures], list(out.values())
    places = {picture.parent for picture in real}
    beside = {target for target in targets if target.name in METADATA_NAMES and target.parent in places}
    beside.update(_sidecars(targets, real).values())
    return {path for path, target in out.items() if target not in beside}


def _sidecars(files: Sequence[Path], pictures: Sequence[Path]) -> dict[Path, Path]:
    texts = {_key(path.with_suffix("")): path for path in files if path.suffix.lower() == ".txt"}
    keys = {picture: _key(picture.with_suffix("")) for picture in pictures}
    return {picture: texts[key] for picture, key in keys.items() if key in texts}


def _metadata_rows(metadata: Sequence[Path], pictures: Sequence[Path], problems: list[str]) -> dict[Path, _Row]:
    known = {_key(picture): picture for picture in pictures}
    rows: dict[Path, _Row] = {}
    for path in metadata:
        found = list(itertools.islice(_read_rows(path, known, rows), MOST_PROBLEMS + 1))
        if len(found) > MOST_PROBLEMS:
            found[-1] = f"{path}: has more problems; mend these first"
        problems += found
    return rows


def _read_rows(path: Path, known: dict[str, Path], rows: dict[Path, _Row]) -> Iterator[str]:
    """Put the rows of a metadata file with the others; yields what is wrong with them."""
    try:
        for place, fields in _csv_lines(path) if path.suffix == ".csv" else _json_lines(path):
            try:
                row = _check_row(place, fields, path.parent, known)
            except UserError as error:
                yield from error.problems
                continue
            first = rows.setdefault(row.picture, row)
            if first.text != row.text:
                yield f"{place}: another caption for {row.picture.name}, which has one in {first.place}"
    except UserError as error:
        yield from error.problems


def _json_lines(path: Path) -> Iterator[tuple[str, object]]:
    # Not splitlines(): it also splits at U+2028 and its like, which may be inside a JSON string.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                fields = None
            yield f"{path}, line {number}", fields


def _csv_lines(path: Path) -> Iterator[tuple[str, object]]:
    # strict: a quote that is never closed would otherwise make one caption of the rest of the file
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    line = 1
    try:
        columns = [name.strip() for name in reader.fieldnames or ()]
        if "file_name" not in columns or not set(TEXT_COLUMNS) & set(columns):
            raise UserError(
                f"{path}, line 1: needs the columns file_name and text (or prompt), has {', '.join(columns)}"
            )
        reader.fieldnames = columns
        line = reader.line_num + 1
        for fields in reader:
            yield f"{path}, line {reader.line_num}", fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line}: this row is not CSV ({error}); look for a quote that is not closed"
        ) from None


def _check_row(place: str, fields: object, folder: Path, known: dict[str, Path]) -> _Row:
    if not isinstance(fields, dict):
        raise UserError(f'{place}: not a JSON object such as {{"file_name": "a.jpg", "text": "a dog"}}')
    name = fields.get("file_name")
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"{place}: no file_name")
    picture = known.get(_key(folder / name.strip()))
    if picture is None:
        raise UserError(f"{place}: there is no picture {name} in {folder}")
    if any(fields.get(None, ())):
        raise UserError(f"{place}: has more columns than the first line; put a text with commas in quotes")
    column = next((column for column in TEXT_COLUMNS if column in fields), None)
    if column is None:
        raise UserError(f"{place}: neither text nor prompt")
    text = "" if fields[column] is None else fields[column]
    if not isinstance(text, str):
        raise UserError(f"{place}: {column} is not a text: {reprlib.repr(text)}")
    if problem := text_problem(text):
        raise UserError(f"{place}: {column} {problem}")
    return _Row(place, picture, _on_one_line(text))


def _sidecar_text(path: Path) -> str:
    text = _read_text(path, CAPTION_LIMIT)
    if problem := text_problem(text):
        raise UserError(f"{path}: {problem}")
    return _on_one_line(text)


def _read_text(path: Path, limit: int = METADATA_LIMIT) -> str:
    try:
        return read_text(path, limit)
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _key(path: Path) -> str:
    # macOS writes accents decomposed (NFD), editors composed (NFC); the same name must match either way.
    return unicodedata.normalize("NFC", os.path.normpath(path))
