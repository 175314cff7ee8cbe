"""A LoRA file of any of the usual formats, read: its layers by name, and what else is in it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flux_db import lora_names
from flux_db.errors import UserError
from flux_db.weight_file import WeightFile, open_weights

FILE_NAME = "pytorch_lora_weights.safetensors"
PEFT_FILE_NAME, PEFT_CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_METADATA = "lora_adapter_metadata"

# How the names of a format's layers begin. What begins with none of them is read without a prefix.
PREFIXES = {
    "transformer.": "diffusers",
    "base_model.model.": "peft",
    "lora_unet_": "kohya",
    "diffusion_model.": "comfyui",
    "lora_transformer_": "onetrainer",
    "": "without prefix",
}

# How the names of text encoders' layers begin, in all formats.
TEXT_ENCODERS = ("lora_te", "text_encoder")

_MATRIX = re.compile(r"(.+?)\.(lora_A|lora_down|lora\.down|lora_B|lora_up|lora\.up)(?:\.default)?\.weight")
_DOWN = ("lora_A", "lora_down", "lora.down")
_LIKE_LORA = re.compile(r"lora|hada_w|lokr_w|dora_scale|oft_blocks|\.diff")


@dataclass(frozen=True)
class Layer:
    """One layer's LoRA: it adds up @ down * alpha / rank to the layer's weight."""

    down: np.ndarray
    """[rank, inputs]"""
    up: np.ndarray
    """[outputs, rank]"""
    alpha: float
    alpha_dtype: str | None = None
    """Type of the alpha tensor; None if the file has none for this layer."""

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def delta(self) -> np.ndarray:
        """What it adds to the weight, float32."""
        return np.float32(self.scale) * (self.up.astype(np.float32) @ self.down.astype(np.float32))


@dataclass(frozen=True)
class LoraFile:
    path: Path
    format: str
    """One of PREFIXES' values, or mixed, not FLUX.1, not plain."""
    layers: dict[str, Layer]
    """Layers of FLUX.1's transformer, by diffusers' or by the fused name."""
    others: dict[str, Layer]
    """Layers of another network, by the file's own name."""
    unread: tuple[str, ...]
    """Tensors that belong to no plain LoRA layer."""
    metadata: dict[str, str]

    @property
    def is_fused(self) -> bool:
        return any(lora_names.parts_of(name) for name in self.layers)

    def without_text_encoders(self) -> LoraFile:
        """Without the layers of text encoders, which kohya's files often have."""
        others = {name: layer for name, layer in self.others.items() if not name.startswith(TEXT_ENCODERS)}
        return dataclasses.replace(self, others=others)

    def only_flux(self) -> LoraFile:
        """The file itself, if all it holds can be used with FLUX.1's transformer; otherwise a UserError."""
        if not self.layers:
            parts = _some(self.others or self.unread)
            raise UserError(f"{self.path}: is not a LoRA for FLUX.1 that can be read; it holds {parts}")
        strange = [*self.others, *self.unread]
        if strange:
            raise UserError(
                f"{self.path}: {len(strange)} of its parts are no plain LoRA of FLUX.1's transformer, and would be "
                f"lost: {_some(strange)}"
            )
        if self.is_fused and any(lora_names.fused_of(name) for name in self.layers):
            raise UserError(f"{self.path}: mixes fused layers with single ones: {_some(self.layers)}")
        return self


def locate(path: Path | str) -> Path:
    """The LoRA file that a path means: the file itself, or the one in the folder."""
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such file; give a LoRA file, or a folder with {FILE_NAME}")
    for name in (FILE_NAME, PEFT_FILE_NAME):
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    what = f"several safetensors files ({_some([f.name for f in found])})" if found else "no safetensors file"
    raise UserError(f"{path}: the folder has {what}; name the LoRA file")


def read(path: Path | str) -> LoraFile:
    """Read a LoRA file; a UserError if it is none."""
    file = open_weights(locate(path))
    if not any(_LIKE_LORA.search(name) for name in file.entries):
        few = _some(file.entries) if file.entries else "nothing"
        raise UserError(f"{file.path}: is not a LoRA; it holds {len(file.entries)} tensors: {few}")
    matrices, alphas, unread = _sort(file)
    told = _told_alphas(file)
    layers: dict[str, Layer] = {}
    others: dict[str, Layer] = {}
    formats = set()
    for module, (down, up) in matrices.items():
        prefix, name = _name_of(module)
        is_flux = bool(lora_names.parts_of(name) or lora_names.fused_of(name))
        layer = _layer(file, down, up, alphas.pop(module, None), told, name)
        if layer.up.shape[1] != layer.rank:
            raise UserError(f"{file.path}: {module}: its two matrices do not fit: {layer.down.shape}, {layer.up.shape}")
        if is_flux:
            formats.add(PREFIXES[prefix])
            layers[name] = layer
        else:
            others[module] = layer
    unread += [*alphas.values()]
    return LoraFile(file.path, _format(formats, others), layers, others, tuple(sorted(unread)), file.metadata)


def _format(formats: set[str], others: Mapping[str, Layer]) -> str:
    if len(formats) == 1:
        return next(iter(formats))
    return "mixed" if formats else "not FLUX.1" if others else "not plain"


def _sort(file: WeightFile) -> tuple[dict[str, tuple[str, str]], dict[str, str], list[str]]:
    """(module -> keys of its two matrices, module -> key of its alpha, the other keys)"""
    downs, ups, alphas, unread = {}, {}, {}, []
    for key in file.entries:
        if match := _MATRIX.fullmatch(key):
            (downs if match[2] in _DOWN else ups)[match[1]] = key
        elif key.endswith(".alpha"):
            alphas[key.removesuffix(".alpha")] = key
        else:
            unread.append(key)
    unread += [key for module, key in (*downs.items(), *ups.items()) if not (module in downs and module in ups)]
    return {module: (key, ups[module]) for module, key in downs.items() if module in ups}, alphas, unread


def _name_of(module: str) -> tuple[str, str]:
    """(prefix, layer's name with dots)"""
    prefix = next(prefix for prefix in PREFIXES if module.startswith(prefix))
    name = module.removeprefix(prefix)
    return prefix, lora_names.with_dots(name) if prefix.endswith("_") else name


def _layer(file: WeightFile, down: str, up: str, alpha: str | None, told: Mapping[str, Any], name: str) -> Layer:
    low, high = file.read(down), file.read(up)
    # convolutions of other networks: [r, in, k, k] -> [r, in*k*k]
    low, high = low.reshape(low.shape[0], -1), high.reshape(high.shape[0], -1)
    if alpha is not None:
        return Layer(low, high, float(file.read(alpha).reshape(-1)[0]), file.entries[alpha].dtype)
    return Layer(low, high, _told_alpha(told, name, low.shape[0]))


def _told_alphas(file: WeightFile) -> dict[str, Any]:
    """peft's settings: in diffusers' metadata, or in the file that peft writes beside its weights."""
    try:
        if ADAPTER_METADATA in file.metadata:
            told = json.loads(file.metadata[ADAPTER_METADATA])
            return {name.removeprefix("transformer."): value for name, value in told.items()}
        if file.path.name == PEFT_FILE_NAME:
            return dict(json.loads((file.path.parent / PEFT_CONFIG_NAME).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as problem:
        raise UserError(f"{file.path}: the settings that came with the LoRA cannot be read: {problem}") from problem
    return {}


def _told_alpha(told: Mapping[str, Any], name: str, rank: int) -> float:
    patterns = told.get("alpha_pattern") or {}
    value = next((v for p, v in patterns.items() if re.fullmatch(rf"(.*\.)?({p})", name)), told.get("lora_alpha", rank))
    return float(value) * (math.sqrt(rank) if told.get("use_rslora") else 1.0)


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
