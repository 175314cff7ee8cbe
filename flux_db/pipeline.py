"""Training, put together from its parts."""

from __future__ import annotations

from pathlib import Path

from flux_db import card, hub, model_files, sample_files, state
from flux_db.batches import BatchSource
from flux_db.build import Training, build, step_settings
from flux_db.config import Config, validation_prompts
from flux_db.console import say
from flux_db.dataset import Dataset
from flux_db.encode import Cache
from flux_db.errors import UserError
from flux_db.export import FILE_NAME
from flux_db.html_report import REPORT
from flux_db.interrupt import StopRequest
from flux_db.report import Reporter
from flux_db.runtime import Runtime
from flux_db.sample import Sampler
from flux_db.state import Progress
from flux_db.thumbnails import store_training_pictures
from flux_db.trainer import Trainer, TrainingFailed, find_start
from flux_db.validate import Validator
from flux_db.validation_loss import BEST_NAME, HeldOut


def train(config: Config, runtime: Runtime, model: Path, cache: Cache, dataset: Dataset, stop: StopRequest) -> int:
    """Train to the end; returns the exit code."""
    own_parts = model_files.fingerprint(model, ("transformer", "vae", "scheduler"), config.model.variant)
    fingerprints = {
        "model_fingerprint": own_parts + cache.text_model,
        "data_fingerprint": dataset.fingerprint(),
    }
    start = find_start(config, runtime, fingerprints)
    training = build(config, runtime, model, dataset)
    if start and start.step > training.total_steps:
        raise UserError(
            f"--resume_from_checkpoint: {start.folder} is at step {start.step}, beyond this run's "
            f"{training.total_steps} steps; give a larger --max_train_steps, or an earlier checkpoint"
        )
    progress = state.from_files(start.files, training) if start else Progress()
    trainer = Trainer(
        config=config,
        runtime=runtime,
        training=training,
        source=batch_source(config, training, cache, dataset, progress),
        fingerprints=fingerprints,
        progress=progress,
        last_checkpoint=start.folder if start else None,
    )
    if runtime.is_main:
        sample_files.forget_after(Path(config.output.output_dir), progress.step)
        store_training_pictures(config, dataset)
    reporter = Reporter(config, training.total_steps, progress.step, enabled=runtime.is_main)
    try:
        validator = held_out = None
        if validation_prompts(config):
            sampler = Sampler(model, training.transformer, runtime.dtype, config.model.variant)
            validator = Validator(config, runtime, cache, sampler, reporter)
        if dataset.held_out:
            settings = step_settings(config, runtime, model, prior=False)
            held_out = HeldOut(config, runtime, cache, dataset, training.transformer, settings)
        code = trainer.run(reporter, validator, held_out, stop)
    except TrainingFailed as problem:
        if runtime.is_main or not problem.everywhere:
            say(f"error: {problem}")
        if problem.everywhere:
            runtime.barrier()  # the launcher ends all processes as soon as one has ended
        return 1
    finally:
        reporter.close()
    if code == 0 and runtime.is_main:
        card.write_card(config, trainer.facts())
        _tell_results(config)
        code = _push(config, stop) if config.hub.push_to_hub else 0
    return code


def batch_source(config: Config, training: Training, cache: Cache, dataset: Dataset, progress: Progress) -> BatchSource:
    return BatchSource(
        config=config,
        dataset=dataset,
        cache=cache,
        dealing=training.dealing,
        latent_shape=training.latent_shape,
        learning_rates=training.learning_rates,
        num_timesteps=training.num_timesteps,
        start=progress.step * training.dealing.accumulation,
    )


def _push(config: Config, stop: StopRequest) -> int:
    """Upload the run, unless a signal asked to stop; returns the exit code."""
    if stop.signal:
        hub.tell_retry(config, f"stopped by {stop.signal.name}")
        return stop.exit_code
    with stop.before_leaving(lambda: hub.tell_retry(config, "stopped")):
        return hub.push_run(config)


def _tell_results(config: Config) -> None:
    output = Path(config.output.output_dir)
    say("Done.")
    print(f"LoRA:    {output / FILE_NAME}")
    if validation_prompts(config):
        print(f"samples: {output / sample_files.SAMPLES / sample_files.GRID}")
    if config.validation.keep_best:
        print(f"best:    {output / BEST_NAME}")
    print(f"card:    {output / card.FILE_NAME}")
    print(f"metrics: {output / 'metrics.jsonl'}")
    print(f"report:  {output / REPORT}")
