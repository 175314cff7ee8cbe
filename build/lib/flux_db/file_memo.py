"""What was found out about files, and stays true while they do not change.

A file is known by its path, size, times and inode, as git knows it. A file that was changed within the last seconds is
looked at again: its time might not show another change. The memo is only a shortcut, so it may be lost at any time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from flux_db.atomic import write_file
from flux_db.files import read_bytes
from flux_db.plain_json import parse_json

SCHEMA = 1
MOST_ENTRIES = 200_000
MOST_BYTES = 256 * 2**20
# Times of some file systems are in whole seconds.
SETTLED_AFTER = 2.0


class FileMemo:
    """One value for each file. Safe to use from several threads."""

    def __init__(self, store: Path | None = None) -> None:
        self.store = store
        self._entries: dict[str, list[Any]] = _read(store) if store else {}
        self._changed = False
        self._lock = threading.Lock()

    def get(self, path: Path) -> Any:
        """The value of a file that has not changed since; None if there is none."""
        entry = self._entries.get(os.path.abspath(path))
        return entry[1] if entry and entry[0] == identity_of(path) else None

    def put(self, path: Path, identity: list[int] | None, value: Any) -> None:
        """Store a value; `identity` is that of the file before it was read."""
        if identity is None or time.time() - max(identity[1], identity[2]) / 1e9 < SETTLED_AFTER:
            return
        with self._lock:
            self._entries[os.path.abspath(path)] = [identity, value]
            self._changed = True

    def save(self) -> None:
        """Write it for other processes; if that fails, they look for themselves."""
        if not self._changed or self.store is None:
            return
        with self._lock:
            entries = dict(list(self._entries.items())[-MOST_ENTRIES:])
            self._changed = False
        with contextlib.suppress(OSError):
            write_file(self.store, json.dumps({"schema": SCHEMA, "files": entries}).encode())


@functools.cache
def open_memo(store: Path) -> FileMemo:
    """The memo that is stored there; one in a process."""
    return FileMemo(store)


def identity_of(path: Path) -> list[int] | None:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _read(store: Path) -> dict[str, list[Any]]:
    try:
        content = parse_json(read_bytes(store, MOST_BYTES).decode())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("files"), dict):
        return {}
    return {path: entry for path, entry in content["files"].items() if isinstance(entry, list) and len(entry) == 2}
