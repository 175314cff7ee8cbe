"""Files that somebody else wrote, read with care: only regular files, and only of a size that such a file may have.

A pipe would block for ever and a device fill the memory. Every refusal is an OSError whose `strerror` is a sentence.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path
from typing import BinaryIO

# The most that a file of the kind can sensibly have.
TEXT_LIMIT = 16 * 2**20
PICTURE_LIMIT = 1024 * 2**20

# A pipe that is read at all must have been written to its end by then.
PIPE_SECONDS = 10.0

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: Path | str) -> BinaryIO:
    """Open for reading, without waiting for anybody; links are followed."""
    descriptor = _open(path)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"is {_KINDS.get(kind, 'something else')}, not a file", str(path))
    return os.fdopen(descriptor, "rb")


def _open(path: Path | str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None


def read_bytes(path: Path | str, limit: int) -> bytes:
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise _too_much(path, limit)
        # a file may grow, and those of /proc have no size: so what is read counts
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _too_much(path, limit)
    return data


def _too_much(path: Path | str, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"has more than {limit / 2**20:,.0f} MiB, too much for such a file", str(path))


def read_file_or_pipe(path: Path | str, limit: int, seconds: float = PIPE_SECONDS) -> bytes:
    """As read_bytes, but also what comes out of a pipe, which is read only once: of `<(...)` or /dev/stdin."""
    descriptor = _open(path)
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return read_bytes(path, limit)
        return _drain(descriptor, path, limit, seconds)
    finally:
        os.close(descriptor)


def _drain(descriptor: int, path: Path | str, limit: int, seconds: float) -> bytes:
    end = time.monotonic() + seconds
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    # to a pipe without a name nobody can come any more once its writers have gone
    nameless = os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:")
    data = b""
    while len(data) <= limit:
        try:
            piece = os.read(descriptor, 2**16)
        except BlockingIOError:  # there is a writer that has nothing to say yet
            piece = None
        if piece:
            data += piece
        elif piece is not None and (data or nameless):
            return data
        else:
            events = poll.poll(max(0.0, end - time.monotonic()) * 1000)
            if not events:
                raise OSError(errno.ETIMEDOUT, f"is a pipe that was not written within {seconds:g} seconds", str(path))
            if events[0][1] == select.POLLHUP:
                return data
    raise _too_much(path, limit)


def read_text(path: Path | str, limit: int = TEXT_LIMIT) -> str:
    """UTF-8, with or without a byte-order mark; a UnicodeDecodeError if it is something else."""
    return read_bytes(path, limit).decode("utf-8-sig")


def text_problem(text: str) -> str | None:
    """Why a text cannot serve as a prompt or as a name of a file; None if it can."""
    if "\0" in text:
        return "has a NUL character in it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has something in it that is no character: bytes that are not UTF-8, or half of a surrogate pair"
    return None
