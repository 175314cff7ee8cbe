"""What a run reports while it goes: metrics.jsonl, the progress bar, trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flux_db.console import printable, say
from flux_db.line_file import LineFile
from flux_db.output_folder import METRICS
from flux_db.progress import progress_bar
from flux_db.run.metrics_file import ROUND
from flux_db.run.trackers import open_trackers
from flux_db.settings.schema import Config
from flux_db.terminal import strong

# On the terminal: the first measures are those that matter most.
SCORES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One optimizer step."""

    step: int
    """From 1: how many steps are done."""
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    skipped: int
    """Steps skipped so far for gradients that were not finite."""
    loss_by_concept: dict[str, float] | None = None
    """If there are several: the mean error of the step's examples of each, without weights of concepts."""
    text_encoder_lr: float | None = None
    """If CLIP is trained."""
    loss_scale: float | None = None
    """With fp16 only."""
    memory_mb: float | None = None
    """Of this process, in the machine's memory."""
    device_memory_mb: float | None = None
    """Largest so far, on Ascend only."""


class MetricsLog:
    """Writes metrics as they come; a metrics_log that is not enabled (any rank but the first) writes nothing.

    Nothing here ends a run or holds it up: a full disk, a broken tracker and a closed terminal are reported, no more.
    """

    def __init__(self, config: Config, total_steps: int, first_step: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        if not enabled:
            return
        self._trackers = open_trackers(config)
        self.path = Path(config.output.output_dir, METRICS)
        self._file = LineFile(self.path)
        self._bar = progress_bar(total=total_steps, initial=first_step, desc="training", unit="step")
        self._validation_loss: float | None = None
        self._measured: dict[str, Any] = {}

    def step(self, metrics: Metrics) -> None:
        if not self.enabled:
            return
        values = {name: value for name, value in asdict(metrics).items() if value is not None}
        self.event(values)
        self._bar.update()
        shown = {"loss": f"{metrics.loss:.4f}", "lr": f"{metrics.lr:.2e}", "norm": f"{metrics.grad_norm:.3f}"}
        shown["s/step"] = f"{metrics.seconds:.3f}"
        if metrics.skipped:
            shown["skipped"] = str(metrics.skipped)
        if self._validation_loss is not None:
            shown["validation"] = f"{self._validation_loss:.4f}"
        self._bar.set_postfix(shown, refresh=False)
        by_concept = values.pop("loss_by_concept", {})
        scalars = {f"train/{name}": value for name, value in values.items() if name not in ("step", "epoch")}
        scalars |= {f"train/loss/{name}": value for name, value in by_concept.items()}
        self._trackers.scalars(scalars, metrics.step)

    def validation_loss(
        self, step: int, loss: float, pictures: str, *, best: bool, by_concept: Mapping[str, float] | None = None
    ) -> None:
        """The loss of the pictures held out; `pictures` is a fingerprint of them. Written by `end_round`."""
        if not self.enabled:
            return
        self._validation_loss = loss
        self._measured |= {"validation_loss": loss, "best": best, "pictures": pictures}
        by_concept = dict(by_concept or {})
        self._measured |= {"validation_loss_by_concept": by_concept} if by_concept else {}
        parts = ", ".join(f"{printable(name)} {value:.5f}" for name, value in by_concept.items())
        shown = f" ({parts})" if parts else ""
        say(f"validation loss at step {step}: {strong(f'{loss:.5f}')}{', the lowest so far' if best else ''}{shown}")
        scalars = {f"validation/loss/{name}": value for name, value in by_concept.items()}
        self._trackers.scalars({"validation/loss": loss} | scalars, step)

    def scores(self, step: int, values: Mapping[str, float | None], by: str, scored_with: str, *, best: bool) -> None:
        """Of the samples; `scored_with` is a fingerprint of what measured, and of what. Written by `end_round`."""
        if not self.enabled:
            return
        known = {name: value for name, value in values.items() if value is not None}
        self._measured |= {"score" if name == "score" else f"score_{name}": value for name, value in known.items()}
        self._measured |= {"best_score": best, "scored_by": by, "scored_with": scored_with}
        others = [f"{name} {value:.3f}" for name, value in known.items() if name != "score"]
        shown = ", ".join(others[:SCORES_SHOWN])
        total = f"{known['score']:.4f}" if "score" in known else "none"
        say(f"score at step {step}: {strong(total)}{', the highest so far' if best else ''} ({shown})")
        self._trackers.scalars({f"score/{name}": value for name, value in known.items()}, step)

    def end_round(self, step: int, samples: int) -> None:
        """A validation round is complete, with so many pictures; without this line it is made again on resume."""
        if not self.enabled:
            return
        self.event({"step": step, "event": ROUND, **self._measured, "samples": samples})
        self._measured = {}

    def event(self, values: dict[str, Any]) -> None:
        """A line in metrics.jsonl; NaN becomes null, because JSON has no NaN."""
        if not self.enabled:
            return
        self._file.append(json.dumps(_without_nan(values)))

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        if self.enabled:
            self._trackers.picture(name, picture, step)

    def flush(self) -> None:
        """Make what was written so far safe on disk."""
        if self.enabled:
            self._file.flush()

    def close(self) -> None:
        if not self.enabled:
            return
        self._bar.close()
        self._file.close()
        self._trackers.close()


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value
