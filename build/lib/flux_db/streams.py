"""stdout and stderr that never end the program: closed, in another encoding, or with nobody who reads them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO


class _Forgiving(io.FileIO):
    """An open descriptor. What it does not take is lost, and the first reason for it is kept."""

    refusal: OSError | None = None

    def write(self, data: Any) -> int:
        rest = whole = memoryview(data).cast("B")
        try:
            while rest:
                written = super().write(rest)
                if written is None:  # somebody made the terminal or the pipe non-blocking, and it is full
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as problem:
            self.refusal = self.refusal or problem
        return len(whole)


def guard() -> None:
    """Make the standard streams safe to write to; called once, when the program starts.

    A character that the terminal's encoding does not have is written as an escape. Output that cannot be written is
    lost in silence: a run of hours must not end because its terminal, its pipe or the disk of its log has gone.
    """
    for descriptor in range(3):
        _fill_gap(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # any other stream was put there by somebody in this process, as pytest does
        if stream is getattr(sys, f"__{name}__") and not isinstance(_raw(stream), _Forgiving):
            guarded = _guarded(stream)
            setattr(sys, name, guarded)
            setattr(sys, f"__{name}__", guarded)


def refusal() -> OSError | None:
    """Why a part of stdout was not written, if that happened. A reader that has seen enough (`| head`) is no reason."""
    sys.stdout.flush()
    raw = _raw(sys.stdout)
    found = raw.refusal if isinstance(raw, _Forgiving) else None
    return found if found and found.errno != errno.EPIPE else None


def _raw(stream: TextIO | None) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _fill_gap(descriptor: int) -> None:
    """A closed descriptor would be given to the next file that is opened, and what libraries print would land there."""
    try:
        os.fstat(descriptor)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one


def _guarded(stream: TextIO | None) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # None: it was closed when Python started
        return open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _Forgiving(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # python -u: nothing waits in a buffer
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
