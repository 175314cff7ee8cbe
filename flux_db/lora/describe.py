"""What a LoRA file is, in words: format, ranks, alphas, layers, strength, metadata."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sized
from pathlib import Path

import numpy as np

from flux_db.console import printable
from flux_db.lora import lora_file
from flux_db.lora.convert import NOTE_OF_FUSED, NOTE_OF_PARTS
from flux_db.lora.lora_file import ADAPTER_METADATA, Layer, LoraFile

FORMATS = {
    "diffusers": "diffusers (also read by mindone and ComfyUI)",
    "peft": "peft",
    "kohya": "kohya (q, k and v fused; read by kohya's tools, ComfyUI and diffusers)",
    "comfyui": "ComfyUI, with the names of Black Forest Labs (q, k and v fused)",
    "onetrainer": "OneTrainer",
    "without prefix": "diffusers' names without a prefix",
    "mixed": "a mixture of several formats",
    "not FLUX.1": "not for FLUX.1's transformer",
    "not plain": "no plain LoRA, but another kind that cannot be read here (LoKr, LoHa, XLabs' or the like)",
}

STRONGEST = 5
MOST_KINDS, MOST_ENTRIES = 100, 100


def norm(layer: Layer) -> float:
    """Frobenius norm of what the layer adds to its weight. [outputs, inputs] is never computed, only [rank, rank]."""
    with np.errstate(all="ignore"):
        down, up = layer.down.astype(np.float64), layer.up.astype(np.float64)
        square = float(np.sum((up.T @ up) * (down @ down.T)))
    return abs(layer.scale) * math.sqrt(max(square, 0.0)) if math.isfinite(square * layer.scale) else float("nan")


def describe(path: Path | str) -> str:
    """Several lines about the file, harmless for a terminal; a UserError if it is no LoRA."""
    file = lora_file.read(path)
    layers = {**file.layers, **file.others}
    norms = {name: norm(layer) for name, layer in layers.items()}
    text = [
        f"file      {file.path} ({_size(file.path.stat().st_size)})",
        f"format    {FORMATS[file.format]}",
    ]
    if layers:
        text += _about_layers(file, layers, norms)
    if file.unread:
        text.append(f"besides   {len(file.unread)} tensors of another kind, such as {file.unread[0]}")
    if file.problems:
        more = f" and {len(file.problems) - 1} more" if len(file.problems) > 1 else ""
        text.append(f"BROKEN    export, fuse and generate reject the file: {file.problems[0]}{more}")
    if layers and all(map(math.isfinite, norms.values())):
        text += ["", *_table(layers, norms), "", *_strongest(norms)]
    return "\n".join(map(printable, [*text, "", *_metadata(file)]))


def _about_layers(file: LoraFile, layers: dict[str, Layer], norms: dict[str, float]) -> list[str]:
    lines = [
        ("layers", _network(file)),
        ("rank", _counted(layer.rank for layer in layers.values())),
        ("alpha", _alphas(layers.values())),
        ("type", _counted(str(layer.down.dtype) for layer in layers.values())),
        ("norm", _total(norms)),
    ]
    return [f"{name:9} {value}" for name, value in lines]


def _network(file: LoraFile) -> str:
    parts = []
    if own := file.transformer_layers:
        width = min(layer.down.shape[1] for layer in own.values())
        blocks = {re.match(r"\w+\.\d+", name)[0] for name in own if re.match(r"\w+blocks\.\d+", name)}
        single = sum(name.startswith("single") for name in blocks)
        parts.append(
            f"{len(own)} of FLUX.1's transformer, in {len(blocks) - single} double and {single} single blocks; "
            f"width {width}"
        )
    if text := file.text_layers:
        parts.append(f"{len(text)} of CLIP's text model, width {min(layer.down.shape[1] for layer in text.values())}")
    if file.others:
        parts.append(f"{len(file.others)} of another network, such as {min(file.others)}")
    return " and ".join(parts)


def _alphas(layers: Iterable[Layer]) -> str:
    layers = list(layers)
    strengths = sorted({round(layer.scale, 6) for layer in layers})
    shown = ", ".join(f"{value:g}" for value in strengths[:4]) + (", ..." if len(strengths) > 4 else "")
    return f"{_counted(layer.alpha for layer in layers)}; strength alpha / rank: {shown}"


def _counted(values: Iterable) -> str:
    """`16`, or with several values `16 (300 layers), 48 (57 layers)`, the most frequent first."""
    counts = Counter(values)
    if len(counts) == 1:
        return f"{next(iter(counts)):g}" if not isinstance(next(iter(counts)), str) else next(iter(counts))
    shown = [f"{v} ({n} layers)" for v, n in counts.most_common(4)]
    return ", ".join(shown) + (f" and {len(counts) - 4} other values" if len(counts) > 4 else "")


def _total(norms: dict[str, float]) -> str:
    bad = [name for name, value in norms.items() if not math.isfinite(value)]
    if bad:
        return f"NOT FINITE in {len(bad)} layers, such as {bad[0]}"
    total = math.hypot(*norms.values())  # does not overflow on the way
    return f"{total:.4g} in all" + ("; the LoRA does nothing: it was not trained" if total == 0 else "")


def _table(layers: dict[str, Layer], norms: dict[str, float]) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(re.sub(r"(?<=[._])\d+(?=[._])", "*", name, count=1), []).append(name)
    width = max(len(kind) for kind in kinds)
    rows = [f"{'kind of layer':{width}}  layers   mean norm  largest"]
    for kind, names in sorted(kinds.items())[:MOST_KINDS]:
        values = [norms[name] for name in names]
        rows.append(f"{kind:{width}}  {len(names):6}  {np.mean(values):10.4g}  {max(values):7.4g}")
    return [*rows, *_left_out(kinds, MOST_KINDS)]


def _strongest(norms: dict[str, float]) -> list[str]:
    ranked = sorted(norms, key=norms.__getitem__, reverse=True)[:STRONGEST]
    return ["strongest", *(f"  {norms[name]:10.4g}  {name}" for name in ranked)]


def _metadata(file: LoraFile) -> list[str]:
    metadata = dict(file.metadata)
    for name in (ADAPTER_METADATA, NOTE_OF_PARTS, NOTE_OF_FUSED):  # for programs; their content is printed above
        if name in metadata:
            metadata[name] = f"({len(metadata[name])} characters)"
    if not metadata:
        return ["metadata  none"]
    lines = [f"  {_shortened(name)}: {_shortened(value)}" for name, value in sorted(metadata.items())[:MOST_ENTRIES]]
    return ["metadata", *lines, *_left_out(metadata, MOST_ENTRIES)]


def _shortened(text: str) -> str:
    """On one line: line breaks are shown as `\\n`."""
    return json.dumps(text if len(text) <= 200 else f"{text[:200]}...", ensure_ascii=False)[1:-1]


def _left_out(entries: Sized, most: int) -> list[str]:
    return [f"  ... and {len(entries) - most} more"] if len(entries) > most else []


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
