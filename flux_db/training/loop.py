"""The loop: when to step, to save, to validate and to stop. How each is done is described elsewhere."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from mindspore import Tensor

from flux_db.console import say
from flux_db.data.batches import BatchSource, prefetch
from flux_db.errors import describe
from flux_db.interrupt import StopRequest, resume_command
from flux_db.model.runtime import Runtime
from flux_db.output_folder import CONFIG
from flux_db.report.run_page import LiveReport
from flux_db.run.metrics_log import Metrics, MetricsLog
from flux_db.run.saved_state import Progress
from flux_db.settings.command_line import lasting_flags
from flux_db.settings.concepts import concepts_of
from flux_db.settings.schema import Config
from flux_db.step_inputs import StepResult
from flux_db.training.build import Training
from flux_db.training.checkpoints import Checkpoints
from flux_db.training.compiling import StepCompiler, tensors
from flux_db.training.failure import CAUSES, TrainingFailed, nothing_learned
from flux_db.training.resume import Ground, Start
from flux_db.training.validation import Validation


@dataclass(frozen=True)
class Pending:
    """A step that was started on the device and whose numbers were not fetched yet."""

    step: int
    lr: float
    text_encoder_lr: float | None
    seconds: float
    result: Tensor


class Ending(NamedTuple):
    """How a run ended."""

    exit_code: int
    """0, or 128 + signal if a signal stopped the run."""
    is_finished: bool
    """False: it stopped before its end and can go on."""


class Loop:
    """One run, from the step it starts or resumes at to its last."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        training: Training,
        source: BatchSource,
        progress: Progress,
        metrics_log: MetricsLog,
        checkpoints: Checkpoints,
        validation: Validation,
        stop: StopRequest,
        compiler: StepCompiler,
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.training = training
        self.source = source
        self.progress = progress
        self.metrics_log = metrics_log
        self.checkpoints = checkpoints
        self.validation = validation
        self.stop = stop
        self.compiler = compiler
        self.report = LiveReport(checkpoints.output)
        self._stop_agreed = False
        self._clock = self._begin = time.monotonic()

    def run(self, start: Start, ground: Ground) -> Ending:
        """Train to the end, or until a signal or --max_train_minutes stops the run."""
        first = self.progress.step
        with (
            # before the first step there is nothing to save; of several ranks the first decides, and the others follow
            self.stop.finishing_steps(lambda: self.progress.step > first or not self.runtime.is_main),
            self.stop.before_leaving(lambda: self.checkpoints.note("interrupted")),
        ):
            return self._run(start, ground)

    def _run(self, start: Start, ground: Ground) -> Ending:
        checkpoints, message = self.checkpoints, None
        self._begin = time.monotonic()
        checkpoints.note("running")
        try:
            checkpoints.demand_equal_ranks("at the start")
            self.validation.recall_best(start.saved, ground)
            if self._take_steps(ground):
                return self._stopped()
            if self.validation.is_over and self.progress.step < self.training.total_steps:
                message = self._stopped_early()
            checkpoints.save_final()
        except BaseException as problem:
            checkpoints.note("failed", f"{type(problem).__name__}: {problem}")
            if isinstance(problem, OSError):
                raise TrainingFailed(f"{describe(problem)}. Kept: {checkpoints.last or 'no checkpoint'}") from problem
            raise
        checkpoints.note("finished", message)
        return Ending(0, is_finished=True)

    def _take_steps(self, ground: Ground) -> bool:
        """Take the steps; true if a signal or the time ended them, so that the run can go on later."""
        if self.validation.is_due(self.progress.step) and not self.validation.is_complete(ground):
            self._validate()
        if self.validation.is_over:
            return False
        pending: Pending | None = None
        self._clock = time.monotonic()
        for micro_step, result in enumerate(self._results(), start=self.source.start):
            if not self.training.layout.is_boundary(micro_step):
                continue
            step = micro_step // self.training.layout.accumulation + 1
            # reading a result waits for the device: read the one before, while this one is computed
            if pending:
                self._finish(pending)
                self._renew_report()
            now = time.monotonic()
            pending = Pending(step, *self._rates(step), now - self._clock, result)
            self._clock = now
            last = step == self.training.total_steps
            stopping = self._is_stopping()
            save = last or step % self.config.output.checkpointing_steps == 0 or stopping
            due = self.validation.is_due(step)
            draw = due and not stopping
            if save or draw:
                self._finish(pending)
                pending = None
            if save:
                self._save()
            if draw:
                self._validate()
                if self.validation.is_over:
                    if not save:
                        self._save()
                    return False
            if stopping:
                return not last or due  # the round is made on resume
        return False

    def _rates(self, step: int) -> tuple[float, float | None]:
        """Learning rates of transformer and text encoder."""
        row = self.training.learning_rates[step - 1]
        return (float(row), None) if row.ndim == 0 else (float(row[0]), float(row[1] * row[2]))

    def _save(self) -> None:
        self.checkpoints.save(self.validation.best, self.validation.best_score, self.validation.waiting)
        self._clock = time.monotonic()

    def _validate(self) -> None:
        with self.training.optimizer.average_in_layers():
            self.validation.run(self.progress.step, is_trained=self.progress.is_trained)
        self._clock = time.monotonic()

    def _renew_report(self) -> None:
        if self.runtime.is_main and self.report.renew():
            self._clock = time.monotonic()

    def _is_stopping(self) -> bool:
        """Whether to stop after this step. Several ranks stop after the same one: when all have read it in a result."""
        wanted = self.stop.signal is not None or self._is_time_up()
        if self.runtime.world_size == 1:
            return wanted
        if wanted:
            self.training.step.ask_to_stop()
        return self._stop_agreed

    def _is_time_up(self) -> bool:
        """By the clock of the first rank."""
        minutes = self.config.optim.max_train_minutes
        return minutes is not None and self.runtime.is_main and time.monotonic() - self._begin >= 60 * minutes

    def _results(self) -> Iterator[Tensor]:
        """The step's result for every micro-batch, in order."""
        data = self.config.data
        for i, batch in enumerate(prefetch(self.source, data.dataloader_num_workers)):
            inputs = tensors(batch)
            if self.compiler.demand(self.source.size(i), inputs) or i == 0:
                self._clock = time.monotonic()
            yield self.training.step(*inputs)

    def _finish(self, pending: Pending) -> None:
        """Fetch a step's numbers and log them; stop the run if too many steps in a row were skipped."""
        values = [float(value) for value in pending.result.asnumpy()]
        known = len(StepResult._fields)
        result, sums = StepResult(*values[:known]), values[known:]
        self._stop_agreed = result.stop_asked > 0
        progress = self.progress
        progress.step = pending.step
        progress.skipped += not result.applied
        progress.skipped_in_row = 0 if result.applied else progress.skipped_in_row + 1
        progress.zero_gradients += result.grad_norm == 0
        epoch = pending.step * self.training.layout.global_batch / len(self.source.dataset.examples)
        self.metrics_log.step(
            Metrics(
                step=pending.step,
                epoch=round(epoch, 4),
                loss=result.loss,
                loss_by_concept=self._loss_by_concept(pending.step, sums) if sums else None,
                lr=pending.lr,
                text_encoder_lr=pending.text_encoder_lr,
                grad_norm=result.grad_norm,
                seconds=round(pending.seconds, 4),
                skipped=progress.skipped,
                loss_scale=result.loss_scale if self.training.scaler else None,
                **self.runtime.memory_mb(),
            )
        )
        limit = self.config.output.max_skipped_steps
        if progress.skipped_in_row >= limit:
            raise TrainingFailed(
                f"{limit} steps in a row had gradients that are not finite; stopped at step {pending.step}. {CAUSES} "
                f"The last good checkpoint: {self.checkpoints.last or 'none'}",
                everywhere=True,
            )
        if progress.step >= limit and not progress.is_trained:
            raise TrainingFailed(nothing_learned(progress), everywhere=True)

    def _loss_by_concept(self, step: int, sums: list[float]) -> dict[str, float]:
        """Mean error of the step's examples of each concept that has some, without its weight.

        `sums` are those of the errors, divided by the number of micro-batches.
        """
        layout = self.training.layout
        parts = layout.accumulation * layout.world_size
        counts = self.source.concept_counts(step)
        found = zip(concepts_of(self.config), sums, counts, strict=True)
        return {c.name: total * parts / (count * c.weight) for c, total, count in found if count}

    def _stopped_early(self) -> str | None:
        """Report that the run does not take its last steps, and why; on rank 0 only."""
        if not self.runtime.is_main:
            return None
        message = f"stopped early at step {self.progress.step} of {self.training.total_steps}: "
        message += self.validation.why_over()
        say(message)
        return message

    def _stopped(self) -> Ending:
        """Report where and why the run stopped before its end. The signal may have met another rank only."""
        signals = int(self.runtime.sum(np.array([self.stop.signal is not None], np.float32))[0])
        why = f" by --max_train_minutes {self.config.optim.max_train_minutes:g}" if not signals else ""
        self.checkpoints.note("interrupted", f"stopped{why} after step {self.progress.step}" if why else None)
        self.metrics_log.close()
        if self.runtime.is_main:
            say(f"Stopped{why} after step {self.progress.step}; {self.checkpoints.where_saved()}. To go on:")
            flags = lasting_flags(sys.argv[1:], lambda: self.checkpoints.output / CONFIG)
            say("  " + resume_command([sys.argv[0], *flags]), wrap=False)
        # the launcher ends all processes as soon as one has ended: not before the first has printed everything
        self.runtime.barrier()
        return Ending((self.stop.exit_code or 128 + signal.SIGTERM) if signals else 0, is_finished=False)
