"""What a run keeps of itself: checkpoints, the final LoRA file, and the status that says where it can go on."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mindspore as ms

from flux_db import __version__
from flux_db.atomic import write_file
from flux_db.console import say
from flux_db.errors import describe
from flux_db.lora import init_lora
from flux_db.lora.trained_file import Facts
from flux_db.model.runtime import Runtime
from flux_db.output_folder import BEST_LORA, EMA_LORA, LORA_FILE, checkpoint_name
from flux_db.report.run_page import write_report
from flux_db.run import checkpoint, status
from flux_db.run.metrics_log import MetricsLog
from flux_db.run.saved_state import Best, BestScore, Progress, Waiting, lora_steps
from flux_db.settings.schema import Config, to_flat_dict
from flux_db.training import snapshot
from flux_db.training.build import Training
from flux_db.training.failure import TrainingFailed, nothing_learned


class Checkpoints:
    """Saves a run's state. `progress` is the loop's own and moves on with it."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        training: Training,
        progress: Progress,
        metrics_log: MetricsLog,
        *,
        fingerprints: dict[str, str],
        pictures: int,
        last: Path | None,
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.training = training
        self.progress = progress
        self.metrics_log = metrics_log
        self.fingerprints = fingerprints
        """Of model and data, saved with every checkpoint."""
        self.pictures = pictures
        """How many are trained on."""
        self.last = last
        """The last good checkpoint."""
        self.output = Path(config.output.output_dir)

    @property
    def facts(self) -> Facts:
        batch = self.training.layout.global_batch
        start = init_lora.name_of(self.config, self.fingerprints.get(init_lora.FINGERPRINT))
        return Facts(steps=self.progress.step, pictures=self.pictures, global_batch=batch, init_lora=start)

    def save(self, best: Best | None, best_score: BestScore | None = None, waiting: Waiting | None = None) -> None:
        """Save a checkpoint on rank 0. A failed save is loud, but the run and its earlier checkpoints live on."""
        self.demand_equal_ranks(f"at step {self.progress.step}")
        if self.runtime.is_main:
            try:
                self._write(best, best_score, waiting)
            except snapshot.WeightsNotFinite as problem:
                raise TrainingFailed(f"{problem}; the last good checkpoint: {self.last}") from problem
            except OSError as problem:
                say(
                    f"WARNING: checkpoint {self.progress.step} was not saved: {describe(problem)}; training goes on "
                    f"(the last good one: {self.last or 'none'})"
                )
                self.metrics_log.event({"step": self.progress.step, "event": "save failed", "message": str(problem)})
            self.note("running")
        self.runtime.barrier()

    def _write(self, best: Best | None, best_score: BestScore | None, waiting: Waiting | None) -> None:
        about = self._about(best, best_score, waiting)
        files = snapshot.to_files(self.training, self.config, self.progress, about, self.facts)
        kept = {"loss": best, "score": best_score}.get(self.config.validation.keep_best)
        if kept and lora_steps(self.output / BEST_LORA) == kept.step:
            files[BEST_LORA] = (self.output / BEST_LORA).read_bytes()
        self.metrics_log.flush()
        self.last = checkpoint.save(self.output, self.progress.step, files)
        self._prune()

    def _about(self, best: Best | None, best_score: BestScore | None, waiting: Waiting | None) -> dict[str, Any]:
        return {
            "config": to_flat_dict(self.config),
            "fingerprints": self.fingerprints,
            "best": asdict(best) if best else None,
            "best_score": asdict(best_score) if best_score else None,
            "waiting": asdict(waiting) if waiting else None,
            "world_size": self.runtime.world_size,
            "versions": {"flux_db": __version__, "mindspore": ms.__version__},
        }

    def _prune(self) -> None:
        if limit := self.config.output.checkpoints_total_limit:
            try:
                checkpoint.prune(self.output, limit, newest=self.last)
            except OSError as problem:
                say(f"warning: an old checkpoint could not be removed: {describe(problem)}")

    def demand_equal_ranks(self, when: str) -> None:
        """A TrainingFailed if the ranks differ in weights, optimizer, step, model or data."""
        if self.runtime.world_size == 1:
            return
        about = {"step": str(self.progress.step).encode()}
        about |= {name: value.encode() for name, value in self.fingerprints.items()}
        if different := self.runtime.differing(snapshot.contents(self.training) | about):
            raise TrainingFailed(
                f"{when} the devices differ from rank 0 in: {'; '.join(different)}. They must be bitwise equal, so "
                f"this run cannot be trusted any more. The last good checkpoint: {self.last or 'none'}",
                everywhere=True,
            )

    def save_final(self) -> None:
        """Write the LoRA file of the finished run."""
        if not self.progress.is_trained:
            raise TrainingFailed(nothing_learned(self.progress), everywhere=True)
        if not self.runtime.is_main:
            return
        average, export = self.training.optimizer.has_ema, self.config.output.ema_export
        for name, averaged in {LORA_FILE: export, **({EMA_LORA: True} if average and not export else {})}.items():
            try:
                self._write_lora(name, averaged=averaged)
            except OSError as problem:
                raise TrainingFailed(
                    f"{self.output / name} could not be written: {problem.strerror}. "
                    f"Kept: {self.last or 'no checkpoint'}"
                ) from problem
        self._prune()  # the run may have been killed between its last save and the pruning after it

    def write_lora(self, name: str, kept_for: str | None = None) -> None:
        """Write the LoRA that validation sees now, which is the average if there is one, into the output folder.

        `kept_for` says in its metadata what it is best in.
        """
        self._write_lora(name, averaged=self.training.optimizer.has_ema, kept_for=kept_for)

    def _write_lora(self, name: str, *, averaged: bool, kept_for: str | None = None) -> None:
        facts = replace(self.facts, kept_for=kept_for)
        write_file(self.output / name, snapshot.lora_file(self.training, self.config, facts, averaged=averaged))

    def where_saved(self) -> str:
        """Where the run can go on, in words: a full disk may have refused the last checkpoint."""
        if self.last is None:
            return "nothing was saved, the run will start anew"
        if self.last.name != checkpoint_name(self.progress.step):
            return f"it was not saved, the last good checkpoint is {self.last}"
        return f"saved as {self.last}"

    def note(self, state: str, message: str | None = None) -> None:
        """Write the run's status and its report."""
        if not self.runtime.is_main:
            return
        good = str(self.last) if self.last else None
        status.write_status(self.output, state, step=self.progress.step, last_good_checkpoint=good, message=message)
        write_report(self.output)  # here, because ranks that are done may end this one
