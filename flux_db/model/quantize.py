"""A model folder whose transformer is stored as int8, so that a run need not quantise it and reads half as much.

Written tensor by tensor: memory holds one at a time. Needs no MindSpore.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from flux_db.errors import UserError
from flux_db.model import folder_copy, int8, parts
from flux_db.model.part_weights import Chosen, choose, open_files, read_object
from flux_db.progress import progress_bar
from flux_db.weight_file import DTYPES, WeightFile

TRANSFORMER = "transformer"

# In config.json. diffusers refuses a method that it does not know, instead of taking int8 values for weights.
MARK = {"quant_method": "flux_db_int8", "schema": 1}

# Scales have 8 significant bits.
_SCALE_TYPE = "BF16"


class Target(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def quantize(model: Path, output: Path, variant: str | None = None) -> None:
    """Write the model with its transformer as int8; the other parts are those of the model."""
    folder_copy.demand_new(model, output)
    part = model / TRANSFORMER
    if problems := parts.part_problems(part, variant):
        raise UserError([f"{model}: {problem}" for problem in problems])
    chosen = choose(part, variant)
    files = open_files(chosen)
    if any(int8.is_stored(file.entries, name) for file in files for name in file.entries):
        raise UserError(f"{model}: its transformer is stored as int8 already")
    with folder_copy.new_model(model, output, [TRANSFORMER]) as temp:
        (temp / TRANSFORMER).mkdir()
        total = sum(len(file.entries) for file in files)
        with progress_bar(total=total, desc="quantising", unit="tensor") as bar:
            for file in files:
                with (temp / TRANSFORMER / file.path.name).open("wb") as target:
                    for data in _contents(file):
                        target.write(data)
                        bar.update()
                    _sync(target)
        _write_json(
            temp / TRANSFORMER / "config.json", read_object(part / "config.json") | {"quantization_config": MARK}
        )
        if chosen.is_index:
            _write_json(temp / TRANSFORMER / chosen.file.name, _index(chosen, files))


def targets(file: WeightFile) -> list[Target]:
    """What the new file holds, in the order of the old one."""
    found: list[Target] = []
    for name, entry in file.entries.items():
        if int8.is_matrix(name, entry.shape):
            found.append(Target(name, "I8", entry.shape))
            found.append(Target(int8.scale_name(name), _SCALE_TYPE, entry.shape[:1]))
        else:
            found.append(Target(name, entry.dtype, entry.shape))
    return found


def _contents(file: WeightFile) -> Iterator[bytes]:
    """The new file, piece by piece: its header with the first tensor, then a tensor at a time."""
    before = _header(targets(file), file.metadata)
    for name, entry in file.entries.items():
        if int8.is_matrix(name, entry.shape):
            found = int8.read_quantised(file, name)
            data = found.values.tobytes() + found.scales.astype(DTYPES[_SCALE_TYPE]).tobytes()
        else:
            data = np.ascontiguousarray(file.read(name)).tobytes()
        yield before + data
        before = b""


def _header(tensors: list[Target], metadata: dict[str, str]) -> bytes:
    content, start = {"__metadata__": metadata} if metadata else {}, 0
    for tensor in tensors:
        end = start + tensor.bytes
        content[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    header = json.dumps(content, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _index(chosen: Chosen, files: list[WeightFile]) -> dict:
    tensors = {tensor: file.path.name for file in files for tensor in targets(file)}
    index = read_object(chosen.file)
    index["metadata"] |= {"total_size": sum(tensor.bytes for tensor in tensors)}
    return index | {"weight_map": {tensor.name: name for tensor, name in sorted(tensors.items())}}


def _write_json(path: Path, content: dict) -> None:
    with path.open("wb") as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
