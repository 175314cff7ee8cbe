"""Validation rounds: when they are due, the loss of held-out pictures, the samples and their scores, the best LoRA."""

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
from flux_db.run.metrics_file import SCORE_FAILED, Row
from flux_db.run.metrics_log import MetricsLog
from flux_db.run.saved_state import Best, BestScore, SavedState, Waiting, lora_steps
from flux_db.settings.schema import Config
from flux_db.training.early_stop import after_line, after_round
from flux_db.training.resume import Ground
from flux_db.training.sample_rounds import Rounds, Validator
from flux_db.training.scoring import Scoring
from flux_db.training.validation_loss import HeldOut, best_in

KEPT_FOR = {"loss": "lowest validation loss", "score": "highest score of the samples"}


class Validation:
    """Makes the rounds of a run.

    `write_lora(name, kept_for)` writes the LoRA that is validated into the output folder. `scoring` is rank 0's alone:
    it reads the samples from their files, and the other ranks wait for it at the next step.
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        metrics_log: MetricsLog,
        validator: Validator | None,
        held_out: HeldOut | None,
        write_lora: Callable[[str, str], None],
        *,
        rounds: Rounds,
        scoring: Scoring | None = None,
    ) -> None:
        self.runtime = runtime
        self.metrics_log = metrics_log
        self.validator = validator
        self.held_out = held_out
        self.scoring = scoring
        self.write_lora = write_lora
        self.rounds = rounds
        self.keep_best = config.validation.keep_best
        self.output = Path(config.output.output_dir)
        self.best: Best | None = None
        """The lowest validation loss so far; on rank 0 only."""
        self.best_score: BestScore | None = None
        """The highest score so far; on rank 0 only."""
        self.waiting = Waiting()
        """How long the run waits for a better one; on rank 0 only."""
        self.patience = config.validation.early_stop_patience
        self.is_over = False
        """Whether the run has waited for --early_stop_patience; on every rank the same."""

    def is_due(self, step: int) -> bool:
        return self.rounds.is_due(step)

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
        if self.scoring and self.rounds.is_scored(step):
            self._score(step, self.scoring, is_trained=is_trained)
        if self.runtime.is_main:
            self.metrics_log.end_round(step, sample_files.count(self.output, step))
            write_report(self.output)
        self._agree()

    def _agree(self) -> None:
        """Make all ranks know whether the run has waited long enough; the first rank alone has the scores."""
        if self.patience is not None:
            is_over = self.runtime.is_main and self.waiting.rounds >= self.patience
            self.is_over = bool(self.runtime.sum(np.array([is_over], np.float32))[0])

    def why_over(self) -> str:
        """Why the run ended early, in words."""
        watched = {"loss": ("lower validation loss", self.best), "score": ("higher score", self.best_score)}
        measure, best = watched[self.keep_best]
        rounds = "1 validation round" if self.patience == 1 else f"{self.patience} validation rounds"
        kept = f"; the best LoRA is that of step {best.step}" if best else ""
        return f"no {measure} in {rounds} (--early_stop_patience){kept}"

    def _measure(self, step: int, held_out: HeldOut, *, is_trained: bool) -> None:
        """The validation loss of all ranks; the LoRA with the lowest is kept, if asked for."""
        loss = held_out.measure()
        if not self.runtime.is_main:
            return
        is_measured = bool(is_trained and np.isfinite(loss))
        best = is_measured and (self.best is None or loss < self.best.validation_loss)
        if is_measured and self.keep_best == "loss":
            self.waiting = after_round(self.waiting, step, is_better=best)
        if best and self._keep("loss"):
            self.best = Best(step, loss, held_out.fingerprint)
        else:
            best = False
        by_concept = held_out.by_concept
        self.metrics_log.validation_loss(step, loss, held_out.fingerprint, best=best, by_concept=by_concept)

    def _score(self, step: int, scoring: Scoring, *, is_trained: bool) -> None:
        """The scores of the round's samples; the LoRA with the highest is kept, if asked for. No failure ends a run."""
        try:
            scores = scoring.measure(step)
            score = scores.score
        except Exception as problem:
            reason = f"{type(problem).__name__}: {problem}"
            say(f"warning: no score at step {step}: {reason}; training goes on")
            self.metrics_log.event({"step": step, "event": SCORE_FAILED, "message": reason})
            return
        is_measured = bool(is_trained and score is not None and np.isfinite(score))
        best = is_measured and (self.best_score is None or score > self.best_score.score)
        if is_measured and self.keep_best == "score":
            self.waiting = after_round(self.waiting, step, is_better=best)
        if best and self._keep("score"):
            self.best_score = BestScore(step, float(score), scoring.scored_with)
        else:
            best = False
        self.metrics_log.scores(step, scores.as_dict(), scoring.scorer.by, scoring.scored_with, best=best)

    def _keep(self, reason: str) -> bool:
        """Write the best LoRA if it is kept for this reason; false if it should be and could not."""
        if self.keep_best == reason:
            try:
                self.write_lora(BEST_LORA, KEPT_FOR[reason])
            except OSError as problem:
                say(f"WARNING: the best LoRA was not saved: {describe(problem)}; training goes on")
                return False
        return True

    def recall_best(self, saved: SavedState | None, ground: Ground) -> None:
        """Set the best before the start, of the same pictures and measures; none if the LoRA to be kept is gone."""
        self.best = self.best_score = None
        self.waiting = Waiting()
        if self.runtime.is_main and saved is not None:
            self._recall(saved, ground)
        self._agree()

    def _recall(self, saved: SavedState, ground: Ground) -> None:
        # the checkpoint was saved before the round of its own step
        at_start = [ground.round] if ground.round else []
        if self.held_out:
            before = saved.best if saved.knows_best else best_in(metrics_file.read(self.output / METRICS))
            best = best_in(at_start) or before
            if best and best.pictures == self.held_out.fingerprint and self._is_kept("loss", best.step, at_start):
                self.best = best
        if self.scoring:
            best_score = _best_score_in(at_start) or saved.best_score
            same = best_score is not None and best_score.scored_with == self.scoring.scored_with
            if same and self._is_kept("score", best_score.step, at_start):
                self.best_score = best_score
        if {"loss": self.best, "score": self.best_score}.get(self.keep_best) is not None:
            # a run that watched something else has not waited for this
            waited = saved.waiting if saved.config["keep_best"] == self.keep_best else Waiting()
            self.waiting = after_line(waited, ground.round, self.keep_best)

    def _is_kept(self, reason: str, step: int, at_start: list[Row]) -> bool:
        """Whether the LoRA of a step is there, if this reason keeps one; that of the start step is written again."""
        if self.keep_best != reason:
            return True
        if at_start and at_start[0]["step"] == step:
            self.write_lora(BEST_LORA, KEPT_FOR[reason])
        return lora_steps(self.output / BEST_LORA) == step


def _best_score_in(rows: list[Row]) -> BestScore | None:
    """The highest score in lines of metrics.jsonl."""
    lines = [row for row in rows if row.get("best_score") is True and isinstance(row.get("score"), float)]
    return BestScore(lines[-1]["step"], lines[-1]["score"], str(lines[-1].get("scored_with"))) if lines else None
