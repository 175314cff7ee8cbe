"""What a run left in its output folder, read for a report: works on unfinished and on old runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flux_db import plain_json, plain_yaml
from flux_db.errors import UserError
from flux_db.files import read_bytes, read_text
from flux_db.output_folder import CONFIG, METRICS, SCORES
from flux_db.run.sample_files import Round, read_rounds
from flux_db.run.status import RunStatus, read_status

# A line has about 150 bytes, so that is more than a million steps.
METRICS_LIMIT = 256 * 2**20
# Beyond it a number is no measurement, and cannot be drawn either.
LARGEST, SMALLEST = 1e30, 1e-30


Point = tuple[float, float]
"""Step and value."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    folder: Path
    settings: dict[str, Any]
    """Empty if the run's config.yaml is gone."""
    rows: tuple[dict[str, Any], ...]
    """Lines of metrics.jsonl: steps and events."""
    rounds: tuple[Round, ...]
    scores: tuple[dict[str, Any], ...]
    """Of rounds of samples, in order of steps, as `score` stored them or as the run itself measured them."""
    state: RunStatus | None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def steps(self) -> tuple[dict[str, Any], ...]:
        """The rows that are optimizer steps."""
        return tuple(row for row in self.rows if "loss" in row and _is_number(row.get("step")))

    def points(self, key: str) -> list[Point]:
        """(step, value) of a key, in order of steps; what is missing or not finite is left out."""
        found = ((row.get("step"), row.get(key)) for row in self.rows)
        return [(float(x), float(y) if abs(y) > SMALLEST else 0.0) for x, y in found if _is_number(x) and _is_number(y)]

    def points_by_name(self, key: str) -> dict[str, list[Point]]:
        """The same of a key that has a value for each concept: the concept's name -> its points."""
        rows = [(row.get("step"), row[key]) for row in self.rows if isinstance(row.get(key), dict)]
        found: dict[str, list[Point]] = {}
        for step, values in rows:
            for name, value in values.items():
                if _is_number(step) and _is_number(value):
                    found.setdefault(str(name), []).append((float(step), float(value)))
        return found

    @property
    def best(self) -> Point | None:
        """Step and value of the lowest validation loss after training began."""
        return min((p for p in self.points("validation_loss") if p[0] > 0), key=lambda p: p[1], default=None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def read_run(folder: Path) -> RunRecord:
    """The run in an output folder; a UserError if there is none."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: no such folder; give the --output_dir of a run")
    run = RunRecord(
        folder=folder,
        settings=plain_yaml.read_mapping(folder / CONFIG),
        rows=(rows := tuple(_read_rows(folder / METRICS))),
        scores=_scores(folder / SCORES, rows),
        rounds=tuple(read_rounds(folder)),
        state=read_status(folder),
    )
    if not (run.settings or run.rows or run.rounds or run.state):
        raise UserError(f"{folder}: no run in it: neither {CONFIG}, {METRICS} nor samples")
    return run


def _scores(path: Path, rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """What `score` stored, and of other steps what the run measured in the same way."""
    by, stored = _read_scores(path)
    by = by or _by(rows)
    steps = {row["step"] for row in stored}
    measured = [
        {name if name in ("step", "samples", "score") else name.removeprefix("score_"): row[name] for name in row}
        for row in rows
        if _is_number(row.get("score")) and _is_number(row.get("step")) and row.get("scored_by") == by
    ]
    return tuple(sorted([*stored, *(row for row in measured if row["step"] not in steps)], key=lambda row: row["step"]))


def _by(rows: Sequence[dict[str, Any]]) -> Any:
    """By what the run measured last: scores by different networks cannot be compared."""
    return next((row["scored_by"] for row in reversed(rows) if "scored_by" in row), None)


def _read_scores(path: Path) -> tuple[str | None, list[dict[str, Any]]]:
    """(by what, rounds)"""
    try:
        content = plain_json.parse_json(read_text(path))
    except (OSError, ValueError):
        return None, []
    if not isinstance(content, dict) or not isinstance(content.get("rounds"), list):
        return None, []
    found = [row for row in content["rounds"] if isinstance(row, dict) and _is_number(row.get("step"))]
    return (str(content.get("by")), found) if found else (None, [])


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = read_bytes(path, METRICS_LIMIT).decode(errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a killed run may be cut
        if isinstance(row, dict):
            rows.append(row)
    return rows
