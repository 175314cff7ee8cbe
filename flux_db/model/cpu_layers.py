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

from flux_db.model.formulations import rotate, swap_heads

_reshape, _matmul, _cast, _tile = ops.Reshape(), ops.MatMul(), ops.Cast(), ops.Tile()
_add, _sub, _mul, _div, _expand_dims = ops.Add(), ops.Sub(), ops.Mul(), ops.Div(), ops.ExpandDims()
_rsqrt, _sigmoid = ops.Rsqrt(), ops.Sigmoid()
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


def as_argument(weight):
    """As it is: here a view is a copy, and a weight is not copied."""
    return weight


def gatherable(weight):
    """int8 as float32, which has all its values."""
    return _cast(weight, ms.float32) if weight.dtype == ms.int8 else weight


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


def _last_mean(x):
    """[..., D] -> [..., 1]"""
    return _reshape(_row_mean(_reshape(x, (-1, x.shape[-1]))), (*x.shape[:-1], 1))


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


class _ModulatedNorm(nn.Cell):
    """[B, S, D] with mean 0 and variance 1 in each row, times a factor [B, 1, D], plus a shift [B, 1, D]."""

    def construct(self, x, factor, shift, eps):
        centred, spread = self.parts(x, eps)
        out = _mul(centred, _bmm(_rsqrt(spread), factor))
        if x.shape[0] == 1:
            return _reshape(add_bias(_reshape(out, x.shape[1:]), _reshape(shift, (-1,))), x.shape)
        return _add(out, repeated(shift, x.shape))

    def parts(self, x, eps):
        """[B, S, D], and its variance [B, S, 1]"""
        centred = _sub(x, repeated(_last_mean(x), x.shape))
        return centred, _add(_last_mean(_mul(centred, centred)), eps)

    def bprop(self, x, factor, shift, eps, out, dout):
        centred, spread = self.parts(x, eps)
        root = _rsqrt(spread)
        scaled = _mul(dout, _bmm(root, factor))
        along = _mul(centred, repeated(_div(_last_mean(_mul(scaled, centred)), spread), x.shape))
        d_x = _sub(_sub(scaled, repeated(_last_mean(scaled), x.shape)), along)
        # not computed where nothing uses them: factor and shift depend on a weight only if CLIP is trained
        d_factor = _bmm_first_transposed(root, _mul(dout, centred))
        return d_x, d_factor, _bmm(_ones((x.shape[0], 1, x.shape[1])), dout), 0.0


class _RmsNorm(nn.Cell):
    """Groups of rows [G, N, D], each row divided by its root mean square, times the gain [G, 1, D] of its group."""

    def construct(self, x, gain, eps):
        return _mul(x, _bmm(_rsqrt(self.square(x, eps)), gain))

    def square(self, x, eps):
        """[G, N, 1]"""
        return _add(_last_mean(_mul(x, x)), eps)

    def bprop(self, x, gain, eps, out, dout):
        square = self.square(x, eps)
        root = _rsqrt(square)
        scaled = _mul(dout, _bmm(root, gain))
        along = _mul(x, repeated(_div(_last_mean(_mul(scaled, x)), square), x.shape))
        # the gain's own is not computed where it is frozen: nothing uses it
        return _sub(scaled, along), _bmm_first_transposed(root, _mul(dout, x)), 0.0


_normalise, _normalise_and_modulate, _normalise_length = _LayerNorm(), _ModulatedNorm(), _RmsNorm()


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


def modulated_norm(norm, x, scale, shift):
    """As formulations.modulated_norm."""
    factor, shift = _cast(_expand_dims(_add(scale, 1.0), 1), ms.float32), _cast(_expand_dims(shift, 1), ms.float32)
    return _cast(_normalise_and_modulate(_cast(x, ms.float32), factor, shift, norm.eps), x.dtype)


def rms_norm(self, hidden_states):
    width = hidden_states.shape[-1]
    gain = _ones((1, 1, width)) if self.weight is None else _gain(self)
    dtype = hidden_states.dtype if self.weight is None else self.weight.dtype
    normed = _rms(hidden_states, gain, self.eps, dtype)
    return normed if self.bias is None else _add(normed, repeated(self.bias, normed.shape))


def _gain(norm):
    return _reshape(_cast(norm.weight, ms.float32), (1, 1, -1))


def _rms(x, gain, eps, dtype):
    """The rows of a tensor in as many groups as there are gains."""
    rows = _reshape(_cast(x, ms.float32), (gain.shape[0], -1, x.shape[-1]))
    return _cast(_reshape(_normalise_length(rows, gain, eps), x.shape), dtype)


# --- GELU --------------------------------------------------------------------------------------------------------

# 0.5 x (1 + tanh(u)) = x sigmoid(2u), with 2u = sqrt(8/pi) (x + 0.044715 x^3) = x (_LINEAR + _CUBIC x^2)
_LINEAR, _CUBIC = 1.5957691216057308, 0.07135481282553254


class _TanhGelu(nn.Cell):
    def construct(self, x):
        return _mul(x, self.share(x))

    def slope(self, x):
        return _add(_mul(_mul(x, x), _CUBIC), _LINEAR)

    def share(self, x):
        return _sigmoid(_mul(x, self.slope(x)))

    def bprop(self, x, out, dout):
        share = self.share(x)
        # d(2u)/dx = _LINEAR + 3 _CUBIC x^2
        steep = _add(_mul(self.slope(x), 3.0), -2.0 * _LINEAR)
        return (_mul(dout, _add(share, _mul(_sub(out, _mul(out, share)), steep))),)


tanh_gelu = _TanhGelu()


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
_join_rows, _join_tokens, _two_halves = ops.Concat(0), ops.Concat(1), ops.Split(0, 2)


def _pair_normed(pair, norm_query, norm_key):
    """Queries and keys [B, S, H, D] as one tensor [2B, S, H, D], each normalised with its own gain."""
    gains = _join_rows((_gain(norm_query), _gain(norm_key)))
    return _rms(_join_rows(pair), gains, norm_query.eps, norm_query.weight.dtype)


def queries_and_keys_together(self, image, text, rotary):
    """As formulations.queries_and_keys, on one tensor that holds both."""
    both = _pair_normed(image, self.norm_q, self.norm_k)
    if text is not None:
        both = _join_tokens((_pair_normed(text, self.norm_added_q, self.norm_added_k), both))
    if rotary is not None:
        both = rotate(both, *rotary)
    return _two_halves(swap_heads(both))


def attend(self, query, key, value, scale):
    return _attention(query, key, value, scale)
