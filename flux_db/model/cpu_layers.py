"""Layers as the CPU computes them quickly, with gradients of their own.

Three facts of MindSpore's CPU kernels decide their form. A sum or product of two shapes that are not the same takes
five times as long as one of equal shapes, and keeps 16 bytes for each number of its result for good: so vectors are
repeated first. Reductions over the last axis are slow, products with a column of ones are not. And the kernel of
LayerNorm takes ten times as long as the operators that it is made of.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

_reshape, _matmul, _cast, _tile = ops.Reshape(), ops.MatMul(), ops.Cast(), ops.Tile()
_add, _sub, _mul, _rsqrt = ops.Add(), ops.Sub(), ops.Mul(), ops.Rsqrt()
_bmm, _bmm_transposed, _bmm_first_transposed = (
    ops.BatchMatMul(),
    ops.BatchMatMul(transpose_b=True),
    ops.BatchMatMul(transpose_a=True),
)


@ops.constexpr
def _times(own, shape):
    return tuple(whole // side for side, whole in zip(own, shape, strict=True))


def repeated(x, shape):
    """A tensor whose sides are 1 or those of `shape`, in that shape."""
    own = (1,) * (len(shape) - x.ndim) + x.shape
    return _tile(_reshape(x, own), _times(own, shape))


def add_bias(rows, bias):
    """[rows, N] + [N]"""
    return ops.BiasAdd()(rows, bias)


@ops.constexpr
def _averager(dim):
    return Tensor(np.full((dim, 1), 1.0 / dim, np.float32))


@ops.constexpr
def _ones(shape):
    return Tensor(np.ones(shape, np.float32))


def _row_mean(rows):
    """[rows, D] -> [rows, 1]"""
    return _matmul(rows, _averager(rows.shape[-1]))


# --- norms -------------------------------------------------------------------------------------------------------


class _LayerNorm(nn.Cell):
    """[rows, D] with mean 0 and variance 1 in each row."""

    def construct(self, x, eps):
        centred, root = self.parts(x, eps)
        return _mul(centred, root)

    def parts(self, x, eps):
        centred = _sub(x, repeated(_row_mean(x), x.shape))
        return centred, repeated(_rsqrt(_add(_row_mean(_mul(centred, centred)), eps)), x.shape)

    def bprop(self, x, eps, out, dout):
        _, root = self.parts(x, eps)  # MindSpore finds that the forward has computed it
        along = _mul(out, repeated(_row_mean(_mul(dout, out)), x.shape))
        return _mul(_sub(_sub(dout, repeated(_row_mean(dout), x.shape)), along), root), 0.0


class _RmsNorm(nn.Cell):
    """[rows, D] divided by the root mean square of each row, times [1, D]."""

    def construct(self, x, gain, eps):
        return _mul(x, _matmul(self.root(x, eps), gain))

    def root(self, x, eps):
        return _rsqrt(_add(_row_mean(_mul(x, x)), eps))

    def bprop(self, x, gain, eps, out, dout):
        root = self.root(x, eps)
        scaled = _mul(dout, _matmul(root, gain))
        along = _mul(_row_mean(_mul(scaled, x)), _mul(root, root))
        # the gain's own is not computed where it is frozen: nothing uses it
        d_gain = _matmul(_ones((1, x.shape[0])), _mul(dout, _mul(x, repeated(root, x.shape))))
        return _sub(scaled, _mul(x, repeated(along, x.shape))), d_gain, 0.0


_normalise, _normalise_length = _LayerNorm(), _RmsNorm()


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    width = 1
    for side in normalized_shape:
        width *= side
    rows = _reshape(_cast(input, ms.float32), (-1, width))
    normed = _normalise(rows, eps)
    if weight is not None:
        normed = _mul(normed, repeated(_reshape(_cast(weight, ms.float32), (1, width)), normed.shape))
    if bias is not None:
        normed = add_bias(normed, _reshape(_cast(bias, ms.float32), (width,)))
    return _cast(_reshape(normed, input.shape), input.dtype)


def rms_norm(self, hidden_states):
    width = hidden_states.shape[-1]
    rows = _reshape(_cast(hidden_states, ms.float32), (-1, width))
    gain = _ones((1, width)) if self.weight is None else _reshape(_cast(self.weight, ms.float32), (1, width))
    dtype = hidden_states.dtype if self.weight is None else self.weight.dtype
    normed = _cast(_reshape(_normalise_length(rows, gain, self.eps), hidden_states.shape), dtype)
    return normed if self.bias is None else _add(normed, repeated(self.bias, normed.shape))


# --- attention ---------------------------------------------------------------------------------------------------


class _Attention(nn.Cell):
    """Plain attention over [B, H, S, D], with the softmax in fp32."""

    def shares(self, query, key, scale):
        return ops.Softmax(-1)(_cast(_bmm_transposed(_mul(query, scale), key), ms.float32))

    def construct(self, query, key, value, scale):
        return _bmm(_cast(self.shares(query, key, scale), value.dtype), value)

    def bprop(self, query, key, value, scale, out, dout):
        shares = self.shares(query, key, scale)
        narrow = _cast(shares, value.dtype)
        d_shares = _cast(_bmm_transposed(dout, value), ms.float32)
        # the softmax's own sum over a row, from vectors of length D instead of S
        along = _cast(_mul(dout, out), ms.float32)
        along = _matmul(_reshape(along, (-1, along.shape[-1])), _ones((along.shape[-1], 1)))
        along = repeated(_reshape(along, (*query.shape[:3], 1)), shares.shape)
        d_scores = _cast(_mul(shares, _sub(d_shares, along)), value.dtype)
        return (
            _mul(_bmm(d_scores, key), scale),
            _bmm_first_transposed(d_scores, _mul(query, scale)),
            _bmm_first_transposed(narrow, dout),
            0.0,
        )


_attention = _Attention()


def attend(self, query, key, value, scale):
    return _attention(query, key, value, scale)
