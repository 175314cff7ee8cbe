"""How a training run fails: with a reason, and with everything that was saved so far intact."""

from __future__ import annotations

from flux_db.run.saved_state import Progress

CAUSES = "Likely causes: a learning rate that is too high, fp16 (try bf16), or damaged pictures or weights."
ZERO_CAUSES = (
    "Likely causes: masks that are black everywhere with --unmasked_weight 0, a weight of the loss that is zero, or"
    " fp16 (try bf16)."
)


def nothing_learned(progress: Progress) -> str:
    what, causes = "that are not finite", CAUSES
    if progress.zero_gradients:
        what, causes = "that are zero or not finite" if progress.skipped else "that are exactly zero", ZERO_CAUSES
    return f"all {progress.step} steps had gradients {what}, so nothing was learned and no LoRA is written. {causes}"


class TrainingFailed(Exception):
    """The run cannot go on; what was saved so far is good."""

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere
        """All ranks found it out at the same step."""
