"""A frozen linear layer whose matrix is int8: y = x (q * scale)^T + bias, in the type of x.

The matrix gets the type of x inside the graph, where it is used, and again in the backward pass: it is never kept in
that. There are gradients for x only.
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer

from flux_db.model import formulations, int8
from flux_db.model.formulations import linear, when_needed

_cast, _mul, _reshape = ops.Cast(), ops.Mul(), ops.Reshape()
_matmul, _matmul_transposed = ops.MatMul(), ops.MatMul(transpose_b=True)


class Int8Product(nn.Cell):
    """[rows, K] x (q * scale)^T -> [rows, N], scale [1, N], with a gradient of its own: for the rows only.

    The matrix is made again in the backward pass, when the gradient has arrived, and is not kept until then. Scales are
    multiplied with the rows, which are fewer numbers than the matrix; in fp16, whose range is too small for q without
    its scale, with the matrix.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, rows: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        return self.scaled_rows(_matmul_transposed(rows, self.matrix(values, scale, rows)), scale)

    def bprop(self, rows: Tensor, values: Tensor, scale: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        d_rows = _matmul(self.scaled_rows(dout, scale), self.matrix(values, scale, dout))
        return d_rows, values, scale  # the last two are read by nobody: the base is frozen

    def matrix(self, values: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        """[N, K] in the type of x, not before x is there."""
        matrix = _cast(self.whole(when_needed(_reshape(values, values.shape[-2:]), x)), x.dtype)
        if x.dtype == ms.float16:
            matrix = _times(matrix, _reshape(when_needed(scale, x), (-1, 1)))
        return matrix

    def whole(self, values: Tensor) -> Tensor:
        """All rows of the matrix, where this device has a part of them."""
        return values

    def scaled_rows(self, rows: Tensor, scale: Tensor) -> Tensor:
        if rows.dtype != ms.float16:
            rows = _times(rows, when_needed(scale, rows))
        return rows


# One for all layers: a cell with a gradient of its own is parsed and kept anew for each instance.
_product = Int8Product()


def _times(x: Tensor, vector: Tensor) -> Tensor:
    """[N, K] times [N, 1] or [1, K]."""
    return _mul(x, formulations.repeated(_cast(vector, x.dtype), x.shape))


def int8_linear(product: Int8Product, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    # [..., K] -> [rows, K] -> [rows, N]
    rows = product(_reshape(x, (-1, x.shape[-1])), values, _reshape(scale, (1, -1)))
    if bias is not None:
        rows = formulations.add_bias(rows, bias)
    return _reshape(rows, (*x.shape[:-1], scale.shape[0]))


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
        self.product = _product

    def construct(self, x: Tensor) -> Tensor:
        values = formulations.as_argument(self.weight)
        result = int8_linear(self.product, x, values, self.weight_scale, self.bias)
        if self.down is not None:
            result = result + linear(linear(x, self.down, None), self.up, None)
        return result


def convert(transformer: nn.Cell) -> None:
    """Change the layers of the blocks, before weights and LoRA are in."""

    def as_int8(name: str, layer: nn.Cell) -> nn.Cell | None:
        is_one = type(layer) is mint.nn.Linear and int8.is_matrix(f"{name}{int8.WEIGHT}", layer.weight.shape)
        return Int8Linear(layer) if is_one else None

    replace_layers(transformer, as_int8)


def replace_layers(network: nn.Cell, substitute: Callable[[str, nn.Cell], nn.Cell | None]) -> None:
    """Put what `substitute` returns for a name and its cell in that cell's place; None leaves it."""
    for name, cell in list(network.cells_and_names()):
        for own, layer in list(cell._cells.items()):
            if layer is not None and (new := substitute(f"{name}.{own}", layer)) is not None:
                cell._cells[own] = new
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
