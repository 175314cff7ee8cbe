"""A file that grows by lines, each in it whole or not at all; a full disk only delays them."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

from flux_db.console import say


class LineFile:
    """Appends lines to a file. A disk that refuses them is reported once and never an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque()
        self._refused = False

    def append(self, line: str) -> None:
        self._waiting.append(line.encode() + b"\n")
        self._write(durably=False)

    def flush(self) -> None:
        """Make what was appended so far safe on disk."""
        self._write(durably=True)

    def close(self) -> None:
        self._write(durably=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._waiting:
            say(f"warning: the last {len(self._waiting)} lines are missing in {self.path}")
            self._waiting.clear()

    def _write(self, *, durably: bool) -> None:
        try:
            while self._waiting:
                self._append_whole(self._waiting[0])
                self._waiting.popleft()
            if durably and self._descriptor is not None:
                os.fsync(self._descriptor)
        except OSError as problem:
            if not self._refused:
                say(f"warning: {self.path} cannot be written: {problem.strerror}; its lines are kept until it can")
            self._refused = True
        else:
            self._refused = False

    def _append_whole(self, line: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        end = os.fstat(self._descriptor).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise
