"""Weights from the files into an empty network, tensor by tensor: memory holds the model once, in its own type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from flux_db.errors import UserError
from flux_db.model import int8, int8_linear
from flux_db.model.empty_network import parameter_dtype
from flux_db.model.expected_weights import own_name
from flux_db.model.part_weights import Chosen, open_files
from flux_db.model.sharding import divisible_parameters
from flux_db.progress import progress_bar
from flux_db.weight_file import DTYPES, WHOLE, Share, WeightFile

# Threads that read and convert. What they have read ahead is part of the model: it costs no memory.
READERS = 4

# A load that takes longer shows a progress bar.
BAR_AFTER_SECONDS = 2.0

_NUMPY_DTYPES = {ms.float32: DTYPES["F32"], ms.float16: DTYPES["F16"], ms.bfloat16: DTYPES["BF16"]}

# MindSpore's older layers, which mindone's CLIP is made of, have names of their own for these.
_TORCH_NAMES = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}


class Stored(NamedTuple):
    """A tensor in a file."""

    file: WeightFile
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.entries[self.name].shape

    @property
    def start(self) -> int:
        return self.file.entries[self.name].start

    def size(self, share: Share) -> int:
        """Bytes to be read for a share of it."""
        entry = self.file.entries[self.name]
        return (entry.end - entry.start) // (share.count if share.divides(entry.shape) else 1)


class Assignment(NamedTuple):
    """A parameter, and what it gets."""

    parameter: Parameter
    source: Stored
    dtype: np.dtype
    share: Share
    scales: Parameter | None = None
    """Of a matrix that becomes int8: its scales, which are of the type above."""


def fill(network: nn.Cell, chosen: Chosen, dtype: ms.Type, share: Share = WHOLE) -> list[str]:
    """Give every parameter its value from the files, in this type; of linear layers no more than the share.

    Returns the names of the parameters that the files do not hold. If there are any, nothing was filled: the network
    has no weights then, and cannot be used.
    """
    label, stored, scales = chosen.network, _stored(chosen), int8_linear.scales(network)
    own = {int8.scale_name(name) for name in scales}  # read, or computed, with their matrix
    parameters = {_torch_name(name): p for name, p in network.parameters_and_names() if name not in own}
    if missing := [name for name, parameter in parameters.items() if not _fits(stored.get(name), parameter)]:
        return missing
    if any(int8.is_stored(stored[name].file.entries, stored[name].name) and name not in scales for name in parameters):
        raise UserError(f"{chosen.file}: its matrices are int8; add --base_precision int8")
    divisible = divisible_parameters(network)
    assignments = [
        Assignment(
            parameter,
            stored[name],
            _NUMPY_DTYPES[parameter_dtype(network, name, dtype)],
            share if name in divisible else WHOLE,
            scales.get(name),
        )
        for name, parameter in parameters.items()
    ]
    total = sum(one.source.size(one.share) for one in assignments)
    # each file from its beginning to its end
    assignments.sort(key=lambda one: (one.source.file.path, one.source.start))
    with (
        progress_bar(total=total, desc=label, unit="B", unit_scale=True, delay=BAR_AFTER_SECONDS) as bar,
        ThreadPoolExecutor(READERS) as pool,
    ):
        for one, values in zip(assignments, pool.map(_read, assignments), strict=True):
            _assign(one, *values)
            bar.update(one.source.size(one.share))
    return []


def _stored(chosen: Chosen) -> dict[str, Stored]:
    """The tensors of the files by the names that the network has for them."""
    found = {name: Stored(file, name) for file in open_files(chosen) for name in file.entries}
    # of two names for the same tensor one suffices, and the network's own goes first
    return {own_name(chosen.network, name): stored for name, stored in found.items()} | found


def _fits(stored: Stored | None, parameter: Parameter) -> bool:
    return stored is not None and stored.shape == parameter.shape


def _read(one: Assignment) -> tuple[np.ndarray, np.ndarray | None]:
    """(the values of the parameter, those of its scales)"""
    if one.scales is None:
        return one.source.file.read_as(one.source.name, one.dtype, one.share), None
    found = int8.read_quantised(one.source.file, one.source.name, one.share)
    return found.values, found.scales.astype(one.dtype)


def _assign(one: Assignment, values: np.ndarray, scales: np.ndarray | None) -> None:
    """The parameter takes type and shape of its value, and the value's memory: there is no copy."""
    for parameter, value in ((one.parameter, values), (one.scales, scales)):
        if parameter is None:
            continue
        parameter.assign_value(Tensor.from_numpy(value))
        # or MindSpore would initialise it before the first use
        parameter.init = parameter.init_mode = None
        parameter.sliced = one.share.divides(one.source.shape)


def _torch_name(name: str) -> str:
    owner, dot, last = name.rpartition(".")
    return f"{owner}{dot}{_TORCH_NAMES.get(last, last)}"
