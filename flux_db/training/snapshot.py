"""A run's whole state as checkpoint files, and back: LoRA weights, optimizer, loss scale, counters, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from safetensors.numpy import load, save

from flux_db.errors import UserError
from flux_db.lora import trained_file
from flux_db.model import adapter
from flux_db.output_folder import EMA_LORA, LORA_FILE
from flux_db.run.checkpoint import DamagedCheckpoint
from flux_db.run.saved_state import OPTIMIZER, STATE, Progress, SavedState
from flux_db.settings.derived import text_lora
from flux_db.settings.lora_layers import needs_alphas
from flux_db.settings.schema import Config
from flux_db.training.build import Training


class WeightsNotFinite(Exception):
    """Never to be saved."""


def to_files(
    training: Training, config: Config, progress: Progress, about: Mapping[str, Any], facts: trained_file.Facts
) -> dict[str, bytes]:
    """Everything that an exact resume needs, by file name."""
    weights = _weights(training, config)
    averages = _weights(training, config, averaged=True) if training.optimizer.has_ema else {}
    for name, value in (*weights.items(), *averages.items()):
        if not np.isfinite(value).all():
            raise WeightsNotFinite(f"{name} holds values that are not finite")
    moments = {name: p.asnumpy().copy() for name, p in training.optimizer.state().items()}
    state = {**asdict(progress), "loss_scale": _scale(training), **about}
    files = {
        LORA_FILE: trained_file.lora_file(weights, config, facts),
        OPTIMIZER: save(moments),
        STATE: (json.dumps(state, indent=2, sort_keys=True) + "\n").encode(),
    }
    if averages:
        files[EMA_LORA] = trained_file.lora_file(averages, config, facts, averaged=True)
    return files


def lora_file(training: Training, config: Config, facts: trained_file.Facts, *, averaged: bool = False) -> bytes:
    """The LoRA as it is now, or the average of its weights, as the file for others."""
    precision = "no" if config.output.upcast_before_saving else config.runtime.mixed_precision
    weights = _weights(training, config, averaged=averaged)
    return trained_file.lora_file(weights, config, facts, precision, averaged=averaged)


def contents(training: Training) -> dict[str, bytes]:
    """What must be the same on every rank, by name."""
    own = (training.optimizer.weights, *training.optimizer.parameters)
    weights = b"".join(p.asnumpy().tobytes() for p in own)
    moments = b"".join(p.asnumpy().tobytes() for p in training.optimizer.state().values())
    found = {"LoRA weights": weights, "optimizer state": moments, "loss scale": repr(_scale(training)).encode()}
    if training.optimizer.has_ema:
        found["average of the LoRA weights"] = training.optimizer.ema.asnumpy().tobytes()
    return found


def restore(saved: SavedState, training: Training, config: Config) -> None:
    """Put a checkpoint's state in place, by `assign`: a graph that is compiled already does not see set_data.

    With another optimizer than the checkpoint's only the weights are taken.
    """
    average = None
    if training.optimizer.has_ema and EMA_LORA in saved.files:
        average = _loaded(saved, EMA_LORA, training)
    # the weights after the average: both are put into the layers, which train on with the last
    training.optimizer.take_over(_loaded(saved, LORA_FILE, training), average)
    if saved.config["optimizer"] == config.optim.optimizer:
        _restore_moments(saved, training)
    else:
        training.optimizer.start_here()
    if training.scaler is not None and saved.loss_scale is not None:
        ops.assign(training.scaler.scale_value, Tensor(saved.loss_scale["value"], ms.float32))
        ops.assign(training.scaler.counter, Tensor(saved.loss_scale["counter"], ms.int32))


def _loaded(saved: SavedState, name: str, training: Training) -> list[np.ndarray]:
    try:
        return _load(training, load(saved.files[name]))
    except UserError as error:
        raise DamagedCheckpoint([f"{saved.folder / name}: {problem}" for problem in error.problems]) from None


def _weights(training: Training, config: Config, *, averaged: bool = False) -> dict[str, np.ndarray]:
    values = training.optimizer.values(averaged=averaged)
    if training.text_encoder is None:
        return adapter.to_state_dict(training.transformer, config.lora, values)
    first = len(adapter.parameters(training.transformer))
    return {
        **adapter.to_state_dict(training.transformer, config.lora, values[:first]),
        **adapter.to_state_dict(
            training.text_encoder,
            text_lora(config),
            values[first:],
            adapter.TEXT_ENCODER,
            alphas=needs_alphas(config.lora),
        ),
    }


def _load(training: Training, tensors: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Put the weights of all parts in place; returns them in the optimizer's order."""
    if training.text_encoder is None:
        return adapter.load_state_dict(training.transformer, tensors)
    own = {name: value for name, value in tensors.items() if name.startswith(f"{adapter.TEXT_ENCODER}.")}
    rest = {name: value for name, value in tensors.items() if name not in own}
    return [
        *adapter.load_state_dict(training.transformer, rest),
        *adapter.load_state_dict(training.text_encoder, own, adapter.TEXT_ENCODER),
    ]


def _restore_moments(saved: SavedState, training: Training) -> None:
    path, moments, wanted = saved.folder / OPTIMIZER, load(saved.files[OPTIMIZER]), training.optimizer.state()
    if different := sorted(moments.keys() ^ wanted.keys()):
        raise DamagedCheckpoint(f"{path}: is not the state of {saved.config['optimizer']}: {', '.join(different[:3])}")
    for name, parameter in wanted.items():
        if moments[name].shape != tuple(parameter.shape):
            raise DamagedCheckpoint(f"{path}: {name} is {moments[name].shape}, not {tuple(parameter.shape)}")
        ops.assign(parameter, Tensor(moments[name]))


def _scale(training: Training) -> dict[str, float] | None:
    if training.scaler is None:
        return None
    return {
        "value": float(training.scaler.scale_value.asnumpy()),
        "counter": int(training.scaler.counter.asnumpy()),
    }
