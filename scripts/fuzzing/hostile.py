"""Things that may lie where the program looks for a file, and texts that may come where it looks for a word."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

SPARSE_BYTES = 3 * 2**30


def pipe(path: Path) -> None:
    os.mkfifo(path)


def socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def folder(path: Path) -> None:
    path.mkdir()


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def null(path: Path) -> None:
    path.symlink_to("/dev/null")


def nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def itself(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, SPARSE_BYTES)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(10_000))


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": pipe,
    "a socket": socket,
    "a folder": folder,
    "a link to /dev/zero": zeros,
    "a link to /dev/null": null,
    "a link to nowhere": nowhere,
    "a link to itself": itself,
    "a sparse file": sparse,
    "an empty file": empty,
    "noise": noise,
}

HTML = b"<!doctype html><html><head><title>404 Not Found</title></head><body>Not Found</body></html>\n"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 553116\n"

# A token of the hub, to be shown to nobody.
SECRET = "hf_secretsecretsecret"

# What a terminal would obey, a page would run and a table would compute.
TERMINAL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred"
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>"
FORMULA = '=HYPERLINK("http://evil","click")'
TEXTS = {
    "an escape sequence": TERMINAL,
    "a line break": "first\nerror: second",
    "a carriage return": "harmless\roverwritten",
    "a character that turns the writing": "abc\u202egnp.exe",
    "a bell and a backspace": "ding\x07\x08\x08",
    "C1 controls": "x\x9b31m",
    "markup": MARKUP,
    "a formula": FORMULA,
}


def deep(opening: str, closing: str, depth: int, middle: str = "") -> str:
    return opening * depth + middle + closing * depth


def bomb(lines: int = 30, width: int = 10) -> str:
    """YAML whose aliases stand for width ** lines items."""
    text = ["a0: &a0 [x, x, x]"]
    text += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, lines)]
    return "\n".join(text) + "\n"
