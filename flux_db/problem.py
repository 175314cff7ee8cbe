"""A problem or a warning as a value: the line for the user, and the setting, file and kind that it is about."""

from __future__ import annotations

from enum import Enum
from pathlib import Path


class Kind(Enum):
    """Kinds that the program counts; the value is their name in a sum."""

    SAME = "exact duplicates"
    ALIKE = "near duplicates"
    SMALL = "scaled up"
    EMPTY_CAPTION = "empty captions"
    OTHER = "others"


class Problem(str):
    """As a string it is the whole line. Code that needs the parts reads the attributes and never the line."""

    text: str
    """The line without the file at its start."""
    flag: str | None
    """The setting to change; None if the problem is not tied to one."""
    path: Path | None
    """The file or folder at the start of the line."""
    kind: Kind
    also: tuple[str, ...]
    """Other settings that the problem depends on."""
    details: tuple[str, ...]
    """More lines, which follow after all problems."""

    def __new__(
        cls,
        text: str,
        *,
        flag: str | None = None,
        path: Path | None = None,
        kind: Kind = Kind.OTHER,
        also: tuple[str, ...] = (),
        details: tuple[str, ...] = (),
    ) -> Problem:
        problem = super().__new__(cls, text if path is None else f"{path}: {text}")
        problem.text, problem.flag, problem.path, problem.kind, problem.also = text, flag, path, kind, also
        problem.details = details
        return problem

    @property
    def flags(self) -> frozenset[str]:
        """Every setting that the problem depends on."""
        return frozenset(self.also if self.flag is None else (self.flag, *self.also))


def under_flag(problem: str, flag: str) -> Problem:
    """The same problem as one of the flag that led to the file; a problem that has a flag already keeps it."""
    if isinstance(problem, Problem) and problem.flag is not None:
        return problem
    return Problem(f"--{flag}: {problem}", flag=flag)
