"""Training, put together from its parts."""

from __future__ import annotations

from pathlib import Path

from flux_db.console import say
from flux_db.data.batches import BatchSource
from flux_db.data.dataset import Dataset
from flux_db.data.encode_cache import Cache
from flux_db.interrupt import StopRequest
from flux_db.model.runtime import Runtime
from flux_db.model.sampler import Sampler
from flux_db.output_folder import BEST_LORA, GRID, LORA_FILE, METRICS, MODEL_CARD, REPORT, SAMPLES
from flux_db.report import hub, model_card
from flux_db.report.thumbnails import store_training_pictures
from flux_db.run.metrics_log import MetricsLog
from flux_db.run.saved_state import Progress
from flux_db.settings.derived import validation_prompts
from flux_db.settings.schema import Config
from flux_db.training import sample_rounds, snapshot
from flux_db.training.build import Training, build, step_settings
from flux_db.training.loop import Trainer, TrainingFailed
from flux_db.training.resume import Ground, Start, take_over
from flux_db.training.sample_rounds import Validator
from flux_db.training.validation_loss import HeldOut


def train(
    config: Config, runtime: Runtime, model: Path, cache: Cache, dataset: Dataset, start: Start, stop: StopRequest
) -> int:
    """Train to the end; returns the exit code."""
    training = build(config, runtime, model, dataset)
    progress = start.progress
    if start.saved:
        snapshot.restore(start.saved, training, config)
    every = sample_rounds.steps_between(config, len(dataset.examples), training.layout.global_batch)
    ground = Ground(start.saved.folder if start.saved else None)
    runtime.barrier()  # all ranks have read the folder before the first one changes it
    if runtime.is_main:
        ground = take_over(config, start, round_due=sample_rounds.is_due(progress.step, every, training.total_steps))
        store_training_pictures(config, dataset)
    trainer = Trainer(
        config=config,
        runtime=runtime,
        training=training,
        source=batch_source(config, training, cache, dataset, progress),
        start=start,
        ground=ground,
        every=every,
    )
    metrics_log = MetricsLog(config, training.total_steps, progress.step, enabled=runtime.is_main)
    try:
        validator = held_out = None
        if validation_prompts(config):
            sampler = Sampler(model, training.transformer, runtime.dtype, config.model.variant)
            validator = Validator(config, runtime, cache, sampler, metrics_log)
        if dataset.held_out:
            settings = step_settings(config, runtime, model, prior=False)
            held_out = HeldOut(config, runtime, cache, dataset, training.transformer, settings)
        code = trainer.run(metrics_log, validator, held_out, stop)
    except TrainingFailed as problem:
        if runtime.is_main or not problem.everywhere:
            say(f"error: {problem}")
        if problem.everywhere:
            runtime.barrier()  # the launcher ends all processes as soon as one has ended
        return 1
    finally:
        metrics_log.close()
    if code == 0 and runtime.is_main:
        model_card.write_card(config, trainer.facts())
        _tell_results(config)
        code = _push(config, stop) if config.hub.push_to_hub else 0
    return code


def batch_source(config: Config, training: Training, cache: Cache, dataset: Dataset, progress: Progress) -> BatchSource:
    return BatchSource(
        config=config,
        dataset=dataset,
        cache=cache,
        layout=training.layout,
        latent_shape=training.latent_shape,
        learning_rates=training.learning_rates,
        num_timesteps=training.num_timesteps,
        start=progress.step * training.layout.accumulation,
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
    places = {
        "LoRA": output / LORA_FILE,
        "samples": output / SAMPLES / GRID,
        "best": output / BEST_LORA,
        "card": output / MODEL_CARD,
        "metrics": output / METRICS,
        "report": output / REPORT,
    }
    say("Done.")
    if config.validation.keep_best and not places["best"].is_file():
        say("warning: no validation loss was finite, so there is no best LoRA")
    for name, path in places.items():
        if path.is_file():
            print(f"{name + ':':8} {path}")
