"""The loop: when to step, to save, to draw samples and to stop. How each is done stands elsewhere."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from flux_db import __version__
from flux_db.atomic import write_file
from flux_db.console import say, stage
from flux_db.data.batches import BatchSource, dataset_of, prefetch
from flux_db.errors import describe
from flux_db.interrupt import StopRequest, resume_command
from flux_db.lora import trained_file
from flux_db.model import adapter
from flux_db.model.runtime import Runtime
from flux_db.output_folder import BEST_LORA, CONFIG, LORA_FILE, METRICS, checkpoint_name
from flux_db.report.run_page import write_report
from flux_db.run import checkpoint, metrics_file, sample_files
from flux_db.run.metrics_log import Metrics, MetricsLog
from flux_db.run.saved_state import Best, lora_steps
from flux_db.settings.command_line import lasting_flags
from flux_db.settings.schema import Config, to_flat_dict
from flux_db.training import sample_rounds, snapshot
from flux_db.training.build import Training
from flux_db.training.resume import Ground, Start
from flux_db.training.sample_rounds import Validator
from flux_db.training.validation_loss import HeldOut, best_in

CAUSES = "Likely causes: a learning rate that is too high, fp16 (try bf16), or damaged pictures or weights."


class TrainingFailed(Exception):
    """The run cannot go on; what was saved so far is good."""

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere
        """All ranks found it out at the same step."""


@dataclass(frozen=True)
class Pending:
    """A step that was started on the device and whose numbers were not fetched yet."""

    step: int
    lr: float
    seconds: float
    result: Tensor


class Trainer:
    """One run, from the step it starts or resumes at to its last."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        training: Training,
        source: BatchSource,
        start: Start,
        ground: Ground,
        every: int | None,
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.training = training
        self.source = source
        self.start = start
        self.ground = ground
        self.every = every
        """Steps from one validation round to the next; None without validation."""
        self.progress = start.progress
        self.last_checkpoint = ground.checkpoint
        self.output = Path(config.output.output_dir)
        self._stop_agreed = False

    # --- the loop ---

    def run(
        self, metrics_log: MetricsLog, validator: Validator | None, held_out: HeldOut | None, stop: StopRequest
    ) -> int:
        """Train to the end. Returns the exit code: 0, or 128 + signal if a signal stopped the run."""
        self.metrics_log, self.validator, self.held_out = metrics_log, validator, held_out
        first = self.progress.step
        with (
            # before the first step there is nothing to save; of several ranks the first decides, and the others follow
            stop.finishing_steps(lambda: self.progress.step > first or not self.runtime.is_main),
            stop.before_leaving(lambda: self._note("interrupted")),
        ):
            return self._run(stop)

    def _run(self, stop: StopRequest) -> int:
        self._note("running")
        try:
            self._demand_equal_ranks("at the start")
            self.best = self._recall_best() if self.runtime.is_main else None
            stopped = self._loop(stop)
            if stopped:
                self._interrupted()
                return stop.exit_code or 128 + signal.SIGTERM  # the signal may have met another rank only
            self._save_final()
        except BaseException as problem:
            self._note("failed", f"{type(problem).__name__}: {problem}")
            if isinstance(problem, OSError):
                raise TrainingFailed(
                    f"{describe(problem)}. Kept: {self.last_checkpoint or 'no checkpoint'}"
                ) from problem
            raise
        self._note("finished")
        return 0

    def _loop(self, stop: StopRequest) -> bool:
        """Take the steps; true if a signal ended them early."""
        if self._has_round(self.progress.step) and not self._is_round_complete():
            self._validate(self.progress.step)
        pending: Pending | None = None
        self._clock = time.monotonic()
        for micro_step, result in enumerate(self._results(), start=self.source.start):
            if not self.training.layout.is_boundary(micro_step):
                continue
            step = micro_step // self.training.layout.accumulation + 1
            # reading a result waits for the device: read the one before, while this one is computed
            if pending:
                self._finish(pending)
            now = time.monotonic()
            pending = Pending(step, float(self.training.learning_rates[step - 1]), now - self._clock, result)
            self._clock = now
            last = step == self.training.total_steps
            stopping = self._is_stopping(stop)
            save = last or step % self.config.output.checkpointing_steps == 0 or stopping
            due = self._has_round(step)
            draw = due and not stopping
            if save or draw:
                self._finish(pending)
                pending = None
            if save:
                self._save()
            if draw:
                self._validate(step)
            if stopping:
                return not last or due  # the round is made on resume
        return False

    def _has_round(self, step: int) -> bool:
        return sample_rounds.is_due(step, self.every, self.training.total_steps)

    def _is_round_complete(self) -> bool:
        """Whether the round of the start step was made before. The first rank has looked, and all do the same."""
        complete = self.runtime.is_main and self.ground.round is not None
        return bool(self.runtime.sum(np.array([complete], np.float32))[0])

    def _is_stopping(self, stop: StopRequest) -> bool:
        """Whether to stop after this step. Several ranks stop after the same one: when all have read it in a result."""
        if self.runtime.world_size == 1:
            return stop.signal is not None
        if stop.signal:
            self.training.step.ask_to_stop()
        return self._stop_agreed

    def _results(self) -> Iterator[Tensor]:
        """The step's result for every micro-batch, in order."""
        data = self.config.data
        if data.enable_mindspore_data_sink:
            sunk = ms.data_sink(self.training.step, dataset_of(self.source, data.dataloader_num_workers), sink_size=1)
            for _ in range(len(self.source)):
                yield sunk()
            return
        compiled = set()
        for i, batch in enumerate(prefetch(self.source, data.dataloader_num_workers)):
            inputs = [Tensor(np.asarray(column)) for column in batch]
            if (size := self.source.size(i)) not in compiled:
                several = len(self.source.dataset.sizes) > 1
                with stage("Compiling the training step" + (f" for {size}" if several else "")):
                    self.training.step.compile(*inputs)
                compiled.add(size)
                self._clock = time.monotonic()
            yield self.training.step(*inputs)

    def _finish(self, pending: Pending) -> None:
        """Fetch a step's numbers and tell them; stop the run if too many steps in a row were skipped."""
        loss, norm, applied, scale, stop_asked = (float(value) for value in pending.result.asnumpy())
        self._stop_agreed = stop_asked > 0
        progress = self.progress
        progress.step = pending.step
        progress.skipped += not applied
        progress.skipped_in_row = 0 if applied else progress.skipped_in_row + 1
        epoch = pending.step * self.training.layout.global_batch / len(self.source.dataset.examples)
        self.metrics_log.step(
            Metrics(
                step=pending.step,
                epoch=round(epoch, 4),
                loss=loss,
                lr=pending.lr,
                grad_norm=norm,
                seconds=round(pending.seconds, 4),
                skipped=progress.skipped,
                loss_scale=scale if self.training.scaler else None,
                **self.runtime.memory_mb(),
            )
        )
        limit = self.config.output.max_skipped_steps
        if progress.skipped_in_row >= limit:
            raise TrainingFailed(
                f"{limit} steps in a row had gradients that are not finite; stopped at step {pending.step}. {CAUSES} "
                f"The last good checkpoint: {self.last_checkpoint or 'none'}",
                everywhere=True,
            )

    # --- what happens beside the steps ---

    def _validate(self, step: int) -> None:
        if self.held_out:
            self._measure(step, self.held_out)
        if self.validator:
            self.validator.run(step)
        if self.runtime.is_main:
            self.metrics_log.end_round(step, sample_files.count(self.output, step))
            write_report(self.output)
        self._clock = time.monotonic()

    def _measure(self, step: int, held_out: HeldOut) -> None:
        """The validation loss of all ranks; the LoRA with the lowest is kept, if asked for."""
        loss = held_out.measure()
        if not self.runtime.is_main:
            return
        is_lowest = np.isfinite(loss) and (self.best is None or loss < self.best.validation_loss)
        best = self._is_trained() and is_lowest
        if best and self.config.validation.keep_best:
            try:
                write_file(self.output / BEST_LORA, self._lora_file())
            except OSError as problem:
                say(f"WARNING: the best LoRA was not saved: {describe(problem)}; training goes on")
                best = False
        if best:
            self.best = Best(step, loss, held_out.fingerprint)
        self.metrics_log.validation_loss(step, loss, held_out.fingerprint, best=bool(best))

    def _is_trained(self) -> bool:
        """Whether any step has changed the LoRA."""
        return self.progress.skipped < self.progress.step

    def _recall_best(self) -> Best | None:
        """The lowest validation loss before the start, of the same pictures; None if the LoRA to be kept is gone."""
        saved, row, keep = self.start.saved, self.ground.round, self.config.validation.keep_best
        if self.held_out is None or saved is None:
            return None
        at_start = best_in([row]) if row else None  # the checkpoint was saved before its step's round
        best = saved.best if saved.knows_best else best_in(metrics_file.read(self.output / METRICS))
        best = at_start or best
        if best is None or best.pictures != self.held_out.fingerprint:
            return None
        if keep and at_start:
            write_file(self.output / BEST_LORA, self._lora_file())
        return best if not keep or lora_steps(self.output / BEST_LORA) == best.step else None

    def _save(self) -> None:
        """Save a checkpoint on rank 0. A failed save is loud, but the run and its earlier checkpoints live on."""
        self._demand_equal_ranks(f"at step {self.progress.step}")
        if self.runtime.is_main:
            try:
                files = snapshot.to_files(self.training, self.config, self.progress, self._about(), self.facts())
                if self.best and lora_steps(self.output / BEST_LORA) == self.best.step:
                    files[BEST_LORA] = (self.output / BEST_LORA).read_bytes()
                self.metrics_log.flush()
                self.last_checkpoint = checkpoint.save(self.output, self.progress.step, files)
                self._prune()
            except snapshot.WeightsNotFinite as problem:
                raise TrainingFailed(f"{problem}; the last good checkpoint: {self.last_checkpoint}") from problem
            except OSError as problem:
                good = self.last_checkpoint or "none"
                say(
                    f"WARNING: checkpoint {self.progress.step} was not saved: {describe(problem)}; training goes on "
                    f"(the last good one: {good})"
                )
                self.metrics_log.event({"step": self.progress.step, "event": "save failed", "message": str(problem)})
            self._note("running")
        self.runtime.barrier()
        self._clock = time.monotonic()

    def _prune(self) -> None:
        if limit := self.config.output.checkpoints_total_limit:
            try:
                checkpoint.prune(self.output, limit, newest=self.last_checkpoint)
            except OSError as problem:
                say(f"warning: an old checkpoint could not be removed: {describe(problem)}")

    def _demand_equal_ranks(self, when: str) -> None:
        if self.runtime.world_size == 1:
            return
        about = {"step": str(self.progress.step).encode()}
        about |= {name: value.encode() for name, value in self.start.fingerprints.items()}
        if different := self.runtime.differing(snapshot.contents(self.training) | about):
            raise TrainingFailed(
                f"{when} the devices differ from rank 0 in: {'; '.join(different)}. They must be bitwise equal, so "
                f"this run cannot be trusted any more. The last good checkpoint: {self.last_checkpoint or 'none'}",
                everywhere=True,
            )

    def _save_final(self) -> None:
        if not self._is_trained():
            raise TrainingFailed(
                f"all {self.progress.step} steps had gradients that are not finite, so nothing was learned and no LoRA "
                f"is written. {CAUSES}",
                everywhere=True,
            )
        if not self.runtime.is_main:
            return
        path = self.output / LORA_FILE
        try:
            write_file(path, self._lora_file())
        except OSError as problem:
            raise TrainingFailed(
                f"{path} could not be written: {problem.strerror}. Kept: {self.last_checkpoint or 'no checkpoint'}"
            ) from problem
        self._prune()  # the run may have been killed between its last save and the pruning after it

    def _lora_file(self) -> bytes:
        """The LoRA as it is now."""
        precision = "no" if self.config.output.upcast_before_saving else self.config.runtime.mixed_precision
        weights = adapter.to_state_dict(self.training.transformer, self.config.lora)
        return trained_file.lora_file(weights, self.config, self.facts(), precision)

    def _interrupted(self) -> None:
        self._note("interrupted")
        self.metrics_log.close()
        if self.runtime.is_main:
            say(f"Stopped after step {self.progress.step}; {self._saved()}. To go on:")
            flags = lasting_flags(sys.argv[1:], lambda: self.output / CONFIG)
            say("  " + resume_command([sys.argv[0], *flags]))
        # the launcher ends all processes as soon as one has ended: not before the first has told everything
        self.runtime.barrier()

    def _saved(self) -> str:
        """Where the run can go on, in words: a full disk may have refused the last checkpoint."""
        if self.last_checkpoint is None:
            return "nothing was saved, the run will start anew"
        if self.last_checkpoint.name != checkpoint_name(self.progress.step):
            return f"it was not saved, the last good checkpoint is {self.last_checkpoint}"
        return f"saved as {self.last_checkpoint}"

    def _about(self) -> dict[str, Any]:
        return {
            "config": to_flat_dict(self.config),
            "fingerprints": self.start.fingerprints,
            "best": asdict(self.best) if self.best else None,
            "world_size": self.runtime.world_size,
            "versions": {"flux_db": __version__, "mindspore": ms.__version__},
        }

    def facts(self) -> trained_file.Facts:
        pictures = {sample.picture.digest for sample in self.source.dataset.examples}
        batch = self.training.layout.global_batch
        return trained_file.Facts(steps=self.progress.step, pictures=len(pictures), global_batch=batch)

    def _note(self, status: str, message: str | None = None) -> None:
        if self.runtime.is_main:
            status.write_status(
                self.output,
                status,
                step=self.progress.step,
                last_good_checkpoint=str(self.last_checkpoint) if self.last_checkpoint else None,
                message=message,
            )
            if status != "running":
                write_report(self.output)  # here, because ranks that are done may end this one
