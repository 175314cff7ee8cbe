"""safetensors files as bytes: written rightly or wrongly, and read without the program's own reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64}
NUMPY |= {"I32": np.int32, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}

Header = dict[str, Any]


@dataclass(frozen=True)
class Raw:
    """A tensor as its file has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, NUMPY[self.dtype]).reshape(self.shape)


def raw(values: np.ndarray, dtype: str = "F32") -> Raw:
    # a number too large for the type becomes infinite, as it is meant to
    with np.errstate(over="ignore"):
        return Raw(dtype, values.shape, values.astype(NUMPY[dtype]).tobytes())


def layout(tensors: Mapping[str, Raw], metadata: Mapping[str, Any] | None = None) -> tuple[Header, bytes]:
    """(header, data) of a sound file."""
    header: Header = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.data
    return header, data


def pack(header: Header | bytes, data: bytes, *, length: int | None = None) -> bytes:
    """The file. A header of bytes is taken as it is; `length` is what the file claims of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(text) if length is None else length
    return claimed.to_bytes(8, "little") + text + data


def file_of(tensors: Mapping[str, Raw], metadata: Mapping[str, Any] | None = None) -> bytes:
    return pack(*layout(tensors, metadata))


def unpack(file: bytes) -> tuple[Header, bytes]:
    length = int.from_bytes(file[:8], "little")
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def read(path: Path) -> tuple[dict[str, Raw], dict[str, str]]:
    """Tensors and metadata of a sound file."""
    header, data = unpack(path.read_bytes())
    metadata = header.pop("__metadata__", {})
    tensors = {
        name: Raw(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
    return tensors, metadata


def is_sound(path: Path) -> bool:
    """Whether the safetensors library itself reads the file."""
    from safetensors import safe_open

    try:
        with safe_open(path, "np") as file:
            return file is not None
    except Exception:  # of its own kinds, and those of the operating system
        return False
