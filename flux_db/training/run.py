"""A run from its checkpoint to the published LoRA, put together from its parts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flux_db.check import device_memory
from flux_db.console import DONE, say
from flux_db.data.batches import BatchSource
from flux_db.data.blank_cache import BlankCache
from flux_db.data.dataset import Dataset
from flux_db.data.encode_cache import Cache
from flux_db.interrupt import StopRequest
from flux_db.lora.trained_file import Facts
from flux_db.model import model_folder
from flux_db.model.runtime import Runtime
from flux_db.model.sampler import Sampler
from flux_db.output_folder import BEST_LORA, EMA_LORA, GRID, LORA_FILE, METRICS, MODEL_CARD, REPORT, SAMPLES
from flux_db.report import hub, model_card, usage
from flux_db.report.thumbnails import store_training_pictures
from flux_db.run.metrics_log import MetricsLog
from flux_db.settings.derived import validation_prompts
from flux_db.settings.schema import Config
from flux_db.training import snapshot
from flux_db.training.build import Training, step_settings
from flux_db.training.checkpoints import Checkpoints
from flux_db.training.compiling import StepCompiler
from flux_db.training.failure import TrainingFailed
from flux_db.training.loop import Loop
from flux_db.training.prepare import Encoding, Prepared
from flux_db.training.resume import Ground, take_over
from flux_db.training.sample_rounds import Rounds, Validator, rounds_of
from flux_db.training.scoring import open_scoring
from flux_db.training.text_vectors import TextVectors
from flux_db.training.validation import KEPT_FOR, Validation
from flux_db.training.validation_loss import HeldOut


class Outcome(NamedTuple):
    """How a run ended."""

    exit_code: int
    facts: Facts
    is_finished: bool = False


def finish_encoding(
    config: Config, runtime: Runtime, prepared: Prepared, encoding: Encoding, training: Training
) -> StepCompiler:
    """Wait for the encoding; meanwhile compile the first step, unless a checkpoint is to be put in place before."""
    compiler = step_compiler(config, runtime, prepared, training)
    if encoding.is_running and prepared.start.saved is None:
        compiler.compile_first()
    encoding.wait()
    return compiler


def step_compiler(config: Config, runtime: Runtime, prepared: Prepared, training: Training) -> StepCompiler:
    blank = batch_source(config, training, _blank(config, prepared, training), prepared)
    return StepCompiler(runtime, prepared.model, training.step, blank)


def _blank(config: Config, prepared: Prepared, training: Training) -> BlankCache:
    transformer = model_folder.read_config(prepared.model, "transformer")
    channels, side, _ = training.latent_shape
    return BlankCache(
        latent_channels=channels,
        shrink=config.data.resolution // side,
        prompt_shape=(config.data.max_sequence_length, transformer["joint_attention_dim"]),
        pooled_length=transformer["pooled_projection_dim"],
        background=prepared.cache.background,
    )


def train(
    config: Config,
    runtime: Runtime,
    prepared: Prepared,
    training: Training,
    compiler: StepCompiler,
    ground: Ground,
    stop: StopRequest,
) -> Outcome:
    """Train to the end."""
    start, cache, dataset = prepared.start, prepared.cache, prepared.dataset
    progress = start.progress
    metrics_log = MetricsLog(config, training.total_steps, progress.step, enabled=runtime.is_main)
    checkpoints = Checkpoints(
        config,
        runtime,
        training,
        progress,
        metrics_log,
        fingerprints=start.fingerprints,
        pictures=len({example.picture.digest for example in dataset.examples}),
        last=ground.checkpoint,
    )
    planned = device_memory.read_model(config, prepared.model)
    if runtime.is_main and runtime.device == "Ascend":
        say(f"Memory: {device_memory.verdict(config, planned, runtime.world_size, list(dataset.sizes))}")
    try:
        validator, held_out = _validators(config, runtime, prepared, training, metrics_log)
        validation = Validation(
            config,
            runtime,
            metrics_log,
            validator,
            held_out,
            checkpoints.write_lora,
            rounds=_rounds(config, dataset, training),
            scoring=open_scoring(config, dataset) if runtime.is_main else None,
        )
        source = batch_source(config, training, cache, prepared)
        loop = Loop(config, runtime, training, source, progress, metrics_log, checkpoints, validation, stop, compiler)
        ending = loop.run(start, ground)
        if runtime.is_main and ending.is_finished:  # of a stopped run the last line is the command that goes on
            budget = device_memory.budget(config, planned, runtime.world_size, list(dataset.sizes))
            say(f"Memory: {_taken(runtime, budget.peak)}")
        return Outcome(ending.exit_code, checkpoints.facts, ending.is_finished)
    except TrainingFailed as problem:
        if runtime.is_main or not problem.everywhere:
            say(f"error: {problem}")
        if problem.everywhere:
            runtime.barrier()  # the launcher ends all processes as soon as one has ended
        return Outcome(1, checkpoints.facts)
    finally:
        metrics_log.close()


def _taken(runtime: Runtime, planned: int) -> str:
    """What the process took at most; of the device beside what was planned."""
    largest = runtime.largest_memory()
    text = f"this process took {largest.host / 1e9:.2f} GB at most"
    if largest.device is None:
        return text
    return f"{text}, and {largest.device / 1e9:.1f} GB of the device, where {planned / 1e9:.1f} GB were computed before"


def _validators(
    config: Config, runtime: Runtime, prepared: Prepared, training: Training, metrics_log: MetricsLog
) -> tuple[Validator | None, HeldOut | None]:
    """What draws the samples and what measures the loss of held-out pictures, as far as they are asked for."""
    validator = held_out = None
    vectors = TextVectors(prepared.cache, training.text_encoder)
    if validation_prompts(config):
        tiling = config.validation.vae_tiling
        sampler = Sampler(prepared.model, training.transformer, runtime.dtype, config.model.variant, tiling)
        validator = Validator(config, runtime, prepared.cache, sampler, metrics_log, vectors)
    if prepared.dataset.held_out:
        settings = step_settings(config, runtime, prepared.model, prior=False)
        held_out = HeldOut(config, runtime, prepared.cache, prepared.dataset, training.transformer, settings, vectors)
    return validator, held_out


def _rounds(config: Config, dataset: Dataset, training: Training) -> Rounds:
    return rounds_of(config, len(dataset.examples), training.layout.global_batch, training.total_steps)


def restore(config: Config, runtime: Runtime, prepared: Prepared, training: Training) -> Ground:
    """Put the state of the checkpoint in place, and make the output folder this run's own."""
    start, dataset = prepared.start, prepared.dataset
    if start.saved:
        snapshot.restore(start.saved, training, config)
    runtime.barrier()  # all ranks have read the folder before the first one changes it
    if not runtime.is_main:
        return Ground(start.saved.folder if start.saved else None)
    due = _rounds(config, dataset, training).is_due(start.progress.step)
    ground = take_over(config, start, round_due=due)
    store_training_pictures(config, dataset)
    return ground


def publish(config: Config, runtime: Runtime, outcome: Outcome, stop: StopRequest) -> int:
    """Write the model card, print where everything is, and upload it if asked for; returns the exit code."""
    if not outcome.is_finished or not runtime.is_main:
        return outcome.exit_code
    model_card.write_card(config, outcome.facts)
    _print_results(config)
    return _push(config, stop) if config.hub.push_to_hub else 0


def batch_source(config: Config, training: Training, cache: Cache | BlankCache, prepared: Prepared) -> BatchSource:
    return BatchSource(
        config=config,
        dataset=prepared.dataset,
        cache=cache,
        layout=training.layout,
        latent_shape=training.latent_shape,
        learning_rates=training.learning_rates,
        sigmas=training.sigmas,
        start=prepared.start.progress.step * training.layout.accumulation,
    )


def _push(config: Config, stop: StopRequest) -> int:
    """Upload the run, unless a signal asked to stop; returns the exit code."""
    if stop.signal:
        hub.print_retry(config, f"stopped by {stop.signal.name}")
        return stop.exit_code
    with stop.before_leaving(lambda: hub.print_retry(config, "stopped")):
        return hub.push_run(config)


def _print_results(config: Config) -> None:
    output = Path(config.output.output_dir)
    places = {
        "LoRA": output / LORA_FILE,
        "average": output / EMA_LORA,
        "samples": output / SAMPLES / GRID,
        "best": output / BEST_LORA,
        "model card": output / MODEL_CARD,
        "metrics": output / METRICS,
        "report": output / REPORT,
    }
    say(DONE)
    keep = config.validation.keep_best
    if keep != "none" and not places["best"].is_file():
        reason = "no validation loss was finite" if keep == "loss" else "no round of samples has a score"
        say(f"warning: {reason}, so there is no best LoRA")
    for name, path in places.items():
        if path.is_file():
            note = f" ({KEPT_FOR[keep]})" if name == "best" and keep != "none" else ""
            print(f"{name + ':':11} {path}{note}")
    print(f"{'next:':11} {usage.next_command(config)}")
