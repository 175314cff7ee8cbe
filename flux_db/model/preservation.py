"""Differential output preservation: one batch with the LoRA on and, in its last rows, off.

Of B examples a batch has 3 B rows: with their prompts, with the prompts of the class, and those again with the LoRA
off, which is what the base model answers.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from flux_db.model import formulations

_mul, _cast = ops.Mul(), ops.Cast()

PARTS = 3


def three_times(rows: Tensor) -> Tensor:
    """[B, ...] -> [3 B, ...]"""
    return ops.Concat(0)((rows, rows, rows))


def with_base_rows(rows: Tensor) -> Tensor:
    """[2 B, ...] -> [3 B, ...]: the second half, which is of the class, once more for the base model."""
    own, of_class = ops.Split(0, 2)(rows)
    return ops.Concat(0)((own, of_class, of_class))


def parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[3 B, ...] -> with the prompts, with those of the class, and of the base model, which has no gradient."""
    own, of_class, base = ops.Split(0, PARTS)(rows)
    return own, of_class, ops.stop_gradient(base)


@ops.constexpr
def _gate(rows, dimensions):
    """[rows, 1, ...]: 1 where the LoRA is on."""
    on = np.arange(rows) < rows // PARTS * (PARTS - 1)
    return Tensor(on.reshape(rows, *[1] * (dimensions - 1)), ms.float32)


class RowGate(nn.Cell):
    """The input of a LoRA layer, [3 B, D] or [3 B, tokens, D]: while training, 0 in the rows of the base model.

    From zeros a LoRA without bias makes zeros, and the sum with them is the base layer's result, bit for bit.
    """

    def __init__(self, dropout: nn.Cell) -> None:
        super().__init__()
        self.dropout = dropout

    def construct(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        if not self.training:
            return x
        return _mul(x, formulations.repeated(_cast(_gate(x.shape[0], x.ndim), x.dtype), x.shape))
