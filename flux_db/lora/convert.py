"""LoRA files from one format to another and back, without loss.

A fused layer (kohya, ComfyUI) that replaces three LoRAs of rank r is one LoRA of rank 3r: the down matrices one
below the other, the up matrices on the diagonal. What a format cannot hold (ranks and alphas of the parts) is noted in
the metadata, so that the way back gives the same tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from flux_db.console import say
from flux_db.errors import UserError
from flux_db.lora import layer_names, peft_settings
from flux_db.lora.lora_file import ADAPTER_METADATA, Layer, LoraFile
from flux_db.plain_json import parse_json
from flux_db.weight_file import DTYPES, FLOATS

Format = Literal["diffusers", "kohya", "comfyui"]
FUSED: tuple[Format, ...] = ("kohya", "comfyui")

# Metadata: how the file looked in the other world. {"layers": {name: [rank, alpha, type of alpha]}, "metadata": {}}
NOTE_OF_PARTS, NOTE_OF_FUSED = "flux_db_parts", "flux_db_fused"

Layers = dict[str, Layer]
Noted = Mapping[str, Sequence]


@dataclass(frozen=True)
class Note:
    """How a file looked in the other world. It holds for the file as it was converted, not for one edited since."""

    layers: Noted = field(default_factory=dict)
    adapter: str | None = None
    """diffusers' metadata of the layers."""


def convert(file: LoraFile, format_: Format) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(tensors, metadata) of the file in another format."""
    layers, metadata = dict(file.only_flux().layers), dict(file.metadata)
    adapter = metadata.pop(ADAPTER_METADATA, None)
    if file.is_fused != (format_ in FUSED):
        mine, theirs = (NOTE_OF_FUSED, NOTE_OF_PARTS) if file.is_fused else (NOTE_OF_PARTS, NOTE_OF_FUSED)
        note = _read_note(metadata.pop(theirs, None))
        converted = (split if file.is_fused else fuse)(layers, note.layers)
        if _describe(converted) == note.layers:  # on its way back, and as it was: nothing new to remember
            adapter = note.adapter
        else:
            hidden = {} if adapter is None else {ADAPTER_METADATA: adapter}
            metadata[mine] = json.dumps({"layers": _describe(layers), "metadata": hidden}, sort_keys=True)
            adapter = None
        layers = converted
    if adapter is not None and format_ not in FUSED and _fits(adapter, layers):
        metadata[ADAPTER_METADATA] = adapter
    tensors = name_tensors(layers, format_, alphas=ADAPTER_METADATA not in metadata)
    return tensors, {"format": "pt", **metadata}


def parts(file: LoraFile) -> Layers:
    """The layers of transformer and CLIP by diffusers' names, whatever the file's format. T5 is left out."""
    kept = file.without_text_encoders()
    if left_out := len(file.others) - len(kept.others):
        used = "those of the transformer and of CLIP"
        say(f"warning: {file.path}: {left_out} layers of text encoders are not used, only {used}")
    layers = kept.only_flux().layers
    return split(layers, _read_note(file.metadata.get(NOTE_OF_PARTS)).layers) if file.is_fused else dict(layers)


def name_tensors(layers: Layers, format_: Format, *, alphas: bool = True) -> dict[str, np.ndarray]:
    """The tensors under a format's names. If one layer needs its alpha, all have theirs: diffusers wants that."""
    tensors = {}
    alphas = alphas and any(layer.alpha_dtype or layer.alpha != layer.rank for layer in layers.values())
    for name, layer in layers.items():
        module = _module(name, format_)
        down, up = ("lora_down", "lora_up") if format_ in FUSED else ("lora_A", "lora_B")
        tensors[f"{module}.{down}.weight"] = np.ascontiguousarray(layer.down)
        tensors[f"{module}.{up}.weight"] = np.ascontiguousarray(layer.up)
        if alphas:
            tensors[f"{module}.alpha"] = _alpha_tensor(layer, format_)
    return tensors


def _module(name: str, format_: Format) -> str:
    """A layer as the format calls it."""
    if layer_names.is_text(name):
        own = name.removeprefix(layer_names.TEXT_ENCODER)
        return f"lora_te1_{own.replace('.', '_')}" if format_ in FUSED else name
    return {
        "diffusers": f"transformer.{name}",
        "kohya": f"lora_unet_{name.replace('.', '_')}",
        "comfyui": f"diffusion_model.{name}",
    }[format_]


def _alpha_tensor(layer: Layer, format_: Format) -> np.ndarray:
    """In its own type, unless that cannot hold the number, or is none of the floats that diffusers wants."""
    if layer.alpha_dtype in FLOATS or (layer.alpha_dtype and format_ in FUSED):
        with np.errstate(all="ignore"):
            value = np.array(layer.alpha).astype(DTYPES[layer.alpha_dtype])
        if math.isclose(float(value), layer.alpha, rel_tol=1e-6):
            return value
    return np.array(layer.alpha, np.float32)


def _fits(adapter: str, layers: Layers) -> bool:
    """Whether diffusers reads the layers rightly by these settings; it rejects other ranks, and alphas given twice."""
    text = {n.removeprefix(layer_names.TEXT_ENCODER): layer for n, layer in layers.items() if layer_names.is_text(n)}
    rest = {name: layer for name, layer in layers.items() if not layer_names.is_text(name)}
    found = [("transformer.", rest), (layer_names.TEXT_ENCODER, text)]
    return all(_fits_part(adapter, prefix, part) for prefix, part in found if part)


def _fits_part(adapter: str, prefix: str, layers: Layers) -> bool:
    try:
        settings = peft_settings.parse(adapter, prefix)
    except ValueError:
        return False
    return (
        settings.complete
        and settings.targets(layers)
        and not any(
            layer.alpha_dtype or settings.contradiction(name, layer.rank, layer.alpha) for name, layer in layers.items()
        )
    )


# --- parts to fused layers ---------------------------------------------------------------------------------------


def fuse(layers: Layers, note: Noted) -> Layers:
    """Fused layers. Parts that share one down matrix stay a LoRA of their rank; others add up their ranks."""
    groups: dict[str, Layers] = {}
    for name, layer in layers.items():
        groups.setdefault(layer_names.fused_of(name), {})[name] = layer
    return {fused: _fuse_group(fused, group, note.get(fused)) for fused, group in groups.items()}


def _fuse_group(fused: str, group: Layers, noted: Sequence | None) -> Layer:
    names = layer_names.parts_of(fused)
    if len({layer.scale for layer in group.values()}) > 1:
        raise UserError(
            f"{', '.join(sorted(group))}: have different strengths (alpha / rank), but are one layer, {fused}, in this "
            "format; it cannot hold them"
        )
    ordered = [group[name] for name in names if name in group]
    first = ordered[0]
    if len({(layer.down.shape[1], layer.down.dtype, layer.up.dtype) for layer in ordered}) > 1:
        raise UserError(
            f"{', '.join(sorted(group))}: have different inputs or types, but are one layer, {fused}, in this format; "
            "it cannot hold them"
        )
    shared = len(ordered) == len(names) and all(_same(layer.down, first.down) for layer in ordered)
    if shared:
        down, up = first.down, np.concatenate([layer.up for layer in ordered])
    else:
        down = np.concatenate([layer.down for layer in ordered])
        up = np.zeros((sum(_heights(names, group)), down.shape[0]), first.up.dtype)
        row = column = 0
        for name, height in zip(names, _heights(names, group), strict=True):
            if name in group:
                part = group[name]
                up[row : row + height, column : column + part.rank] = part.up
                column += part.rank
            row += height
    if fused == layer_names.SWAPPED:
        up = _swap(fused, up)
    return Layer(down, up, *_alpha(first.scale, down.shape[0], noted, first.alpha_dtype or "F32"))


def _heights(names: Sequence[str], group: Layers) -> list[int]:
    """Outputs of each part, also of those without a LoRA: q, k and v have as many as inputs, proj_mlp four times."""
    width = next(iter(group.values())).down.shape[1]
    return [group[n].up.shape[0] if n in group else width * (4 if n.endswith("proj_mlp") else 1) for n in names]


# --- fused layers to parts ---------------------------------------------------------------------------------------


def split(layers: Layers, note: Noted) -> Layers:
    """diffusers' layers. Of a truly fused LoRA every part gets the same down matrix and its rows of the up matrix."""
    result: Layers = {}
    for fused, layer in layers.items():
        result |= _split_layer(fused, layer, note)
    return result


def _split_layer(fused: str, layer: Layer, note: Noted) -> Layers:
    names = layer_names.parts_of(fused)
    rows = _rows(fused, layer, names)
    noted = {name: note[name] for name in names if name in note}
    for ranks in _possible_ranks(layer, rows, noted):
        columns = np.cumsum([0, *ranks.values()])
        blocks = {n: slice(columns[i], columns[i + 1]) for i, n in enumerate(ranks)}
        if columns[-1] == layer.rank and _is_diagonal(layer.up, rows, blocks):
            return {
                name: Layer(
                    layer.down[block],
                    layer.up[rows[name], block],
                    *_alpha(layer.scale, ranks[name], noted.get(name), layer.alpha_dtype),
                )
                for name, block in blocks.items()
            }
    up = _swap(fused, layer.up) if fused == layer_names.SWAPPED else layer.up
    return {
        name: Layer(layer.down, up[rows[name]], *_alpha(layer.scale, layer.rank, noted.get(name), layer.alpha_dtype))
        for name in names
    }


def _rows(fused: str, layer: Layer, names: Sequence[str]) -> dict[str, slice]:
    outputs, width = layer.up.shape[0], layer.down.shape[1]
    equal = [outputs // len(names)] * len(names)
    heights = [width, width, width, outputs - 3 * width] if len(names) == 4 else equal
    if sum(heights) != outputs or min(heights) <= 0:
        raise UserError(f"{fused}: its {outputs} outputs cannot be divided among {', '.join(names)}")
    ends = np.cumsum([0, *heights])
    return {name: slice(ends[i], ends[i + 1]) for i, name in enumerate(names)}


def _possible_ranks(layer: Layer, rows: Mapping[str, slice], noted: Noted) -> list[dict[str, int]]:
    """Ranks that the parts on a diagonal may have: as noted; the same for all, or for all that do anything."""
    ranks = {name: entry[0] for name, entry in noted.items()}
    if len(rows) == 1 or ranks == dict.fromkeys(rows, layer.rank):  # no diagonal: all share the down matrix
        return []
    active = [name for name, part in rows.items() if layer.up[part].any()]
    equal = [{name: layer.rank // len(names) for name in names} for names in (list(rows), active) if len(names) > 0]
    return [ranks, *equal] if ranks else equal


def _is_diagonal(up: np.ndarray, rows: Mapping[str, slice], blocks: Mapping[str, slice]) -> bool:
    outside = up != 0
    for name, block in blocks.items():
        outside[rows[name], block] = False
    return not outside.any()


# --- both --------------------------------------------------------------------------------------------------------


def _alpha(scale: float, rank: int, noted: Sequence | None, dtype: str | None) -> tuple[float, str | None]:
    """Alpha for the rank, and its type; the noted one to the last bit, if it is the same strength."""
    alpha = rank if scale == 1 else scale * rank
    if noted and math.isclose(noted[1], alpha, rel_tol=1e-5):
        return float(noted[1]), noted[2]
    return float(alpha), dtype


def _swap(fused: str, up: np.ndarray) -> np.ndarray:
    if up.shape[0] % 2:
        raise UserError(f"{fused}: its {up.shape[0]} outputs cannot be divided into scale and shift")
    return np.concatenate(np.split(up, 2)[::-1])


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _describe(layers: Layers) -> dict[str, list]:
    return {name: [layer.rank, layer.alpha, layer.alpha_dtype] for name, layer in layers.items()}


def _read_note(text: str | None) -> Note:
    """An entry of that name that is somebody else's is no note."""
    try:
        content = parse_json(text or "{}")
    except ValueError:
        return Note()
    match content:
        case {"layers": dict(layers), "metadata": dict(hidden)} if all(map(_is_noted, layers.values())):
            adapter = hidden.get(ADAPTER_METADATA)
            return Note(layers, adapter if isinstance(adapter, str) else None)
    return Note()


def _is_noted(entry: Any) -> bool:
    match entry:
        case [int(rank), int() | float() as alpha, None | str() as dtype]:
            known = dtype is None or (dtype in DTYPES and dtype != "BOOL")
            return known and 1 <= rank <= peft_settings.RANK_LIMIT and peft_settings.usable_alpha(alpha)
    return False
