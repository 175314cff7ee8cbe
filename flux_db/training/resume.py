"""Where a run starts: at step 0, or at a checkpoint that fits its settings.

`find_start` only reads, so that a refused resume leaves everything as it was. `take_over` then makes the output folder
this run's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.numpy import load

from flux_db import releases
from flux_db.atomic import write_file
from flux_db.console import say
from flux_db.data.dataset import Dataset, total_steps
from flux_db.errors import UserError
from flux_db.files import read_text
from flux_db.lora import init_lora
from flux_db.output_folder import BEST_LORA, CONFIG, LORA_FILE, METRICS, checkpoint_name
from flux_db.run import checkpoint, metrics_file, sample_files, saved_state
from flux_db.run.metrics_file import Row
from flux_db.run.saved_state import Progress, SavedState
from flux_db.settings import lora_layers, resume_rules
from flux_db.settings.command_line import to_yaml
from flux_db.settings.derived import global_batch, sample_prompts, text_lora
from flux_db.settings.schema import Config, LoraConfig, to_flat_dict, with_defaults
from flux_db.training import earlier

# Settings of how and where a run is started. With all others the same, it makes the same files.
STARTING = ("resume_from_checkpoint", "allow_changed", "output_dir", "encode_cache_dir")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts."""

    fingerprints: dict[str, str]
    """Of model and data, to be saved with every checkpoint."""
    saved: SavedState | None = None
    """None: at step 0."""
    repeats: bool = False
    """It goes on with the settings that the folder's run had, so it will make again what lies beyond the start."""

    @property
    def progress(self) -> Progress:
        return Progress(**vars(self.saved.progress)) if self.saved else Progress()


@dataclass(frozen=True)
class Ground:
    """What a run finds in its folder when it starts."""

    checkpoint: Path | None = None
    """The one it starts from."""
    round: Row | None = None
    """The end of the validation round of the start step, if that is complete."""


# --- found and judged --------------------------------------------------------------------------------------------


def find_start(config: Config, dataset: Dataset, fingerprints: dict[str, str], devices: int | None = None) -> Start:
    """The checkpoint to go on from, if any; a UserError if this run could not, or would give another result.

    `devices` is None where it is not known yet; then the checkpoint's number is taken. What is not in `fingerprints` is
    not compared.
    """
    wanted, output = config.output.resume_from_checkpoint, Path(config.output.output_dir)
    if not wanted:
        return Start(fingerprints=fingerprints)
    saved = _latest(output) if wanted == "latest" else saved_state.read(Path(wanted))
    if saved is None:
        return Start(fingerprints=fingerprints, repeats=_is_repeated(_read_settings(output / CONFIG), config))
    devices = devices or saved.world_size
    # also if the checkpoint's run began with a LoRA and this one names none
    names = {*fingerprints, *({init_lora.FINGERPRINT} & saved.fingerprints.keys())}
    compared = {name: saved.fingerprints.get(name, resume_rules.ABSENT) for name in names}
    found = resume_rules.changed_settings(
        {**saved.config, **compared},
        {**to_flat_dict(config), **fingerprints},
        world_size_old=saved.world_size,
        world_size_new=devices,
    )
    resume_rules.refuse_changes(found, config.output.changes_allowed, _unfit(saved, config), place=saved.folder)
    total = total_steps(config, dataset, global_batch(config, devices))
    if saved.progress.step > total:
        raise UserError(
            f"--resume_from_checkpoint: {saved.folder} is at step {saved.progress.step}, beyond this run's "
            f"{total} steps; give a larger --max_train_steps, or an earlier checkpoint"
        )
    repeats = compared == fingerprints and devices == saved.world_size and _is_repeated(saved.config, config)
    return Start(fingerprints=fingerprints, saved=saved, repeats=repeats)


def _latest(output: Path) -> SavedState | None:
    saved, skipped = checkpoint.find_latest(output, saved_state.read)
    ours = [folder for _, folder in checkpoint.numbered(output) if checkpoint.has_manifest(folder)]
    if saved is None and ours:
        raise UserError(
            [
                *skipped,
                f"--resume_from_checkpoint latest: no checkpoint in {output} is sound; name one of another folder, or "
                "start a new run without the flag, which sets these aside",
            ]
        )
    for line in skipped:
        say(f"warning: {line}")
    return saved


def _unfit(saved: SavedState, config: Config) -> dict[str, str]:
    """Settings with which the checkpoint's LoRA weights do not fit this run, and why."""
    down = {
        n.removesuffix(".lora_A.weight"): v.shape[0]
        for n, v in load(saved.files[LORA_FILE]).items()
        if n.endswith(".lora_A.weight") and v.ndim == 2
    }
    of_text = {name: rank for name, rank in down.items() if name.startswith("text_encoder.")}
    rest = {name: rank for name, rank in down.items() if name not in of_text}
    reasons = _unfit_part(saved, rest, config.lora, "rank", "lora_layers")
    lora = text_lora(config)
    if lora is None and of_text:
        reasons["train_text_encoder"] = f"{saved.folder} has weights for the text encoder too"
    elif lora is not None and not of_text:
        reasons["train_text_encoder"] = f"{saved.folder} has no weights for the text encoder"
    elif lora is not None:
        reasons |= _unfit_part(saved, of_text, lora, "text_encoder_rank", "text_encoder_layers")
    return reasons


def _unfit_part(saved: SavedState, down: Mapping[str, int], lora: LoraConfig, rank: str, layers: str) -> dict[str, str]:
    """The same for the LoRA of one network; `down`: its layers and their ranks in the checkpoint."""
    own, choice = {name.partition(".")[2]: r for name, r in down.items()}, lora_layers.parse(lora.lora_layers)
    reasons = {}
    wrong = {name: r for name, r in own.items() if choice.takes(name) and r != lora_layers.rank_of(lora, name)}
    if wrong:
        is_patterned = saved.config.get(rank) == lora.rank
        flag = "lora_rank_pattern" if is_patterned else rank
        where = f"of {next(iter(wrong))} " if is_patterned else ""
        reasons[flag] = f"the weights {where}in {saved.folder} are of rank {min(wrong.values())}"
    if extra := [name for name in own if not choice.takes(name)]:
        reasons[layers] = f"{saved.folder} has weights for {extra[0]} too"
    elif absent := [
        *(item for item in choice.names if not any(lora_layers.is_named(item, name) for name in own)),
        *(str(blocks) for blocks in choice.blocks if not any(map(blocks.holds, own))),
    ]:
        reasons[layers] = f"{saved.folder} has no weights for {absent[0]}"
    return reasons


def _is_repeated(settings: Mapping[str, Any], config: Config) -> bool:
    now = to_flat_dict(config)
    return all(settings.get(name, resume_rules.ABSENT) == value for name, value in now.items() if name not in STARTING)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return with_defaults(content) if isinstance(content, dict) else {}


# --- the output folder -------------------------------------------------------------------------------------------


def take_over(config: Config, start: Start, *, round_due: bool) -> Ground:
    """Make the output folder this run's own: set aside what is not, take up what is, and say where the run starts.

    `round_due`: the start step has a validation round, which is made again unless it is complete.
    """
    output, saved, step = Path(config.output.output_dir), start.saved, start.progress.step
    is_own = _is_own(output, start)
    past = output if is_own or saved is None else saved.folder.parent
    rows = metrics_file.up_to(metrics_file.read(past / METRICS), step)
    if not is_own:
        moved = earlier.set_aside_all(output)
        rows = rows if saved else []
    elif start.repeats and not earlier.has_results_after(output, step):
        moved = None
        earlier.drop_after(output, step)
    else:
        moved = earlier.set_aside_after(output, step)
    earlier.clean_folders(output)
    _report_start(config, saved, moved, is_own)
    done = _complete_round(config, rows, step)
    if round_due and done is None:
        rows = metrics_file.without_round(rows, step)
        sample_files.forget(output, step)
    metrics_file.write(output / METRICS, rows)
    write_file(output / CONFIG, to_yaml(config).encode())
    if saved is None:
        return Ground(None, done)
    keep = config.validation.keep_best
    if keep != "none" and keep == saved.config["keep_best"] and BEST_LORA in saved.files:
        write_file(output / BEST_LORA, saved.files[BEST_LORA])
    return Ground(_adopt(output, saved), done)


def _is_own(output: Path, start: Start) -> bool:
    """Whether what the folder holds up to the start step is this run's own past."""
    if start.saved is None:
        return start.repeats
    place = output / checkpoint_name(start.progress.step)
    if place.exists():
        return checkpoint.is_same(place, start.saved.folder)
    return start.saved.folder.resolve().parent == output.resolve()


def _report_start(config: Config, saved: SavedState | None, moved: Path | None, is_own: bool) -> None:
    if saved:
        say(f"Going on from {saved.folder}")
        if note := releases.other_saved(saved.mindspore):
            say(f"note: {saved.folder.name} was {note}")
        if saved.config["optimizer"] != config.optim.optimizer:
            say(
                f"The checkpoint was made with {saved.config['optimizer']}: {config.optim.optimizer} starts without its"
                f" moments, on the weights of step {saved.progress.step}"
            )
    elif config.output.resume_from_checkpoint:
        say(f"No checkpoint in {config.output.output_dir} yet: starting afresh")
    if moved:
        what = f"what lay beyond step {saved.progress.step if saved else 0}" if is_own else "an earlier run"
        say(f"Set aside: {what} is now in {moved}")


def _complete_round(config: Config, rows: list[Row], step: int) -> Row | None:
    """The end of the step's validation round, if its samples are there too."""
    row = metrics_file.round_at(rows, step)
    if row is None:
        return None
    # older versions wrote the line before they drew
    expected = row.get("samples", len(sample_prompts(config)) * config.validation.num_validation_images)
    there = sample_files.count(Path(config.output.output_dir), step)
    return row if isinstance(expected, int) and there >= expected else None


def _adopt(output: Path, saved: SavedState) -> Path:
    """The checkpoint under its name in the output folder, where `latest` finds it."""
    place = output / checkpoint_name(saved.progress.step)
    if checkpoint.is_same(place, saved.folder):
        return place
    try:
        return checkpoint.save(output, saved.progress.step, saved.files)
    except OSError as problem:
        say(f"WARNING: {saved.folder} was not copied to {place}: {problem}; training goes on")
        return saved.folder
