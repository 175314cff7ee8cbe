"""A LoRA file of any of the usual formats, read: its layers by name, and what else is in it.

The file may be anybody's. One whose layers cannot be made out is rejected. One that can be described but not used (NaN,
settings that contradict the weights) keeps its problems; whoever uses the layers asks `only_flux` for them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flux_db.errors import UserError
from flux_db.files import read_text
from flux_db.lora import layer_names, peft_settings
from flux_db.lora.peft_settings import Settings
from flux_db.output_folder import LORA_FILE
from flux_db.weight_file import FLOATS, WeightFile, open_weights

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

# How the names of text encoders' layers begin, in all formats. Those of CLIP are known (layer_names), T5's are not.
TEXT_ENCODERS = ("lora_te", "text_encoder")

_MATRIX = re.compile(r"(.+?)\.(lora_A|lora_down|lora\.down|lora_B|lora_up|lora\.up)(?:\.default)?\.weight")
_DOWN = ("lora_A", "lora_down", "lora.down")
# A LoRA of rank 512 on every layer of FLUX.1 has 11 GB.
_SIZE_LIMIT = 16 * 2**30

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
    """Layers of FLUX.1's transformer, by diffusers' or by the fused name; and of CLIP, which begin `text_encoder.`"""
    others: dict[str, Layer]
    """Layers of another network, by the file's own name."""
    unread: tuple[str, ...]
    """Tensors that belong to no plain LoRA layer."""
    metadata: dict[str, str]
    problems: tuple[str, ...] = ()
    """Why the layers must not be used; each names its layer."""

    @property
    def is_fused(self) -> bool:
        if not self.transformer_layers:
            return self.format in ("kohya", "comfyui")
        return any(layer_names.parts_of(name) for name in self.transformer_layers)

    @property
    def transformer_layers(self) -> dict[str, Layer]:
        return {name: layer for name, layer in self.layers.items() if not layer_names.is_text(name)}

    @property
    def text_layers(self) -> dict[str, Layer]:
        """Of CLIP's text model."""
        return {name: layer for name, layer in self.layers.items() if layer_names.is_text(name)}

    def without_text_encoders(self) -> LoraFile:
        """Without layers of text encoders that are not CLIP's, or that it does not have."""
        others = {name: layer for name, layer in self.others.items() if not name.startswith(TEXT_ENCODERS)}
        return dataclasses.replace(self, others=others)

    def only_flux(self) -> LoraFile:
        """The file itself, if all it holds can be used with FLUX.1's transformer and CLIP; otherwise a UserError."""
        if not self.layers:
            parts = _some(self.others or self.unread)
            raise UserError(f"{self.path}: is not a LoRA for FLUX.1 that can be read; it holds {parts}")
        if self.problems:
            raise UserError(f"{self.path}: {_some(self.problems, '; ')}")
        strange = [*self.others, *self.unread]
        if strange:
            raise UserError(
                f"{self.path}: {len(strange)} of its parts are no plain LoRA of FLUX.1's transformer, and would be "
                f"lost: {_some(strange)}"
            )
        if self.is_fused and any(layer_names.fused_of(name) for name in self.transformer_layers):
            raise UserError(f"{self.path}: mixes fused layers with single ones: {_some(self.layers)}")
        return self


def locate(path: Path | str) -> Path:
    """The LoRA file that a path means: the file itself, or the one in the folder."""
    path = Path(path)
    if not os.path.lexists(path):
        raise UserError(f"{path}: no such file; give a LoRA file, or a folder with {LORA_FILE}")
    if not os.path.isdir(path):
        return path
    for name in (LORA_FILE, PEFT_FILE_NAME):
        if os.path.lexists(path / name):
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
    if max(entry.end for entry in file.entries.values()) > _SIZE_LIMIT:
        raise UserError(f"{file.path}: has more than {_SIZE_LIMIT / 2**30:.0f} GiB, too much for a LoRA")
    matrices, alphas, unread = _sort(file)
    settings, text_settings = _settings(file)
    layers: dict[str, Layer] = {}
    others: dict[str, Layer] = {}
    modules: dict[str, str] = {}
    problems: list[str] = []
    formats, text_formats = set(), set()
    for module, (down, up) in matrices.items():
        prefix, name = _name_of(module)
        is_fused, is_part = layer_names.parts_of(name) is not None, layer_names.fused_of(name) is not None
        # peft's settings are about diffusers' layers of one network
        is_text, own = layer_names.is_text(name), name.removeprefix(layer_names.TEXT_ENCODER)
        about = Settings() if is_fused or module.startswith(TEXT_ENCODERS) else settings
        about = text_settings if is_text else about
        layer = _layer(file, down, up, alphas.pop(module, None), about, own)
        problems += [f"{module} {problem}" for problem in _problems(layer, about, own)]
        if not (is_fused or is_part):
            others[module] = layer
            continue
        if len(file.entries[down].shape) != 2 or len(file.entries[up].shape) != 2:
            raise UserError(f"{file.path}: {module}: its matrices have more than two dimensions")
        if name in layers:
            raise UserError(f"{file.path}: the layer {name} is there twice, as {modules[name]} and as {module}")
        layers[name], modules[name] = layer, module
        if is_text:
            text_formats.add(layer_names.TEXT_PREFIXES[prefix])
        else:
            formats.add(PREFIXES[prefix])
    unread += [*alphas.values()]
    format_ = _format(formats or text_formats, others)
    return LoraFile(file.path, format_, layers, others, tuple(sorted(unread)), file.metadata, tuple(problems))


def _format(formats: set[str], others: Mapping[str, Layer]) -> str:
    if len(formats) == 1:
        return next(iter(formats))
    return "mixed" if formats else "not FLUX.1" if others else "not plain"


def _sort(file: WeightFile) -> tuple[dict[str, tuple[str, str]], dict[str, str], list[str]]:
    """(module -> keys of its two matrices, module -> key of its alpha, the other keys)"""
    downs, ups, alphas, unread = {}, {}, {}, []
    for key in file.entries:
        if match := _MATRIX.fullmatch(key):
            side = downs if match[2] in _DOWN else ups
            if match[1] in side:
                raise UserError(f"{file.path}: the layer {match[1]} is there twice, as {side[match[1]]} and as {key}")
            side[match[1]] = key
        elif key.endswith(".alpha"):
            alphas[key.removesuffix(".alpha")] = key
        else:
            unread.append(key)
    unread += [key for module, key in (*downs.items(), *ups.items()) if not (module in downs and module in ups)]
    return {module: (key, ups[module]) for module, key in downs.items() if module in ups}, alphas, unread


def _name_of(module: str) -> tuple[str, str]:
    """(prefix, layer's name with dots)"""
    if found := layer_names.text_name(module):
        return found
    prefix = next(prefix for prefix in PREFIXES if module.startswith(prefix))
    name = module.removeprefix(prefix)
    return prefix, layer_names.with_dots(name) if prefix.endswith("_") else name


def _layer(file: WeightFile, down: str, up: str, alpha: str | None, settings: Settings, name: str) -> Layer:
    low, high = _matrix(file, down), _matrix(file, up)
    rank = low.shape[0]
    if high.shape[1] != rank:
        raise UserError(f"{file.path}: {down} and {up} do not fit: {low.shape}, {high.shape}")
    if alpha is None:
        return Layer(low, high, settings.alpha_of(name, rank))
    entry = file.entries[alpha]
    if entry.shape not in ((), (1,)) or entry.dtype == "BOOL":
        raise UserError(f"{file.path}: {alpha}: is {entry.dtype} of shape {entry.shape}, not one number")
    return Layer(low, high, float(file.read(alpha).reshape(())), entry.dtype)


def _matrix(file: WeightFile, key: str) -> np.ndarray:
    entry = file.entries[key]
    if entry.dtype not in FLOATS or len(entry.shape) < 2:
        raise UserError(f"{file.path}: {key}: is {entry.dtype} of shape {entry.shape}, not a matrix of floats")
    # convolutions of other networks: [r, in, k, k] -> [r, in*k*k]
    return file.read(key).reshape(entry.shape[0], -1)


def _problems(layer: Layer, settings: Settings, name: str) -> list[str]:
    if not (np.isfinite(layer.down).all() and np.isfinite(layer.up).all()):
        return ["holds values that are NOT FINITE"]
    if not peft_settings.usable_alpha(layer.alpha):
        return [f"has an alpha of {layer.alpha:g}"]
    contradiction = settings.contradiction(name, layer.rank, layer.alpha)
    return [contradiction] if contradiction else []


def _settings(file: WeightFile) -> tuple[Settings, Settings]:
    """peft's settings of transformer and CLIP: in diffusers' metadata, or in the file that peft writes beside its
    weights."""
    try:
        if ADAPTER_METADATA in file.metadata:
            text = file.metadata[ADAPTER_METADATA]
            return peft_settings.parse(text, "transformer."), peft_settings.parse(text, layer_names.TEXT_ENCODER)
        if file.path.name == PEFT_FILE_NAME:
            return peft_settings.parse(read_text(file.path.parent / PEFT_CONFIG_NAME)), Settings()
    except FileNotFoundError:
        return Settings(), Settings()
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise UserError(f"{file.path}: the settings that came with the LoRA cannot be read: {reason}") from problem
    return Settings(), Settings()


def _some(names: Any, separator: str = ", ") -> str:
    names = sorted(names)
    return separator.join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
