"""The results as a table for a person, or as JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Sequence

from flux_db.doctor.result import Row

SCHEMA = 1


def is_healthy(rows: Sequence[Row]) -> bool:
    return all(row.status != "fail" for row in rows)


def as_json(rows: Sequence[Row], device: str) -> str:
    content = {
        "schema": SCHEMA,
        "device": device,
        "healthy": is_healthy(rows),
        "rows": [row._asdict() for row in rows],
    }
    return json.dumps(content, indent=2)


def as_text(rows: Sequence[Row], device: str) -> str:
    width = max(len(row.check) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.check:{width}}  {row.status:8}  {row.found}")
        if row.advice:
            lines.append(f"{'':{width}}  {'':8}  -> {row.advice}")
    counts = {status: sum(row.status == status for row in rows) for status in ("pass", "fail", "not here")}
    ending = "This machine can train" if is_healthy(rows) else "This machine is not ready to train"
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return "\n".join([*lines, "", f"{ending} on {device}: {summary}."])
