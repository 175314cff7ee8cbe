"""A safetensors file, tensor by tensor: what it holds is told from its header, and nothing else is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from flux_db.errors import UserError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

# No header of weights is near this size; a file that claims more is something else.
_HEADER_LIMIT = 100 * 2**20


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset from the beginning of the file."""
    end: int


@dataclass(frozen=True)
class WeightFile:
    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]

    def read(self, name: str) -> np.ndarray:
        """One tensor, as a copy."""
        entry = self.entries[name]
        with self.path.open("rb") as file:
            file.seek(entry.start)
            data = file.read(entry.end - entry.start)
        return np.frombuffer(data, DTYPES[entry.dtype]).reshape(entry.shape)


def open_weights(path: Path) -> WeightFile:
    """The file's table of contents; a UserError tells what is wrong with a file that is none."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, _HEADER_LIMIT))
    except OSError as problem:
        raise UserError(f"{path}: cannot be read: {problem.strerror}") from problem
    if size < 8 or length > _HEADER_LIMIT or not header.startswith(b"{"):
        raise UserError(f"{path}: is not a safetensors file")
    if len(header) < length:
        raise UserError(f"{path}: is cut off; fetch or copy it again")
    try:
        content = json.loads(header)
        metadata = content.pop("__metadata__", {})
        entries = {name: _entry(value, 8 + length) for name, value in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise UserError(f"{path}: its header is damaged; fetch or copy it again") from problem
    if unknown := sorted({entry.dtype for entry in entries.values()} - DTYPES.keys()):
        raise UserError(f"{path}: holds tensors of a type that cannot be read: {', '.join(unknown)}")
    for name, entry in entries.items():
        if entry.end > size:
            raise UserError(f"{path}: is cut off in the middle of {name}; fetch or copy it again")
        if entry.end - entry.start != int(np.prod(entry.shape, dtype=np.int64)) * DTYPES[entry.dtype].itemsize:
            raise UserError(f"{path}: its header is damaged: {name} has not the size of its shape")
    return WeightFile(path, entries, {str(name): str(value) for name, value in metadata.items()})


def _entry(value: dict, data_start: int) -> Entry:
    start, end = value["data_offsets"]
    return Entry(value["dtype"], tuple(int(n) for n in value["shape"]), data_start + int(start), data_start + int(end))


def to_bytes(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with a sorted header: the library writes metadata in an order of its own each time."""
    file = save(dict(sorted(tensors.items())), dict(metadata))
    length = int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + file[8 + length :]
