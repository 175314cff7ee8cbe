"""The matrices of the transformer's blocks as int8, with one scale for each output row and no zero point.

scale = max|W| / 127 of the row, q = round(W / scale), and W is about q * scale. The scale is rounded up to 8
significant bits, so that bf16, fp16 and float32 hold it exactly: rounded later, it would make a whole row too large or
too small.
Without MindSpore; the layer that computes with these is in `int8_linear.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from flux_db.errors import UserError
from flux_db.weight_file import WHOLE, Entry, Share, WeightFile

WEIGHT, SCALE = ".weight", ".weight_scale"
"""A matrix, and its scales [rows], have these names after that of their layer."""

LARGEST = 127

# Embedders, norm_out and proj_out, which stay whole, are in no block; biases and the gains of norms are vectors.
_IN_BLOCK = re.compile(r"(single_)?transformer_blocks\.\d+\..+\.weight")

# Numbers that are quantised at a time: few enough that four threads that read take little beside the model.
_PIECE = 2**22


class Quantised(NamedTuple):
    values: np.ndarray
    """[N, K] int8"""
    scales: np.ndarray
    """[N] float32"""


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether --base_precision int8 stores this tensor of the transformer as int8."""
    return len(shape) == 2 and _IN_BLOCK.fullmatch(name) is not None


def scale_name(weight: str) -> str:
    return weight.removesuffix(WEIGHT) + SCALE


def quantise(weight: np.ndarray) -> Quantised:
    """[N, K] float32, all of it finite."""
    scales = np.abs(weight).max(axis=1) / np.float32(LARGEST)
    scales = np.where(scales > 0, _rounded_up(scales), np.float32(1))
    return Quantised(np.rint(weight / scales[:, None]).astype(np.int8), scales)


def dequantise(quantised: Quantised) -> np.ndarray:
    """[N, K] float32, exact: a product has 15 significant bits."""
    return quantised.values.astype(np.float32) * quantised.scales[:, None].astype(np.float32)


def _rounded_up(positive: np.ndarray) -> np.ndarray:
    """To the next number that bf16 has."""
    bits = positive.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def read_quantised(file: WeightFile, name: str, share: Share = WHOLE) -> Quantised:
    """A matrix of a file, or a share of its rows, as int8: quantised piece by piece, unless it is stored so."""
    shape = file.entries[name].shape
    rows = share.rows(shape)
    if is_stored(file.entries, name):
        scales = file.read_as(scale_name(name), np.dtype(np.float32), share)
        return Quantised(file.read_as(name, np.dtype(np.int8), share), scales)
    result = Quantised(np.empty((len(rows), shape[1]), np.int8), np.empty(len(rows), np.float32))
    for piece in _pieces(rows, shape[1]):
        weight = file.read_rows(name, np.dtype(np.float32), piece)
        if not np.isfinite(weight).all():
            raise UserError(f"{file.path}: {name} holds NaN or infinity; fetch it again")
        place = slice(piece.start - rows.start, piece.stop - rows.start)
        result.values[place], result.scales[place] = quantise(weight)
    return result


def _pieces(rows: range, columns: int) -> Iterator[range]:
    size = max(1, _PIECE // columns)
    for start in range(rows.start, rows.stop, size):
        yield range(start, min(start + size, rows.stop))


def is_stored(entries: Mapping[str, Entry], name: str) -> bool:
    """Whether a file has this matrix as int8."""
    return name in entries and entries[name].dtype == "I8"
