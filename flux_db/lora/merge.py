"""LoRAs merged into the weights they belong to: for single weights, and for a whole model folder, file by file."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flux_db.errors import UserError
from flux_db.lora import convert, layer_names, lora_file
from flux_db.lora.lora_file import Layer
from flux_db.model import folder_copy, parts
from flux_db.progress import progress_bar
from flux_db.weight_file import DTYPES, FLOATS, WeightFile, open_weights

TRANSFORMER, TEXT_ENCODER = "transformer", "text_encoder"

# Layer of the transformer, or of CLIP with `text_encoder.` before it -> the LoRAs on it and their strengths.
Additions = dict[str, list[tuple[Layer, float]]]


@dataclass(frozen=True)
class Weighted:
    """A LoRA file and the strength to use it with."""

    path: Path
    weight: float = 1.0


def weighted(text: str) -> Weighted:
    """`FILE` or `FILE:0.8`; a ValueError says what is wrong with it."""
    path, weight = text, 1.0
    head, colon, tail = text.rpartition(":")
    if colon and not os.path.exists(text):
        try:
            path, weight = head, float(tail)
        except ValueError:
            raise ValueError(f"{text}: {tail} is not a weight; write FILE:0.8") from None
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such file")
    if not math.isfinite(weight):
        raise ValueError(f"{text}: the weight must be a finite number")
    return Weighted(Path(path), weight)


def read_all(loras: Sequence[Weighted]) -> Additions:
    """Layer of transformer or CLIP -> what the LoRAs add to it. Files of any format."""
    found: Additions = {}
    for lora in loras:
        for name, layer in convert.parts(lora_file.read(lora.path)).items():
            found.setdefault(name, []).append((layer, lora.weight))
    return found


def by_part(additions: Additions) -> dict[str, Additions]:
    """Folder of the model -> what is added to its layers, by their names there; parts without any are left out."""
    found: dict[str, Additions] = {}
    for name, layers in additions.items():
        part = TEXT_ENCODER if layer_names.is_text(name) else TRANSFORMER
        found.setdefault(part, {})[name.removeprefix(layer_names.TEXT_ENCODER)] = layers
    return found


def merged(weight: np.ndarray, additions: Sequence[tuple[Layer, float]]) -> np.ndarray:
    """The weight with its LoRAs, computed and returned in float32; see `finite_as` for values too large."""
    total = weight.astype(np.float32)
    with np.errstate(all="ignore"):
        for layer, strength in additions:
            total += np.float32(strength) * layer.delta()
    return total


def stacked(additions: Sequence[tuple[Layer, float]]) -> tuple[np.ndarray, np.ndarray]:
    """All LoRAs of a layer as one: down [ranks, inputs] and up [outputs, ranks], with their strengths in up."""
    with np.errstate(all="ignore"):
        ups = [layer.up.astype(np.float32) * np.float32(strength * layer.scale) for layer, strength in additions]
    return np.concatenate([layer.down.astype(np.float32) for layer, _ in additions]), np.concatenate(ups, axis=1)


def finite_as(value: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """A merged weight in the type of the model; a UserError if it holds NaN, or more than the type can."""
    with np.errstate(all="ignore"):
        result = value.astype(DTYPES[dtype])
    if not np.isfinite(result).all():
        raise UserError(
            f"{name}: with the LoRA its weights are not finite numbers of type {dtype}; the strength is too large, "
            "or the model's own weights are broken"
        )
    return result


def misfits(model: Path, loras: Sequence[Weighted], additions: Additions, *, beside: bool = False) -> list[str]:
    """What the LoRAs add to layers that the model does not have, or not in this shape.

    `beside`: they are not merged into the weights, which may be int8 then."""
    files = " or ".join(dict.fromkeys(str(lora.path) for lora in loras))
    return [f"{files}: {text}" for text in unfit(model, additions, beside=beside)]


def unfit(model: Path, additions: Additions, *, beside: bool = False) -> list[str]:
    """The same without the names of the LoRA files."""
    types = FLOATS | ({"I8"} if beside else set())
    problems = [
        problem
        for part, own in by_part(additions).items()
        for problem in _part_misfits(weight_files(model, part), own, types)
    ]
    few = problems[:3] + ([f"and {len(problems) - 3} more"] if len(problems) > 3 else [])
    remedy = "use it with the model that it was trained on"
    return [f"does not fit {model}: {'; '.join(few)}; {remedy}"] if few else []


def _part_misfits(files: Sequence[WeightFile], additions: Additions, types: Set[str]) -> list[str]:
    entries = {name: entry for file in files for name, entry in file.entries.items()}
    problems = []
    for name, layers in additions.items():
        entry = entries.get(f"{name}.weight")
        for layer, _ in layers:
            shape = (layer.up.shape[0], layer.down.shape[1])
            if entry is None:
                problems.append(f"the model has no layer {name}")
            elif entry.shape != shape:
                problems.append(f"{name} is {entry.shape} in the model and {shape} in the LoRA")
            elif entry.dtype not in types:
                problems.append(f"{name} is of type {entry.dtype} in the model, and no LoRA can be merged into that")
    return problems


def weight_files(model: Path, part: str) -> list[WeightFile]:
    files = sorted((model / part).glob("*.safetensors"))
    if not files:
        raise UserError(f"{model}: has no {part}/*.safetensors; give a FLUX.1 folder in diffusers layout")
    return [open_weights(path) for path in files]


def fuse(model: Path, loras: Sequence[Weighted], output: Path) -> None:
    """Write a model folder whose transformer, and CLIP if they have layers of it, has the LoRAs in its weights; the
    other parts are those of the model."""
    folder_copy.demand_new(model, output)
    additions = read_all(loras)
    changed = {TRANSFORMER: {}, **by_part(additions)}
    files = {part: weight_files(model, part) for part in changed}
    if problems := [f"{model}: {text}" for part in changed for text in parts.all_variants_problems(model / part)]:
        raise UserError(problems)
    if problems := misfits(model, loras, additions):
        raise UserError(problems)
    with folder_copy.new_model(model, output, list(changed)) as temp:
        for part, own in changed.items():
            _copy_part(model / part, temp / part)
            _merge_files(files[part], temp / part, own)


def _merge_files(files: Sequence[WeightFile], folder: Path, additions: Additions) -> None:
    """Change the copied files in place: headers and all other tensors keep their bytes."""
    count = sum(f"{name}.weight" in file.entries for file in files for name in additions)
    with progress_bar(total=count, desc="merging", unit="layer") as bar:
        for file in files:
            with (folder / file.path.name).open("r+b") as target:
                for name, layers in additions.items():
                    if (entry := file.entries.get(f"{name}.weight")) is None:
                        continue
                    value = finite_as(merged(file.read(f"{name}.weight"), layers), entry.dtype, name)
                    target.seek(entry.start)
                    target.write(value.tobytes())
                    bar.update()
                target.flush()
                os.fsync(target.fileno())


def _copy_part(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix in (".safetensors", ".json") and path.is_file():  # other formats' weights would not be merged
            shutil.copyfile(path, target / path.name)
