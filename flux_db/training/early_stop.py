"""When a run has waited long enough for a better LoRA."""

from __future__ import annotations

from flux_db.run.metrics_file import Row
from flux_db.run.saved_state import Waiting

# What --keep_best watches: the entry of a round's line in metrics.jsonl that has the value, and the one that says
# whether it was the best so far.
WATCHED = {"loss": ("validation_loss", "best"), "score": ("score", "best_score")}


def after_round(waiting: Waiting, step: int, *, is_better: bool) -> Waiting:
    """Count a round whose value was measured, of a LoRA that was trained."""
    return Waiting(0 if is_better else waiting.rounds + 1, step)


def after_line(waiting: Waiting, row: Row | None, keep_best: str) -> Waiting:
    """Count the round of a line in metrics.jsonl, unless it was counted before or has no value."""
    if row is None or keep_best not in WATCHED or row["step"] <= waiting.step:
        return waiting
    value, best = WATCHED[keep_best]
    if not isinstance(row.get(value), float | int):
        return waiting
    return after_round(waiting, row["step"], is_better=row.get(best) is True)
