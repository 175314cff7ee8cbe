"""The frozen transformer spread over the devices: each keeps a part of every matrix and gathers the rest for use.

A rank reads only its part of a matrix from the files (`loading.load_transformer`). Biases, norms, LoRA and optimizer
stay whole on every device, so saved files know nothing of it. A forward is a collective from then on: all ranks must
run the same number of them.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, mint, nn

from flux_db.model import int8_linear
from flux_db.model.gathered_linear import GatheredInt8Product, GatheredLinear
from flux_db.model.int8_linear import Int8Linear, replace_layers
from flux_db.model.runtime import Runtime
from flux_db.weight_file import Share


def share_of(runtime: Runtime) -> Share:
    """The part of every matrix that this rank keeps."""
    return Share(runtime.rank, runtime.world_size)


def divisible_parameters(transformer: nn.Cell) -> set[str]:
    """Names of the parameters that can be spread over the devices: the matrices of the linear layers."""
    linear = (mint.nn.Linear, Int8Linear)
    return {f"{name}.weight" for name, cell in transformer.cells_and_names() if type(cell) in linear}


def shard_base(transformer: nn.Cell, runtime: Runtime) -> tuple[int, int]:
    """Make the layers gather what this rank does not keep. Call it after the LoRA is in.

    Returns the numbers of parameters (in all, on this device).
    """
    if runtime.world_size > 1:
        product = GatheredInt8Product()
        for layer in int8_linear.layers(transformer).values():
            if layer.weight.sliced:
                layer.product = product
        replace_layers(transformer, _gathering)
        _make_scales_whole(transformer, runtime)
    parameters = list(transformer.get_parameters())
    whole = sum(p.size * (runtime.world_size if p.sliced else 1) for p in parameters)
    return whole, sum(p.size for p in parameters)


def _gathering(name: str, layer: nn.Cell) -> nn.Cell | None:
    return GatheredLinear(layer) if type(layer) is mint.nn.Linear and layer.weight.sliced else None


def _make_scales_whole(transformer: nn.Cell, runtime: Runtime) -> None:
    """Each rank has computed the scales of its rows; all get those of all, in one sum."""
    parts = [scale for scale in int8_linear.scales(transformer).values() if scale.sliced]
    if not parts:
        return
    table = np.zeros((runtime.world_size, sum(scale.size for scale in parts)), np.float32)
    table[runtime.rank] = np.concatenate([scale.asnumpy().astype(np.float32) for scale in parts])
    table, end = runtime.sum(table), 0
    for scale in parts:
        end, begin = end + scale.size, end
        scale.assign_value(Tensor(table[:, begin:end].reshape(-1)).astype(scale.dtype))
        scale.sliced = False
