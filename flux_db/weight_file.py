"""A safetensors file, tensor by tensor: its header says what it holds, and nothing else is loaded.

The file may be anybody's. The safetensors library checks the header (types, offsets, holes, overlaps, the file's size);
here is what it lets pass, and which tensor is meant where it does not say so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flux_db.errors import UserError
from flux_db.files import open_regular
from flux_db.plain_json import parse_json

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

FLOATS = frozenset(name for name in DTYPES if name.startswith(("F", "BF")))

# What no file of weights comes near; one that claims more is something else.
_HEADER_LIMIT = 16 * 2**20
_NAME_LIMIT = 500
_DIMENSIONS_LIMIT = 8

# Elements that are converted at a time: few enough to stay in the processor's cache.
_PIECE = 2**18


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset from the beginning of the file."""
    end: int


@dataclass(frozen=True)
class Share:
    """One of several equal parts of a tensor, cut along its first dimension."""

    number: int = 0
    count: int = 1

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape can be cut into so many equal parts."""
        return self.count > 1 and len(shape) > 0 and shape[0] >= self.count and shape[0] % self.count == 0

    def rows(self, shape: Sequence[int]) -> range:
        """This part's rows; of a tensor that cannot be cut, all of them."""
        rows = shape[0] if shape else 1
        if not self.divides(shape):
            return range(rows)
        size = rows // self.count
        return range(self.number * size, (self.number + 1) * size)


WHOLE = Share()


@dataclass(frozen=True)
class WeightFile:
    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]

    def read(self, name: str) -> np.ndarray:
        """One tensor, as a copy."""
        return self.read_as(name, DTYPES[self.entries[name].dtype])

    def read_as(self, name: str, dtype: np.dtype, share: Share = WHOLE) -> np.ndarray:
        """One tensor, or a share of its rows, converted to another type."""
        return self.read_rows(name, dtype, share.rows(self.entries[name].shape))

    def read_rows(self, name: str, dtype: np.dtype, rows: range) -> np.ndarray:
        """Some rows of a tensor that follow each other.

        Other types are converted piece by piece: memory holds them once, in the type that is asked for.
        """
        entry = self.entries[name]
        stored = DTYPES[entry.dtype]
        row_size = (entry.end - entry.start) // entry.shape[0] if entry.shape else stored.itemsize
        values = np.empty(len(rows) * row_size // stored.itemsize, dtype)
        try:
            with open_regular(self.path) as file:
                file.seek(entry.start + rows.start * row_size)
                complete = _read_same(file, values) if stored == dtype else _read_converted(file, values, stored)
        except OSError as problem:
            raise UserError(f"{self.path}: cannot be read: {problem.strerror}") from problem
        if not complete:
            raise UserError(f"{self.path}: became shorter while it was read; {name} is cut off")
        return values.reshape((len(rows), *entry.shape[1:]) if entry.shape else ())


def _read_same(file: BinaryIO, values: np.ndarray) -> bool:
    """Fills the array with bytes of the file; False if there are too few."""
    return file.readinto(values.view(np.uint8)) == values.nbytes


def _read_converted(file: BinaryIO, values: np.ndarray, stored: np.dtype) -> bool:
    piece = np.empty(min(len(values), _PIECE), stored)
    for start in range(0, len(values), _PIECE):
        target = values[start : start + _PIECE]
        if not _read_same(file, piece[: len(target)]):
            return False
        target[:] = piece[: len(target)]
    return True


def open_weights(path: Path) -> WeightFile:
    """The file's table of contents; a UserError says what is wrong with a file that has none."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, _HEADER_LIMIT))
    except OSError as problem:
        raise UserError(f"{path}: cannot be read: {problem.strerror}") from problem
    if size < 8 or length > _HEADER_LIMIT or not header.startswith(b"{"):
        raise UserError(f"{path}: is not a safetensors file")
    if len(header) < length:
        raise UserError(f"{path}: is cut off; fetch or copy it again")
    try:
        content = parse_json(header.decode("utf-8"))
    except ValueError as problem:
        raise UserError(f"{path}: its header is damaged: {problem}; fetch or copy it again") from problem
    _library_check(path, content, size - 8 - length)
    metadata = content.pop("__metadata__", None) or {}
    entries = {name: _entry(value, 8 + length) for name, value in content.items()}
    for name, entry in entries.items():
        if problem := _unusable(name, entry):
            raise UserError(f"{path}: {name[:_NAME_LIMIT]}: {problem}")
    return WeightFile(path, entries, metadata)


def _library_check(path: Path, content: Mapping[str, Any], data_size: int) -> None:
    try:
        with safe_open(path, "numpy"):
            return
    except OSError as problem:
        raise UserError(f"{path}: cannot be read: {problem}") from problem
    except SafetensorError as problem:
        wrong, cut = _suspects(content, data_size)
        if cut and not wrong:
            raise UserError(f"{path}: is cut off in the middle of {cut}; fetch or copy it again") from problem
        reason = str(problem).removeprefix("Error while deserializing header: ")
        where = f" at {wrong}" if wrong else ""
        raise UserError(f"{path}: its header is damaged{where}: {reason}; fetch or copy it again") from problem


def _suspects(content: Mapping[str, Any], data_size: int) -> tuple[str | None, str | None]:
    """(the first tensor whose entry is wrong in itself, the first that ends beyond the file)"""
    wrong = cut = None
    for name, value in content.items():
        if name == "__metadata__":
            continue
        match value:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if (
                len(shape) <= _DIMENSIONS_LIMIT
                and all(type(n) is int and 0 <= n < 2**63 for n in shape)
                and (dtype not in DTYPES or end - start == math.prod(shape) * DTYPES[dtype].itemsize)
            ):
                cut = cut or (name[:_NAME_LIMIT] if end > data_size else None)
            case _:
                wrong = wrong or name[:_NAME_LIMIT]
    return wrong, cut


def _entry(value: Mapping[str, Any], data_start: int) -> Entry:
    start, end = value["data_offsets"]
    return Entry(value["dtype"], tuple(value["shape"]), data_start + start, data_start + end)


def _unusable(name: str, entry: Entry) -> str | None:
    """What the library lets pass."""
    if len(name) > _NAME_LIMIT:
        return f"a tensor's name of {len(name)} characters cannot be right"
    if entry.dtype not in DTYPES:
        return f"is of a type that cannot be read: {entry.dtype}"
    if len(entry.shape) > _DIMENSIONS_LIMIT:
        return f"has {len(entry.shape)} dimensions; weights have at most {_DIMENSIONS_LIMIT}"
    if entry.end == entry.start:
        return f"is empty; its shape is {entry.shape}"
    return None


def to_bytes(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with a sorted header: the library writes metadata in an order of its own each time."""
    file = save(dict(sorted(tensors.items())), dict(metadata))
    length = int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + file[8 + length :]
