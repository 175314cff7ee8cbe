"""A check's result, and a check that fails by an exception."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from flux_db.errors import describe

Status = Literal["pass", "fail", "not here"]


class Row(NamedTuple):
    """One line of the table."""

    check: str
    status: Status
    found: str
    advice: str = ""
    """What to do about a failure; with `pass`, a warning."""
    seconds: float = 0.0


def judged(check: str, holds: bool, found: str, advice: str) -> Row:
    return Row(check, "pass", found) if holds else Row(check, "fail", found, advice)


def not_here(check: str, reason: str) -> Row:
    return Row(check, "not here", reason)


def timed(check: str, run: Callable[[], Row], advice: str = "see the message, and run it again with GLOG_v=2") -> Row:
    """Run one check; whatever it raises is a failure of that check alone."""
    start = time.monotonic()
    try:
        row = run()
    except Exception as error:
        row = Row(check, "fail", f"{type(error).__name__}: {describe(error)[:300]}", advice)
    return row._replace(seconds=round(time.monotonic() - start, 2))
