"""Which settings may differ from a checkpoint's on resume, and which would give another result."""

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from flux_db.errors import UserError
from flux_db.settings.concepts import comparable

# Settings that do not reach the result. What is not listed here, a new setting included, binds.
FREE = frozenset(
    {
        # Where things lie, and which pictures are trained on: models and pictures are compared by fingerprint instead.
        "pretrained_model_name_or_path",
        "instance_data_dir",
        "dataset_name",
        "dataset_config_name",
        "image_column",
        "caption_column",
        "class_data_dir",
        "mask_dir",
        "init_lora",
        "validation_share",
        "cache_dir",
        "encode_cache_dir",
        "output_dir",
        "logging_dir",
        # What is saved, shown and drawn beside the training.
        "checkpointing_steps",
        "checkpoints_total_limit",
        "resume_from_checkpoint",
        "allow_changed",
        "max_skipped_steps",
        "upcast_before_saving",
        "ema_export",
        "report_to",
        "dry_run",
        "sample_batch_size",
        "validation_prompt",
        "num_validation_images",
        "validation_epochs",
        "validation_steps",
        "validation_inference_steps",
        "validation_guidance",
        "push_to_hub",
        "hub_model_id",
        "hub_private",
        "validation_prompts_file",
        "validation_size",
        "vae_tiling",
        "validation_seed",
        "validation_data_dir",
        "keep_best",
        "early_stop_patience",
        "max_train_minutes",
        "score_steps",
        "score_dino",
        "score_clip",
        # How the same sums are computed.
        "device",
        "distributed",
        "shard_base",
        "jit_level",
        "deterministic",
        "compile_cache",
        "compile_cache_dir",
        "gradient_checkpointing",
        "dataloader_num_workers",
        "enable_mindspore_data_sink",  # of checkpoints by version 0.1
    }
)

# Of these the product counts, over all devices.
GLOBAL_BATCH = ("train_batch_size", "gradient_accumulation_steps")

LENGTH = ("max_train_steps", "num_train_epochs")

# Schedules that are the same for every length of the run.
ENDLESS_SCHEDULES = ("constant", "constant_with_warmup")

# Entries beside the settings, and the setting that --allow_changed knows them by.
FINGERPRINTS = {
    "model_fingerprint": "pretrained_model_name_or_path",
    "data_fingerprint": "instance_data_dir",
    "init_lora_fingerprint": "init_lora",
}

ABSENT = "(not recorded)"

# Characters of a value in a message.
SHOWN = 300


class Change(NamedTuple):
    """A setting that differs from the checkpoint's."""

    name: str
    old: Any
    new: Any


def changed_settings(
    old: Mapping[str, Any], new: Mapping[str, Any], *, world_size_old: int, world_size_new: int
) -> list[Change]:
    """The settings that change the result, of the checkpoint's flat config and the one of now.

    Both may hold `model_fingerprint` and `data_fingerprint`; they are reported under their folder's setting.
    """
    old, new = comparable(old), comparable(new)
    special = {*FREE, *GLOBAL_BATCH, *LENGTH, *FINGERPRINTS}
    names = [name for name in dict.fromkeys([*new, *old]) if name not in special]
    return [
        *_changed_content(old, new),
        *(Change(name, *_both(name, old, new)) for name in names if operator.ne(*_both(name, old, new))),
        *_changed_length(old, new),
        *_changed_batch(old, new, world_size_old, world_size_new),
    ]


def _both(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Any, Any]:
    return old.get(name, ABSENT), new.get(name, ABSENT)


def _changed_content(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    def shown(settings: Mapping[str, Any], entry: str, setting: str) -> str:
        others = settings.get("dataset_name") or ("--concepts" if settings.get("concepts") else None)
        other = others if setting == "instance_data_dir" else None
        place = settings.get(setting) or other or ABSENT
        return f"{place} with content {settings.get(entry, ABSENT)}"

    return [
        Change(setting, shown(old, entry, setting), shown(new, entry, setting))
        for entry, setting in FINGERPRINTS.items()
        if operator.ne(*_both(entry, old, new))
    ]


def _changed_length(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """A longer run is always welcome; a shorter one bends a schedule that is drawn over the whole length."""
    if new.get("lr_scheduler") in ENDLESS_SCHEDULES:
        return []
    steps, epochs = LENGTH
    name = steps if old.get(steps) is not None or new.get(steps) is not None else epochs
    before, after = old.get(name), new.get(name)
    # Steps and epochs cannot be compared without the pictures, so a change between them is shown to the user.
    longer = None not in (before, after) and after >= before
    return [] if longer or before == after else [Change(name, before, after)]


def _changed_batch(old: Mapping[str, Any], new: Mapping[str, Any], devices_old: int, devices_new: int) -> list[Change]:
    before, after = _layout(old, devices_old), _layout(new, devices_new)
    if math.prod(before) == math.prod(after):
        return []
    texts = [
        f"{batch} x {accumulation} accumulated x {devices} devices = {batch * accumulation * devices}"
        for batch, accumulation, devices in (before, after)
    ]
    return [Change("train_batch_size", *texts)]


def _layout(settings: Mapping[str, Any], devices: int) -> tuple[int, int, int]:
    batch, accumulation = (settings.get(name, 1) for name in GLOBAL_BATCH)
    return batch, accumulation, devices


def refuse_changes(
    changes: list[Change], allowed: frozenset[str], unfit: Mapping[str, str] | None = None, *, place: object
) -> None:
    """Raise a UserError that lists every change not allowed and the flag that allows them all.

    `place` is the checkpoint's. `unfit`: settings that cannot be allowed, and why.
    """
    unfit = unfit or {}
    problems = [f"--{name}: {why}, which do not fit; set it back, or start a new run" for name, why in unfit.items()]
    refused = [change for change in changes if change.name not in {*allowed, *unfit}]
    details = []
    if refused:
        names = ",".join(sorted({*allowed, *(change.name for change in refused)} - unfit.keys()))
        problems.append(f"{place}: the checkpoint was made with other settings, and these change the result:")
        details = [f"  {c.name}: {_shown(c.old)} in the checkpoint, {_shown(c.new)} now" for c in refused]
        details.append(f"set them back, or go on with the new ones by --allow_changed {names}")
    if problems:
        raise UserError(problems, details)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
