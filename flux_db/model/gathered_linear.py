"""A frozen linear layer of which this device keeps a part of the matrix, and gathers the rest when it is used.

A matrix of int8 is gathered as it is, and becomes whole afterwards. Biases and scales are whole on every device.
"""

from __future__ import annotations

from mindspore import Tensor, mint, nn, ops

from flux_db.model import formulations
from flux_db.model.formulations import linear, when_needed
from flux_db.model.int8_linear import Int8Product


class GatheredLinear(mint.nn.Linear):
    """In the place of a linear layer, with its parameters and their names."""

    def __init__(self, layer: nn.Cell) -> None:
        nn.Cell.__init__(self, auto_prefix=False)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.has_bias = layer.has_bias
        self.weight, self.bias = layer.weight, layer.bias
        self.gather = ops.AllGather()

    def construct(self, x: Tensor) -> Tensor:
        return linear(x, self.gather(when_needed(self.weight, x)), self.bias)


class GatheredInt8Product(Int8Product):
    """Gathers the matrix as int8, and once more for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.AllGather()

    def whole(self, values: Tensor) -> Tensor:
        return self.gather(formulations.gatherable(values))
