"""`metrics.jsonl` read back by a run that goes on: its lines up to a step, and the validation round of that step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flux_db.atomic import write_file
from flux_db.errors import UserError
from flux_db.files import read_bytes

Row = dict[str, Any]

# A line has some 200 bytes: enough for five million steps.
LIMIT = 2**30

ROUND = "validation"
"""The event that ends a validation round. What was drawn and measured without it is made again on resume."""
ROUND_FAILED = "validation failed"
SCORE_FAILED = "scoring failed"


def read(path: Path) -> list[Row]:
    """The lines that hold a step, in order; none if there is no such file. The last line of a killed run may be cut."""
    try:
        lines = read_bytes(path, LIMIT).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; move it out of the way") from None
    return [row for row in map(_row, lines) if row is not None]


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def write(path: Path, rows: Sequence[Row]) -> None:
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def up_to(rows: Sequence[Row], step: int) -> list[Row]:
    return [row for row in rows if row["step"] <= step]


def round_at(rows: Sequence[Row], step: int) -> Row | None:
    """The line that ends the validation round of a step."""
    return next((row for row in rows if row["step"] == step and row.get("event") == ROUND), None)


def without_round(rows: Sequence[Row], step: int) -> list[Row]:
    return [row for row in rows if row["step"] != step or row.get("event") not in (ROUND, ROUND_FAILED, SCORE_FAILED)]
