"""Files and folders that are there whole or not at all, also after a crash, a power cut or a full disk."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from PIL import Image

TEMP_PREFIX = ".tmp-flux_db-"

# Name and content; pairs may be made one after the other, for folders larger than memory.
Files = Mapping[str, bytes] | Iterable[tuple[str, bytes]]


def write_file(path: Path | str, data: bytes, *, durable: bool = True) -> None:
    """Write the file, or replace it in one step. On an error the old one is still there.

    Not `durable`: a power cut may leave it empty or cut short, which whoever reads it must be able to detect.
    """
    path = Path(path)
    temp = temp_path(path)
    try:
        with _named(path):
            write_durably(temp, data) if durable else temp.write_bytes(data)
            temp.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def write_png(path: Path | str, picture: Image.Image, **options: Any) -> None:
    """Write a picture as `write_file` does; the options go to PIL."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", **options)
    write_file(path, buffer.getvalue())


def write_folder(path: Path | str, files: Files, *, set_aside: Path | None = None) -> None:
    """Write the folder with all its files (relative paths) in one step; missing parents are made.

    What is at `path` is moved to `set_aside` once the new folder is complete on disk. Without `set_aside` only an
    empty folder may be there; anything else is an OSError.
    """
    path = Path(path)
    temp = temp_path(path)
    try:
        _fill(temp, files, path)
        with _named(path):
            _put_in_place(temp, path, set_aside)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    sync_folder(path.parent)


def remove_folder(path: Path | str) -> None:
    """Remove the folder so that a crash leaves it whole or under a temporary name, never half a folder by its name."""
    path = Path(path)
    doomed = temp_path(path, "old")
    path.rename(doomed)
    sync_folder(path.parent)
    shutil.rmtree(doomed)


def temp_path(path: Path, role: Literal["new", "old"] = "new") -> Path:
    """A fresh temporary name beside `path`. Sorted by name, new content comes before old."""
    return path.parent / f"{TEMP_PREFIX}{role}-{os.getpid()}-{secrets.token_hex(6)}"


def leftovers(folder: Path | str) -> list[Path]:
    """What bears a temporary name in the folder: of a dead run, or of a write under way."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(TEMP_PREFIX))


def remove_leftover(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the folder's names durable: without it a power cut may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of folders; that is no reason to call the write failed.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _fill(folder: Path, files: Files, target: Path) -> None:
    """Write the files into `folder`, which is to become `target`."""
    with _named(target):
        folder.mkdir(parents=True)
    for name, data in files.items() if isinstance(files, Mapping) else files:
        with _named(target / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_durably(folder / name, data)
    with _named(target):
        for inner, _, _ in os.walk(folder):
            sync_folder(Path(inner))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """An OSError names the file that was to be written: of a full disk it has no name, of others the temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _put_in_place(new: Path, path: Path, set_aside: Path | None) -> None:
    try:
        new.rename(path)
        return
    except OSError as error:
        if set_aside is None or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
    path.rename(set_aside)
    try:
        new.rename(path)
    except BaseException:
        set_aside.rename(path)
        raise
