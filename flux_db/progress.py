"""Progress of a long loop: a bar on a terminal, and whole lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from flux_db.console import HEARTBEAT_SECONDS, say

T = TypeVar("T")


def progress_bar(
    items: Iterable[T] | None = None,
    *,
    desc: str,
    unit: str,
    total: int | None = None,
    initial: int = 0,
    unit_scale: bool = False,
    delay: float = 0.0,
    leave: bool = True,
) -> tqdm | LogLines[T]:
    """tqdm on a terminal. Elsewhere a bar that returns to the beginning of its line would only fill a log.

    `delay`: a loop that takes fewer seconds shows nothing. `leave`: whether the bar or the last line stays.
    """
    options = {"desc": desc, "unit": unit, "total": total, "initial": initial, "unit_scale": unit_scale}
    if sys.stderr is not None and sys.stderr.isatty():
        return tqdm(items, delay=delay, leave=leave, dynamic_ncols=True, **options)
    return LogLines(items, delay, leave, options)


class LogLines(Generic[T]):
    """The part of tqdm that is used here, as a line every 20 seconds and one at the end."""

    def __init__(self, items: Iterable[T] | None, delay: float, leave: bool, options: dict[str, Any]) -> None:
        self._items, self._delay, self._leave = items, delay, leave
        self._meter = {"total": _length(items), **{k: v for k, v in options.items() if v is not None}}
        self._meter["prefix"] = self._meter.pop("desc")
        self._count = options["initial"]
        self._start = time.monotonic()
        self._due = self._start + HEARTBEAT_SECONDS
        self._postfix = ""
        self._closed = False

    def __iter__(self) -> Iterator[T]:
        with self:
            for item in self._items or ():
                yield item
                self.update()

    def __enter__(self) -> LogLines[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1) -> None:
        self._count += count
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + HEARTBEAT_SECONDS
            self._say()

    def set_postfix(self, values: dict[str, str], **_: object) -> None:
        self._postfix = ", ".join(f"{name}={value}" for name, value in values.items())

    def close(self) -> None:
        if not self._closed and self._leave and time.monotonic() - self._start >= self._delay:
            self._say()
        self._closed = True

    def _say(self) -> None:
        elapsed = time.monotonic() - self._start
        say(tqdm.format_meter(n=self._count, elapsed=elapsed, ascii=True, postfix=self._postfix, **self._meter))


def _length(items: object) -> int | None:
    return len(items) if hasattr(items, "__len__") else None
