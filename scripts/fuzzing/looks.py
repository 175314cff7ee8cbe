"""What a success must look like: the right answer on the terminal, and nothing harmful in the files."""

from __future__ import annotations

import csv
from pathlib import Path

from fuzzing import hostile
from fuzzing.case import Look

# Of a cell that a spreadsheet would compute.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def can_start(_case: Path, stdout: str) -> str | None:
    return None if "the run can start" in stdout else "does not say that the run can start"


def counts(number: int) -> Look:
    """`check` has found so many pictures."""

    def look(_case: Path, stdout: str) -> str | None:
        return None if f"Pictures: {number} in" in stdout else f"does not count {number} pictures"

    return look


def table_is_harmless(case: Path, _stdout: str) -> str | None:
    """`check`'s table, which people open in a spreadsheet."""
    text = (case / "out" / "pictures.csv").read_bytes().decode("utf-8", "replace")
    cells = [cell for row in csv.reader(text.splitlines(keepends=True)) for cell in row]
    computed = [cell for cell in cells if cell.startswith(FORMULA_STARTS)]
    return f"pictures.csv has a formula: {computed[0]!r}" if computed else None


def page_is_harmless(file: str) -> Look:
    """A page that shows text from files and runs none of it."""

    def look(case: Path, _stdout: str) -> str | None:
        if not (case / file).is_file():
            return f"{file} was not written"
        text = (case / file).read_text(encoding="utf-8", errors="replace")
        if hostile.SECRET in text:
            return f"{file} holds a secret"
        return f"{file} has markup from a file in it" if hostile.MARKUP[:17] in text else None

    return look
