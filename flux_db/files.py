"""Files that somebody else wrote, read with care: only regular files, and only of a size that such a file may have.

A pipe would block for ever and a device fill the memory. Every refusal is an OSError whose `strerror` is a sentence.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# The most that a file of the kind can sensibly have.
TEXT_LIMIT = 16 * 2**20
PICTURE_LIMIT = 1024 * 2**20

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: Path | str) -> BinaryIO:
    """Open for reading, without waiting for anybody; links are followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path | str, limit: int) -> bytes:
    with open_regular(path) as file:
        # a file may grow, and those of /proc have no size: so what is read counts
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit / 2**20:,.0f} MiB, too much for such a file", str(path))
    return data


def read_text(path: Path | str, limit: int = TEXT_LIMIT) -> str:
    """UTF-8, with or without a byte-order mark; a UnicodeDecodeError if it is something else."""
    return read_bytes(path, limit).decode("utf-8-sig")
