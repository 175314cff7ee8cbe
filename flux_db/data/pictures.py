"""Pictures: found in a folder, and checked."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from flux_db.data import near_duplicates
from flux_db.data.captions import read_captions
from flux_db.data.pixels import blame, decode, demand_picture, extensions, listed, unread_formats
from flux_db.errors import UserError
from flux_db.file_memo import FileMemo, identity_of
from flux_db.files import PICTURE_LIMIT, read_bytes
from flux_db.problem import Kind, Problem
from flux_db.progress import progress_bar
from flux_db.size import Size

MASK_SUFFIX = ".mask.png"
# Folders inside one another; os.walk calls itself for each.
MAX_DEPTH = 100
# Fewer pictures are checked before anyone would look at a progress bar.
PROGRESS_FROM = 200

# Each may hold a picture of MAX_PIXELS.
_DECODING_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Source:
    """A file that by its name is a picture; not opened yet."""

    path: Path
    caption: str | None
    """None: the instance prompt serves."""
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Found:
    folder: Path
    sources: tuple[Source, ...] = ()
    """In natural order of their paths: img2 before img10."""
    ignored: tuple[Path, ...] = ()
    """Files that are neither pictures, masks nor captions. Hidden files are not mentioned at all."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A picture that was opened and decoded without complaint."""

    path: Path
    caption: str | None
    """None: the instance prompt serves."""
    size: Size
    """Upright."""
    digest: str
    """SHA-256 of the file."""
    perceptual_hash: bytes = b""
    """Empty for a picture of one colour."""
    warnings: tuple[Problem, ...] = ()


class Inspection(NamedTuple):
    pictures: tuple[Picture, ...]
    problems: tuple[str, ...]
    """All of them, those of finding the pictures included; trainable if empty."""
    warnings: tuple[Problem, ...]


# ---- finding ----


def find_pictures(folder: Path, *, may_be_empty: bool = False) -> Found:
    """The pictures below `folder` and their captions. Problems are collected, never raised."""
    folder = Path(folder)
    if not os.path.isdir(folder):
        missing = (f"{folder}: {'not a folder' if os.path.exists(folder) else 'no such folder'}",)
        return Found(folder, problems=() if may_be_empty and not os.path.exists(folder) else missing)
    problems: list[str] = []
    files = sorted(_walk(folder, problems), key=lambda path: _natural(path.relative_to(folder)))
    paths = [path for path in files if _is_picture(path)]
    captions = read_captions(folder, files, paths)
    ignored = tuple(f for f in files if not (_is_picture(f) or _is_mask(f) or f in captions.files))
    if not paths and not may_be_empty:
        problems.append(f"{folder}: no pictures ({', '.join(extensions())}); {len(ignored)} other files")
        problems += [f"{folder}: {text}" for text in unread_formats(ignored)]
    sources = (Source(path, captions.by_picture.get(path), captions.warnings.get(path, ())) for path in paths)
    return Found(folder, tuple(sources), ignored, (*problems, *captions.problems))


def _walk(folder: Path, problems: list[str]) -> Iterator[Path]:
    """All files below `folder` that are not hidden. Links are followed, but no folder is entered twice."""
    seen = {_identity(folder)}

    def enter(path: Path) -> bool:
        identity = _identity(path)
        new = not path.name.startswith(".") and identity not in seen
        seen.add(identity)
        return new

    def report(error: OSError) -> None:
        problems.append(f"{error.filename}: cannot be read ({error.strerror})")

    for root, folders, files in os.walk(folder, followlinks=True, onerror=report):
        folders[:] = [name for name in sorted(folders) if enter(Path(root, name))]
        if folders and len(Path(root).relative_to(folder).parts) >= MAX_DEPTH:
            problems.append(f"{folder}: has folders nested too deeply")
            return
        yield from (Path(root, name) for name in files if not name.startswith("."))


def _identity(folder: Path) -> tuple[int, int] | Path:
    """The same by whatever path and links a folder is reached."""
    try:
        found = os.stat(folder)
    except OSError:
        return folder
    return found.st_dev, found.st_ino


def _is_mask(path: Path) -> bool:
    return path.name.lower().endswith(MASK_SUFFIX)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in extensions() and not _is_mask(path)


def _natural(path: Path) -> tuple:
    # Splitting at a group alternates text and digits, so that only like is compared with like.
    parts = [re.split(r"(\d+)", part.casefold()) for part in path.parts]
    return [[int(piece) if i % 2 else piece for i, piece in enumerate(part)] for part in parts], str(path)


# ---- checking ----


def inspect_pictures(found: Found, resolution: int, memo: FileMemo | None = None) -> Inspection:
    """Decode every picture that the memo does not know, and collect all that is wrong with them."""
    memo = memo or FileMemo()
    with ThreadPoolExecutor(_DECODING_THREADS) as pool:
        results = pool.map(lambda source: _inspect(source, resolution, memo), found.sources)
        if len(found.sources) >= PROGRESS_FROM:
            results = progress_bar(results, desc="checking", total=len(found.sources), unit="picture", leave=False)
        results = list(results)
    pictures = _mark_duplicates([result for result in results if isinstance(result, Picture)])
    problems = [problem for result in results if isinstance(result, UserError) for problem in result.problems]
    warnings = [
        Problem(warning.text, path=picture.path, kind=warning.kind)
        for picture in pictures
        for warning in picture.warnings
    ]
    warnings += [Problem(text, path=found.folder) for text in _left_alone(found)]
    return Inspection(tuple(pictures), (*found.problems, *problems), tuple(warnings))


def _left_alone(found: Found) -> list[str]:
    pictures = unread_formats(found.ignored)
    others = [p.relative_to(found.folder).as_posix() for p in found.ignored if not unread_formats([p])]
    return [*pictures, *([f"other files, left alone: {listed(others)}"] if others else [])]


def _inspect(source: Source, resolution: int, memo: FileMemo) -> Picture | UserError:
    known = _known(memo.get(source.path))
    if known is None:
        identity = identity_of(source.path)
        try:
            with blame(source.path):
                demand_picture(source.path)
                data = read_bytes(source.path, PICTURE_LIMIT)
                size, hash_ = decode(data, source.path)
        except UserError as error:
            return error
        known = size, hashlib.sha256(data).hexdigest(), hash_
        memo.put(source.path, identity, [*size, known[1], hash_.hex()])
    size, digest, hash_ = known
    warnings = source.warnings
    if min(size) < resolution:
        text = f"{size} is smaller than {resolution} on the short side and will be scaled up"
        warnings += (Problem(text, kind=Kind.SMALL),)
    return Picture(source.path, source.caption, size, digest, hash_, warnings)


def _known(value: object) -> tuple[Size, str, bytes] | None:
    """Size, digest and hash as the memo has them; None for anything else."""
    try:
        height, width, digest, hash_ = value
        if len(bytes.fromhex(digest)) == hashlib.sha256().digest_size and min(height, width) > 0:
            return Size(int(height), int(width)), digest, bytes.fromhex(hash_)
    except (TypeError, ValueError):
        pass
    return None


def _mark_duplicates(pictures: Sequence[Picture]) -> list[Picture]:
    first: dict[str, Picture] = {}
    marked = []
    for picture, alike in zip(
        pictures, near_duplicates.first_alike([p.perceptual_hash for p in pictures]), strict=True
    ):
        original = first.setdefault(picture.digest, picture)
        if original is not picture:
            warning = Problem(f"the same picture as {original.path}", kind=Kind.SAME)
            picture = replace(picture, warnings=(*picture.warnings, warning))
        elif alike is not None:
            warning = Problem(f"looks like {pictures[alike].path}", kind=Kind.ALIKE)
            picture = replace(picture, warnings=(*picture.warnings, warning))
        marked.append(picture)
    return marked
