"""Releases of MindSpore: which of them this program was run with, and what each needs of the machine.

The table of docs/devices.md is this one; a test compares them.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import NamedTuple

MINDONE = "0.5.0"


class Release(NamedTuple):
    """A release of MindSpore."""

    version: str
    cann: tuple[str, ...]
    """Versions of CANN that its wheel accepts."""
    pythons: tuple[str, str]
    """The first and the last for which there is a wheel; all of them for x86_64 and aarch64."""
    tried: bool = True
    """By us, on the CPU: the whole suite."""


RELEASES = (
    Release("2.7.1", ("7.8", "8.2", "8.3"), ("3.9", "3.11")),
    Release("2.7.2", ("8.5",), ("3.9", "3.12"), tried=False),
    Release("2.8.0", ("8.2", "8.3", "8.5"), ("3.9", "3.12")),
    Release("2.9.0", ("8.2", "8.3", "8.5", "9.0"), ("3.9", "3.12")),
    Release("2.10.0", ("8.2", "8.3", "8.5", "9.0", "9.1"), ("3.10", "3.12")),
)
TRIED = tuple(release.version for release in RELEASES if release.tried)

TOLERANCE = 1e-5
"""Relative difference of a loss that two of these releases compute in the same run; 5e-7 was the largest measured."""

DRIVERS = {"8.3": "25.3", "8.5": "25.5", "9.0": "26.0"}
"""CANN -> the first Ascend driver that goes with it, as far as we know."""


def numbers(version: str) -> tuple[int, ...]:
    """2.10.0rc1 -> (2, 10, 0), to compare by."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def installed() -> str:
    """The version of MindSpore, without importing it; empty if there is none."""
    try:
        return importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        return ""


def documents_o2(mindspore: str) -> bool:
    """Whether this MindSpore still offers --jit_level O2: 2.9 announces its removal."""
    return numbers(mindspore) < (2, 9)


def warning(mindspore: str) -> str | None:
    """What to print for a MindSpore that was not tried; None for one that was."""
    if mindspore in TRIED:
        return None
    return (
        f"MindSpore {mindspore} was not tried with this program (tried: {', '.join(TRIED)}): numbers may differ and "
        f"compiling may fail; check it first with selftest, or install one of these"
    )


def other_saved(saved: str | None) -> str | None:
    """What to print when a checkpoint was written under another MindSpore than the installed one."""
    now = installed()
    if saved in (None, now):
        return None
    return f"saved with MindSpore {saved}, and goes on with {now}: losses of these differ by less than {TOLERANCE:g}"


def driver_warning(cann: str | None, driver: str | None) -> str | None:
    """What to print for a driver that is older than CANN wants."""
    needed = DRIVERS.get(".".join((cann or "").split(".")[:2]))
    if needed is None or driver is None or numbers(driver)[:2] >= numbers(needed):
        return None
    return f"driver {driver}: CANN {cann} goes with driver {needed} or newer"
