"""Validation rounds: when they are due, the loss of held-out pictures, the best LoRA, and the samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from flux_db.console import say
from flux_db.errors import describe
from flux_db.model.runtime import Runtime
from flux_db.output_folder import BEST_LORA, METRICS
from flux_db.report.run_page import write_report
from flux_db.run import metrics_file, sample_files
from flux_db.run.metrics_log import MetricsLog
from flux_db.run.saved_state import Best, SavedState, lora_steps
from flux_db.settings.schema import Config
from flux_db.training.resume import Ground
from flux_db.training.sample_rounds import Validator, is_due
from flux_db.training.validation_loss import HeldOut, best_in


class Validation:
    """Makes the rounds of a run. `write_lora(name)` writes the LoRA that is validated into the output folder."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        metrics_log: MetricsLog,
        validator: Validator | None,
        held_out: HeldOut | None,
        write_lora: Callable[[str], None],
        *,
        every: int | None,
        total_steps: int,
    ) -> None:
        self.runtime = runtime
        self.metrics_log = metrics_log
        self.validator = validator
        self.held_out = held_out
        self.write_lora = write_lora
        self.every = every
        """Steps from one round to the next; None without validation."""
        self.total_steps = total_steps
        self.keep_best = config.validation.keep_best
        self.output = Path(config.output.output_dir)
        self.best: Best | None = None
        """The lowest validation loss so far; on rank 0 only."""

    def is_due(self, step: int) -> bool:
        return is_due(step, self.every, self.total_steps)

    def is_complete(self, ground: Ground) -> bool:
        """Whether the round of the start step was made before. The first rank has looked, and all do the same."""
        complete = self.runtime.is_main and ground.round is not None
        return bool(self.runtime.sum(np.array([complete], np.float32))[0])

    def run(self, step: int, *, is_trained: bool) -> None:
        """Make the round of a step, on all ranks at once."""
        if self.held_out:
            self._measure(step, self.held_out, is_trained=is_trained)
        if self.validator:
            self.validator.run(step)
        if self.runtime.is_main:
            self.metrics_log.end_round(step, sample_files.count(self.output, step))
            write_report(self.output)

    def _measure(self, step: int, held_out: HeldOut, *, is_trained: bool) -> None:
        """The validation loss of all ranks; the LoRA with the lowest is kept, if asked for."""
        loss = held_out.measure()
        if not self.runtime.is_main:
            return
        best = bool(is_trained and np.isfinite(loss) and (self.best is None or loss < self.best.validation_loss))
        if best and self.keep_best:
            try:
                self.write_lora(BEST_LORA)
            except OSError as problem:
                say(f"WARNING: the best LoRA was not saved: {describe(problem)}; training goes on")
                best = False
        if best:
            self.best = Best(step, loss, held_out.fingerprint)
        self.metrics_log.validation_loss(step, loss, held_out.fingerprint, best=best)

    def recall_best(self, saved: SavedState | None, ground: Ground) -> None:
        """Set the lowest loss before the start, of the same pictures; none if the LoRA to be kept is gone."""
        self.best = self._best_before(saved, ground) if self.runtime.is_main else None

    def _best_before(self, saved: SavedState | None, ground: Ground) -> Best | None:
        if self.held_out is None or saved is None:
            return None
        at_start = best_in([ground.round]) if ground.round else None  # the checkpoint was saved before that round
        best = saved.best if saved.knows_best else best_in(metrics_file.read(self.output / METRICS))
        best = at_start or best
        if best is None or best.pictures != self.held_out.fingerprint:
            return None
        if self.keep_best and at_start:
            self.write_lora(BEST_LORA)
        return best if not self.keep_best or lora_steps(self.output / BEST_LORA) == best.step else None
