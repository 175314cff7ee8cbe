"""What a run left in its output folder, read for a report: works on unfinished and on old runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flux_db.charts import Point
from flux_db.errors import UserError
from flux_db.report import METRICS
from flux_db.run_state import RunState, read_run_state
from flux_db.sample_files import Round, read_rounds

CONFIG_NAME = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    folder: Path
    settings: dict[str, Any]
    """Empty if the run's config.yaml is gone."""
    rows: tuple[dict[str, Any], ...]
    """Lines of metrics.jsonl: steps and events."""
    rounds: tuple[Round, ...]
    state: RunState | None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def steps(self) -> tuple[dict[str, Any], ...]:
        """The rows that are optimizer steps."""
        return tuple(row for row in self.rows if "loss" in row)

    def points(self, key: str) -> list[Point]:
        """(step, value) of a key, in order of steps; what is missing or not finite is left out."""
        found = ((row.get("step"), row.get(key)) for row in self.rows)
        return [(float(x), float(y)) for x, y in found if _is_number(x) and _is_number(y)]

    @property
    def best(self) -> Point | None:
        """Step and value of the lowest validation loss after training began."""
        return min((p for p in self.points("validation_loss") if p[0] > 0), key=lambda p: p[1], default=None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_run(folder: Path) -> RunFiles:
    """The run in an output folder; a UserError if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the --output_dir of a run")
    run = RunFiles(
        folder=folder,
        settings=_read_settings(folder / CONFIG_NAME),
        rows=tuple(_read_rows(folder / METRICS)),
        rounds=tuple(read_rounds(folder)),
        state=read_run_state(folder),
    )
    if not (run.settings or run.rows or run.rounds or run.state):
        raise UserError(f"{folder}: no run in it: neither {CONFIG_NAME}, {METRICS} nor samples")
    return run


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a killed run may be cut
        if isinstance(row, dict):
            rows.append(row)
    return rows
