"""DINOv2's layers in graph primitives, as `formulations.py` has those of FLUX.1: mindone's own compile on no CPU."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, ops

from flux_db.model.formulations import silu, softmax_attention, swap_heads

_reshape, _transpose, _cast, _matmul = ops.Reshape(), ops.Transpose(), ops.Cast(), ops.MatMul()
_add, _mul, _tile, _slice = ops.Add(), ops.Mul(), ops.Tile(), ops.Slice()

# Of torch's bicubic interpolation.
_SHARPNESS = -0.75


def patches_construct(self, pixel_values):
    x = self.projection(pixel_values)
    # [B, D, h, w] -> [B, D, h*w] -> [B, h*w, D]
    return _transpose(_reshape(x, (x.shape[0], x.shape[1], -1)), (0, 2, 1))


def embeddings_construct(self, pixel_values, bool_masked_pos=None):
    if bool_masked_pos is not None:
        raise ValueError("DINOv2 looks at whole pictures here")
    batch, _, height, width = pixel_values.shape
    x = self.patch_embeddings(_cast(pixel_values, self.cls_token.dtype))
    x = ops.Concat(1)((_tile(self.cls_token, (batch, 1, 1)), x))
    return _add(x, self.interpolate_pos_encoding(x, height, width))


def positions(self, embeddings, height, width):
    """The position embeddings at another size than the trained one, as a product with a constant matrix."""
    trained = self.position_embeddings
    count, dim = trained.shape[1] - 1, trained.shape[2]
    if embeddings.shape[1] - 1 == count and height == width:
        return trained
    matrix = _resize_matrix(count, height // self.patch_size, width // self.patch_size)
    token = _slice(trained, (0, 0, 0), (1, 1, dim))
    # [new, old] x [old, D] -> [new, D]
    grid = _matmul(matrix, _cast(_reshape(_slice(trained, (0, 1, 0), (1, count, dim)), (count, dim)), matrix.dtype))
    return ops.Concat(1)((token, _reshape(_cast(grid, trained.dtype), (1, -1, dim))))


@ops.constexpr
def _resize_matrix(count, rows, columns):
    side = round(count**0.5)
    return Tensor(np.kron(bicubic(side, rows), bicubic(side, columns)).astype(np.float32))


def bicubic(old: int, new: int) -> np.ndarray:
    """[new, old] weights of torch's bicubic interpolation without antialiasing, from so many points to so many."""
    matrix = np.zeros((new, old))
    for row in range(new):
        place = (row + 0.5) * old / new - 0.5
        start = int(np.floor(place))
        for offset in range(-1, 3):
            column = min(max(start + offset, 0), old - 1)
            matrix[row, column] += _cubic(abs(place - start - offset))
    return matrix


def _cubic(x: float) -> float:
    a = _SHARPNESS
    return ((a + 2) * x - (a + 3)) * x * x + 1 if x <= 1 else ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def attention_construct(self, hidden_states, head_mask=None, output_attentions=False):
    if head_mask is not None or output_attentions:
        raise ValueError("DINOv2's attention takes no mask here, and returns no weights")
    b, length, _ = hidden_states.shape
    shape = (b, length, self.num_attention_heads, self.attention_head_size)
    query = swap_heads(_reshape(self.query(hidden_states), shape))
    key = swap_heads(_reshape(self.key(hidden_states), shape))
    value = swap_heads(_reshape(self.value(hidden_states), shape))
    out = softmax_attention(query, key, value, self.scaling)
    return (_reshape(swap_heads(out), (b, length, -1)),)


def swiglu_construct(self, hidden_state):
    first, second = ops.Split(-1, 2)(self.weights_in(hidden_state))
    return self.weights_out(_mul(silu(first), second))
