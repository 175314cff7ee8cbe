"""A frozen linear layer whose matrix is int8: y = x (q * scale)^T + bias, in the type of x.

The matrix becomes whole inside the graph, where it is used, and again in the backward pass: it is never kept. There
are gradients for x only.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer

from flux_db.model import formulations, int8
from flux_db.model.formulations import linear, when_needed

# Marked by themselves, and not only with their block: without --gradient_checkpointing too they are computed again.
_cast, _mul = ops.Cast().recompute(), ops.Mul().recompute()
_reshape = ops.Reshape()


def dequantised(weight: Tensor, scale: Tensor, dtype: ms.Type) -> Tensor:
    """[N, K] int8 and [N] -> [N, K]"""
    return _mul(_cast(weight, dtype), formulations.repeated_again(_reshape(scale, (-1, 1)), weight.shape))


class Int8Linear(mint.nn.Linear):
    """In the place of a linear layer, with its parameters and their names, and a scale for each row."""

    def __init__(self, layer: nn.Cell) -> None:
        nn.Cell.__init__(self, auto_prefix=False)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.has_bias = layer.has_bias
        self.weight, self.bias = layer.weight, layer.bias
        name = int8.scale_name(layer.weight.name)
        self.weight_scale = Parameter(initializer("ones", (self.out_features,), ms.float32), name=name)
        self.down = self.up = None

    def construct(self, x: Tensor) -> Tensor:
        weight = dequantised(when_needed(self.weight, x), self.weight_scale, x.dtype)
        result = linear(x, weight, self.bias)
        if self.down is not None:
            result = result + linear(linear(x, self.down, None), self.up, None)
        return result


def convert(transformer: nn.Cell) -> None:
    """Change the layers of the blocks, before weights and LoRA are in."""
    for name, cell in list(transformer.cells_and_names()):
        for own, layer in list(cell._cells.items()):
            if type(layer) is mint.nn.Linear and int8.is_matrix(f"{name}.{own}{int8.WEIGHT}", layer.weight.shape):
                cell._cells[own] = Int8Linear(layer)
        if isinstance(cell, nn.SequentialCell):
            cell.cell_list = list(cell._cells.values())


def layers(network: nn.Cell) -> dict[str, Int8Linear]:
    """Those that are int8, by their names."""
    return {name: cell for name, cell in network.cells_and_names() if isinstance(cell, Int8Linear)}


def scales(network: nn.Cell) -> dict[str, Parameter]:
    """Name of each matrix that is int8 -> its scales."""
    return {f"{name}{int8.WEIGHT}": layer.weight_scale for name, layer in layers(network).items()}


def add_beside(layer: Int8Linear, down: np.ndarray, up: np.ndarray, dtype: ms.Type) -> None:
    """Add x down^T up^T to what the layer answers; before its first call. down [R, K], up [N, R]"""
    name = layer.weight.name.removesuffix(int8.WEIGHT)
    layer.down, layer.up = (
        Parameter(Tensor(value).astype(dtype), name=f"{name}.{own}", requires_grad=False)
        for value, own in ((down, "down"), (up, "up"))
    )
