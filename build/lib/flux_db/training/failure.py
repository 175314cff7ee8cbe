"""How a training run fails: with a reason, and with everything that was saved so far intact."""

from __future__ import annotations

CAUSES = "Likely causes: a learning rate that is too high, fp16 (try bf16), or damaged pictures or weights."


class TrainingFailed(Exception):
    """The run cannot go on; what was saved so far is good."""

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere
        """All ranks found it out at the same step."""
