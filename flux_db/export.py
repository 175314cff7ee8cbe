"""The LoRA as a file that others load: diffusers' keys, honest metadata, no local paths."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import save

from flux_db import __version__
from flux_db.config import Config

FILE_NAME = "pytorch_lora_weights.safetensors"


def lora_file(tensors: Mapping[str, np.ndarray], config: Config, *, steps: int, precision: str = "no") -> bytes:
    """A LoRA file. With alpha != rank `tensors` hold each module's alpha, and diffusers refuses to be told twice."""
    metadata = {"format": "pt", **_about(config, steps)}
    if config.lora.alpha == config.lora.rank:
        metadata["lora_adapter_metadata"] = json.dumps(_adapter_metadata(tensors, config), sort_keys=True)
    return _in_fixed_order(save({name: _cast(value, precision) for name, value in sorted(tensors.items())}, metadata))


def _in_fixed_order(file: bytes) -> bytes:
    """The same safetensors file with a sorted header: the library writes metadata in an order of its own each time."""
    length = int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + file[8 + length :]


def _about(config: Config, steps: int) -> dict[str, str]:
    return {
        "flux_db_version": __version__,
        "base_model": config.model.pretrained_model_name_or_path.rstrip("/").rsplit("/", 1)[-1],
        "instance_prompt": config.data.instance_prompt,
        "rank": str(config.lora.rank),
        "alpha": str(config.lora.alpha),
        "resolution": str(config.data.resolution),
        "steps": str(steps),
    }


def _adapter_metadata(tensors: Mapping[str, np.ndarray], config: Config) -> dict[str, object]:
    modules = sorted({name.split(".", 1)[1].rsplit(".", 2)[0] for name in tensors})
    settings = {
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": modules,
        "rank_pattern": {},
        "alpha_pattern": {},
        "lora_bias": False,
        "use_dora": False,
    }
    return {f"transformer.{name}": value for name, value in settings.items()}


def _cast(value: np.ndarray, precision: str) -> np.ndarray:
    if precision == "no" or value.ndim == 0:
        return value
    if precision == "fp16":
        return value.astype(np.float16)
    import ml_dtypes

    return value.astype(ml_dtypes.bfloat16)
