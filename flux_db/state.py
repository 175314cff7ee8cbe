"""A run's whole state as checkpoint files, and back: LoRA weights, optimizer, loss scale, counters, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from safetensors.numpy import load, save

from flux_db import export, lora
from flux_db.build import Training
from flux_db.config import Config

LORA, OPTIMIZER, STATE = export.FILE_NAME, "optimizer.safetensors", "state.json"


@dataclass
class Progress:
    """How far a run is; the only thing that changes in the loop besides the weights."""

    step: int = 0
    """Optimizer steps done."""
    skipped: int = 0
    """Steps skipped for gradients that were not finite, in all."""
    skipped_in_row: int = 0


class WeightsNotFinite(Exception):
    """Never to be saved."""


def to_files(
    training: Training, config: Config, progress: Progress, about: Mapping[str, Any], facts: export.Facts
) -> dict[str, bytes]:
    """Everything that an exact resume needs, by file name."""
    weights = lora.to_state_dict(training.transformer, config.lora)
    for name, value in weights.items():
        if not np.isfinite(value).all():
            raise WeightsNotFinite(f"{name} holds values that are not finite")
    moments = {name: p.asnumpy().copy() for name, p in training.optimizer.state().items()}
    state = {**asdict(progress), "loss_scale": _scale(training), **about}
    return {
        LORA: export.lora_file(weights, config, facts),
        OPTIMIZER: save(moments),
        STATE: (json.dumps(state, indent=2, sort_keys=True) + "\n").encode(),
    }


def contents(training: Training) -> dict[str, bytes]:
    """What must be the same on every rank, by name."""
    weights = b"".join(p.asnumpy().tobytes() for p in lora.parameters(training.transformer).values())
    moments = b"".join(p.asnumpy().tobytes() for p in training.optimizer.state().values())
    return {"LoRA weights": weights, "optimizer state": moments, "loss scale": repr(_scale(training)).encode()}


def from_files(files: Mapping[str, bytes], training: Training) -> Progress:
    """Restore; before the first compiled step, which would not see the new values afterwards."""
    lora.load_state_dict(training.transformer, load(files[LORA]))
    moments = load(files[OPTIMIZER])
    for name, parameter in training.optimizer.state().items():
        parameter.set_data(Tensor(moments[name]))
    state = json.loads(files[STATE])
    if training.scaler is not None and state["loss_scale"] is not None:
        training.scaler.scale_value.set_data(Tensor(state["loss_scale"]["value"], ms.float32))
        training.scaler.counter.set_data(Tensor(state["loss_scale"]["counter"], ms.int32))
    return Progress(**{name: state[name] for name in asdict(Progress())})


def _scale(training: Training) -> dict[str, float] | None:
    if training.scaler is None:
        return None
    return {
        "value": float(training.scaler.scale_value.asnumpy()),
        "counter": int(training.scaler.counter.asnumpy()),
    }


def read_about(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What a checkpoint says of the run it was made by: settings, fingerprints, world_size."""
    return json.loads(files[STATE])
