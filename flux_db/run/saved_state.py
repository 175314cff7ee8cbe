"""What the files of a checkpoint say, read without MindSpore and believed only as far as it makes sense.

The seal of a checkpoint shows that its bytes are those that were written, not who wrote them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from flux_db.errors import UserError
from flux_db.output_folder import BEST_LORA, EMA_LORA, LORA_FILE
from flux_db.run import checkpoint
from flux_db.run.checkpoint import DamagedCheckpoint
from flux_db.settings.resume_rules import GLOBAL_BATCH, LENGTH
from flux_db.settings.schema import CONCEPT_KEYS, with_defaults
from flux_db.weight_file import open_weights

OPTIMIZER, STATE = "optimizer.safetensors", "state.json"

# The global batch is computed with it.
MOST_DEVICES = 2**16

# Of an optimizer's state: below zero the next update would not be a number.
NOT_NEGATIVE = ("updates", "bias_correction1", "bias_correction2", "exp_avg_sq", "d")


@dataclass
class Progress:
    """How far a run is; the only thing that changes in the loop besides the weights."""

    step: int = 0
    """Optimizer steps done."""
    skipped: int = 0
    """Steps skipped for gradients that were not finite, in all."""
    skipped_in_row: int = 0
    zero_gradients: int = 0
    """Steps whose gradients were all exactly zero."""

    @property
    def is_trained(self) -> bool:
        """Whether any step has changed the LoRA."""
        return self.skipped + self.zero_gradients < self.step


@dataclass(frozen=True)
class Best:
    """The lowest validation loss of a run."""

    step: int
    validation_loss: float
    pictures: str
    """Which pictures it was measured on, by a fingerprint."""


@dataclass(frozen=True)
class BestScore:
    """The highest score of a run."""

    step: int
    score: float
    scored_with: str
    """What measured, and of which samples and pictures, by a fingerprint."""


@dataclass(frozen=True)
class Waiting:
    """How long a run has waited for a better LoRA, by what --keep_best watches."""

    rounds: int = 0
    """Validation rounds in a row that were not better than the best before them."""
    step: int = 0
    """Of the last round that was counted."""


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A checkpoint that may be trained on."""

    folder: Path
    files: dict[str, bytes]
    progress: Progress
    loss_scale: dict[str, float] | None
    """With fp16 only."""
    config: dict[str, Any]
    """Flat, with what an older version did not know at its default."""
    fingerprints: dict[str, str]
    world_size: int
    best: Best | None
    """As it was before the validation round of the checkpoint's own step; its LoRA is in `files`, if it was kept."""
    knows_best: bool
    """False for a checkpoint of an older version."""
    best_score: BestScore | None = None
    """As `best`, by the score of the samples."""
    waiting: Waiting = Waiting()
    """At the time of saving; 0 rounds for a checkpoint of an older version."""
    mindspore: str | None = None
    """The version under which it was written."""


def _mindspore(versions: Any) -> str | None:
    found = versions.get("mindspore") if isinstance(versions, dict) else None
    return found if isinstance(found, str) else None


def read(folder: Path) -> SavedState:
    """A checkpoint with all it says; a DamagedCheckpoint names the file that must not be trained on."""
    found = checkpoint.load(folder)
    if missing := [name for name in (LORA_FILE, OPTIMIZER, STATE) if name not in found.files]:
        raise DamagedCheckpoint([f"{folder / name}: is missing" for name in missing])
    for name in (LORA_FILE, OPTIMIZER, *(name for name in (EMA_LORA,) if name in found.files)):
        if problem := _tensor_problem(found.files[name]):
            raise DamagedCheckpoint(f"{folder / name}: {problem}")
    values = _read_json(folder / STATE, found.files[STATE])
    if problem := _state_problem(values, found.step):
        raise DamagedCheckpoint(f"{folder / STATE}: {problem}")
    if values["config"].get("ema_decay") is not None and EMA_LORA not in found.files:
        raise DamagedCheckpoint(f"{folder / EMA_LORA}: is missing")
    best = Best(**values["best"]) if values.get("best") else None
    best_score = BestScore(**values["best_score"]) if values.get("best_score") else None
    if BEST_LORA in found.files and (problem := _best_problem(folder / BEST_LORA, best, best_score)):
        raise DamagedCheckpoint(f"{folder / BEST_LORA}: {problem}")
    return SavedState(
        folder=folder,
        files=found.files,
        progress=Progress(**{field.name: values.get(field.name, field.default) for field in fields(Progress)}),
        loss_scale=values["loss_scale"],
        config=with_defaults(values["config"]),
        fingerprints=values["fingerprints"],
        world_size=values["world_size"],
        best=best,
        knows_best="best" in values,
        best_score=best_score,
        waiting=Waiting(**values["waiting"]) if values.get("waiting") else Waiting(),
        mindspore=_mindspore(values.get("versions")),
    )


def lora_steps(path: Path) -> int | None:
    """How many steps are behind a LoRA file of this program; None if it does not say so."""
    try:
        return int(open_weights(path).metadata["steps"])
    except (UserError, KeyError, ValueError):
        return None


# --- what makes sense --------------------------------------------------------------------------------------------


def _read_json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedCheckpoint(f"{path}: is not JSON") from None
    if not isinstance(values, dict):
        raise DamagedCheckpoint(f"{path}: holds no JSON object")
    return values


def _state_problem(values: Mapping[str, Any], step: int) -> str | None:
    rules = {
        "step": lambda value: _is_count(value) and value == step,
        "skipped": lambda value: _is_count(value) and value <= step,
        "skipped_in_row": lambda value: _is_count(value) and value <= values["skipped"],
        "zero_gradients": lambda value: "zero_gradients" not in values or (_is_count(value) and value <= step),
        "world_size": lambda value: _is_count(value) and 1 <= value <= MOST_DEVICES,
        "loss_scale": _is_loss_scale,
        "config": _is_config,
        "fingerprints": _are_texts,
        "best": _is_best,
        "best_score": _is_best_score,
        "waiting": _is_waiting,
    }
    for name, holds in rules.items():
        if name not in values and name not in ("zero_gradients", "best", "best_score", "waiting"):
            return f"{name} is missing"
        if not holds(values.get(name)):
            return f"{name} has a value that no run writes"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_loss_scale(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() != {"value", "counter"}:
        return False
    return _is_number(value["value"]) and 0 < value["value"] < 2.0**127 and _is_count(value["counter"])


def _is_config(value: Any) -> bool:
    if not isinstance(value, dict) or not _are_concepts(value.get("concepts", [])):
        return False
    if not all(_is_setting(item) for name, item in value.items() if name != "concepts"):
        return False
    # settings that are computed with; the others are only compared
    numbers = [value[name] for name in GLOBAL_BATCH if name in value]
    numbers += [value[name] for name in LENGTH if value.get(name) is not None]
    return all(_is_count(number) and number >= 1 for number in numbers)


def _are_concepts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, dict) and entry.keys() <= CONCEPT_KEYS.keys() and all(map(_is_setting, entry.values()))
        for entry in value
    )


def _is_setting(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, str | int | float) for item in items)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_best(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() == {field.name for field in fields(Best)}
        and _is_count(value["step"])
        and _is_number(value["validation_loss"])
        and isinstance(value["pictures"], str)
    )


def _is_best_score(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() == {field.name for field in fields(BestScore)}
        and _is_count(value["step"])
        and _is_number(value["score"])
        and isinstance(value["scored_with"], str)
    )


def _is_waiting(value: Any) -> bool:
    if value is None:
        return True
    names = {field.name for field in fields(Waiting)}
    return isinstance(value, dict) and value.keys() == names and all(map(_is_count, value.values()))


def _tensor_problem(data: bytes) -> str | None:
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError):
        return "is not a safetensors file with float32 values"
    for name, value in tensors.items():
        if value.dtype != np.float32:
            return f"{name} is of type {value.dtype}, not float32"
        if not np.isfinite(value).all():
            return f"{name} holds values that are not finite"
        if name in NOT_NEGATIVE and (value < 0).any():
            return f"{name} holds values below zero"
    return None


def _best_problem(path: Path, *bests: Best | BestScore | None) -> str | None:
    """It is kept for the one or the other."""
    steps = sorted({best.step for best in bests if best is not None})
    if not steps:
        return f"{STATE} says nothing about it"
    try:
        file = open_weights(path)
    except UserError as error:
        return "; ".join(error.problems)
    if file.metadata.get("steps") not in map(str, steps):
        return f"is not the LoRA of step {' or '.join(map(str, steps))}, which {STATE} names"
    finite = all(np.isfinite(file.read(name).astype(np.float32)).all() for name in file.entries)
    return None if finite else "holds values that are not finite"
