"""The operators of mindone's FLUX models that MindSpore's CPU backend lacks, or runs slowly.

`install()` puts CPU versions in place of mindone's own; `runtime.py` calls it once, and only if the device is a CPU.
On Ascend nothing here is used. Every replacement keeps the signature of what it replaces, so models, checkpoints
and parameter names are the same on both devices.

Formulations are chosen by measured kernel time: `GeLU` and `Pow` take 10 times as long as the products they stand for.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import mindspore.mint.nn.functional as mint_functional
import numpy as np
from mindspore import mint, ops

# Primitives, not tensor methods: they compile several times faster.
_reshape, _transpose, _matmul = ops.Reshape(), ops.Transpose(), ops.MatMul()
_matmul_transposed = ops.MatMul(transpose_b=True)
_bmm = ops.BatchMatMul()
_bmm_transposed = ops.BatchMatMul(transpose_b=True)


# --- functions of mindspore.mint ---------------------------------------------------------------------------------


def arange(start=0, end=None, step=1, *, dtype=None):
    if end is None:
        start, end = 0, start
    return ops.arange(start, end, step, dtype=dtype)


def split(tensor, split_size_or_sections, dim=0):
    return ops.split(tensor, split_size_or_sections, axis=dim)


def chunk(input, chunks, dim=0):
    return ops.chunk(input, chunks, axis=dim)


def outer(input, vec2):
    return input.reshape(-1, 1) * vec2.reshape(1, -1)


def stack(tensors, dim=0):
    return ops.stack(tensors, axis=dim)


def full(size, fill_value, *, dtype=None):
    if dtype is None:  # ops.full would make everything int64
        if isinstance(fill_value, ms.Tensor):
            dtype = fill_value.dtype
        elif isinstance(fill_value, bool):
            dtype = ms.bool_
        else:
            dtype = ms.int64 if isinstance(fill_value, int) else ms.float32
    return ops.full(size, fill_value, dtype=dtype)


def zeros(size, *, dtype=None):
    return ops.zeros(size, dtype if dtype is not None else ms.float32)


def ones(size, *, dtype=None):
    return ops.ones(size, dtype if dtype is not None else ms.float32)


def linspace(start, end, steps, *, dtype=None):
    return ops.linspace(start, end, steps).astype(dtype if dtype is not None else ms.float32)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    axis = input.ndim - len(normalized_shape)  # the kernel takes no negative axis but -1
    gain = ops.ones(normalized_shape, input.dtype) if weight is None else weight
    shift = ops.zeros(normalized_shape, input.dtype) if bias is None else bias
    return ops.LayerNorm(axis, axis, eps)(input, gain, shift)[0]


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    # [B, C, H, W] -> [B, G, C/G*H*W]: normalising a group is a LayerNorm over its row
    rows = input.reshape(input.shape[0], num_groups, -1)
    normed = layer_norm(rows, (rows.shape[-1],), eps=eps).reshape(input.shape)
    per_channel = (1, input.shape[1]) + (1,) * (input.ndim - 2)
    if weight is not None:
        normed = normed * weight.reshape(per_channel)
    if bias is not None:
        normed = normed + bias.reshape(per_channel)
    return normed


def gelu(input, *, approximate="none"):
    x = input.astype(ms.float32)  # in fp16 the square overflows beyond 255, and then its gradient is NaN
    if approximate == "tanh":
        # 0.5 x (1 + tanh(u)) = x sigmoid(2u), with 2u = sqrt(8/pi) (x + 0.044715 x^3)
        out = x * ops.sigmoid(x * (1.5957691216057308 + 0.07135481282553254 * (x * x)))
    else:
        out = 0.5 * x * (1.0 + ops.erf(x * 0.7071067811865476))
    return out.astype(input.dtype)


# --- `construct` of layers ---------------------------------------------------------------------------------------


def linear_construct(self, x):
    # [..., K] -> [rows, K] x [N, K]^T -> [..., N]
    out = _matmul_transposed(_reshape(x, (-1, x.shape[-1])), self.weight)
    if self.bias is not None:
        out = out + self.bias
    return _reshape(out, (*x.shape[:-1], out.shape[-1]))


def layer_norm_construct(self, input):
    return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def group_norm_construct(self, input):
    return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


def conv2d_construct(self, input):
    out = ops.conv2d(
        input,
        self.weight,
        stride=self.stride,
        pad_mode="pad",
        padding=self.padding,
        dilation=self.dilation,
        groups=self.groups,
    )
    return out if self.bias is None else out + self.bias.reshape(1, -1, 1, 1)


@ops.constexpr
def _averager(dim):
    return ms.Tensor(np.full((dim, 1), 1.0 / dim, np.float32))


def _mean_square(x):
    """Mean of squares over the last axis, kept; as a product, because the gradient of ReduceMean is slow."""
    rows = _reshape(x, (-1, x.shape[-1]))
    return _reshape(_matmul(rows * rows, _averager(x.shape[-1])), (*x.shape[:-1], 1))


def rms_norm_construct(self, hidden_states):
    x = hidden_states.astype(ms.float32)
    normed = x * ops.rsqrt(_mean_square(x) + self.eps)
    if self.weight is None:
        return normed.astype(hidden_states.dtype)
    if self.weight.dtype != ms.float32:
        normed = normed.astype(self.weight.dtype)
    normed = normed * self.weight
    return normed if self.bias is None else normed + self.bias


def ada_layer_norm_zero_construct(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = ops.chunk(self.linear(self.silu(emb)), 6, 1)
    x = self.norm(x) * (1 + scale_msa.expand_dims(1)) + shift_msa.expand_dims(1)
    return x, gate_msa, shift_mlp, scale_mlp, gate_mlp


def ada_layer_norm_zero_single_construct(self, x, emb=None):
    shift_msa, scale_msa, gate_msa = ops.chunk(self.linear(self.silu(emb)), 3, 1)
    return self.norm(x) * (1 + scale_msa.expand_dims(1)) + shift_msa.expand_dims(1), gate_msa


@ops.constexpr
def _rotary_tables(axes_dim, theta):
    """Per channel its frequency [D], and one-hot rows [axes, D] that say which position axis it turns with."""
    frequencies = [np.repeat(theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim), 2) for dim in axes_dim]
    rows = np.repeat(np.eye(len(axes_dim)), axes_dim, axis=1)
    return ms.Tensor(np.concatenate(frequencies), ms.float32), ms.Tensor(rows, ms.float32)


def flux_pos_embed_construct(self, ids):
    frequencies, rows = _rotary_tables(self.axes_dim, self.theta)
    # [S, axes] x [axes, D] -> [S, D]
    angles = ops.matmul(ids.astype(ms.float32), rows) * frequencies
    return ops.cos(angles), ops.sin(angles)


# --- timesteps ---------------------------------------------------------------------------------------------------


@ops.constexpr
def _timestep_frequencies(half_dim, downscale_freq_shift):
    """[half_dim] frequencies. In numpy: the CPU's exp is wrong by 4e-6, and guidance 3.5 multiplies that by 3500."""
    # exponents in float32 as in the original, so that they round as they do there
    exponent = np.float32(-math.log(10000)) * np.arange(half_dim, dtype=np.float32)
    exponent = exponent / np.float32(half_dim - downscale_freq_shift)
    return ms.Tensor(np.exp(exponent.astype(np.float64)), ms.float32)


def timesteps_construct(self, timesteps):
    frequencies = _timestep_frequencies(self.num_channels // 2, self.downscale_freq_shift)
    # [B, 1] x [D/2] -> [B, D/2]
    angles = self.scale * (timesteps.astype(ms.float32).reshape(-1, 1) * frequencies)
    pair = (ops.cos(angles), ops.sin(angles)) if self.flip_sin_to_cos else (ops.sin(angles), ops.cos(angles))
    return ops.concat(pair, -1)


# --- T5 ----------------------------------------------------------------------------------------------------------


def relative_buckets(query_length: int, key_length: int, num_buckets: int, max_distance: int) -> np.ndarray:
    """[query, key] bucket of each distance, both ways. In numpy: the CPU's log puts 16, 32 and 64 one bucket low."""
    distance = np.arange(key_length)[None, :] - np.arange(query_length)[:, None]
    half = num_buckets // 2
    exact = half // 2
    size = np.maximum(np.abs(distance), 1)
    # float32 as in the original, so that ties fall as they do there
    ratio = np.log(size.astype(np.float32) / exact) / np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (ratio * np.float32(half - exact)).astype(np.int64), half - 1)
    return ((distance > 0) * half + np.where(np.abs(distance) < exact, np.abs(distance), far)).astype(np.int32)


@ops.constexpr
def _bucket_table(query_length, key_length, num_buckets, max_distance):
    return ms.Tensor(relative_buckets(query_length, key_length, num_buckets, max_distance))


def t5_compute_bias(self, query_length, key_length, cache_position=None):
    # an encoder's queries are its keys; mindone hands query_length over as a tensor
    buckets = _bucket_table(
        key_length, key_length, self.relative_attention_num_buckets, self.relative_attention_max_distance
    )
    return _transpose(self.relative_attention_bias(buckets), (2, 0, 1)).expand_dims(0)  # [1, H, query, key]


# --- attention ---------------------------------------------------------------------------------------------------


def softmax_attention(query, key, value, scale):
    """Plain attention over [B, H, S, D]; FlashAttentionScore exists on Ascend only."""
    scores = _bmm_transposed(query * scale, key)
    return _bmm(ops.softmax(scores.astype(ms.float32), -1).astype(value.dtype), value)


@ops.constexpr
def _quarter_turn(dim):
    """[D, D] matrix that takes each channel pair (a, b) to (-b, a)."""
    turn = np.zeros((dim, dim), np.float32)
    even = np.arange(0, dim, 2)
    turn[even + 1, even], turn[even, even + 1] = -1.0, 1.0
    return ms.Tensor(turn)


def rotate(x, cos, sin):
    """Rotary embedding of [B, S, H, D] with [S, D] tables; a constant product beats slicing every other channel."""
    x32 = x.astype(ms.float32)
    turned = _reshape(_matmul(_reshape(x32, (-1, x.shape[-1])), _quarter_turn(x.shape[-1])), x.shape)
    return (x32 * cos.expand_dims(1) + turned * sin.expand_dims(1)).astype(x.dtype)


def _heads(x, heads):
    return _reshape(x, (x.shape[0], x.shape[1], heads, -1))  # [B, S, H*D] -> [B, S, H, D]


def _swap(x):
    return _transpose(x, (0, 2, 1, 3))  # [B, S, H, D] <-> [B, H, S, D]


def flux_attention_call(
    self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
):
    if attention_mask is not None:
        raise ValueError("the CPU version of FLUX's attention takes no mask")
    query = attn.norm_q(_heads(attn.to_q(hidden_states), attn.heads))
    key = attn.norm_k(_heads(attn.to_k(hidden_states), attn.heads))
    value = _heads(attn.to_v(hidden_states), attn.heads)
    if attn.added_kv_proj_dim is not None:
        text_query = attn.norm_added_q(_heads(attn.add_q_proj(encoder_hidden_states), attn.heads))
        text_key = attn.norm_added_k(_heads(attn.add_k_proj(encoder_hidden_states), attn.heads))
        text_value = _heads(attn.add_v_proj(encoder_hidden_states), attn.heads)
        query = ops.concat((text_query, query), 1)
        key = ops.concat((text_key, key), 1)
        value = ops.concat((text_value, value), 1)
    if image_rotary_emb is not None:
        cos, sin = image_rotary_emb
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    # [B, S, H, D] -> [B, H, S, D] -> attention -> [B, S, H*D]
    out = softmax_attention(_swap(query), _swap(key), _swap(value), attn.scale)
    out = _reshape(_swap(out), (query.shape[0], query.shape[1], -1))
    if encoder_hidden_states is None:
        return out
    text_length = encoder_hidden_states.shape[1]
    text, image = ops.split(out, [text_length, out.shape[1] - text_length], 1)
    return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


def scaled_dot_product_attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """The VAE's attention: [B, H, S, D], never masked."""
    if attn_mask is not None:
        raise ValueError("the CPU version of the attention takes no mask")
    return softmax_attention(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)


# --- putting them in place ---------------------------------------------------------------------------------------


def install() -> None:
    """Put the CPU versions in place of mindone's; before any model is built."""
    for owner, name, replacement in _replacements():
        setattr(owner, name, replacement)


def _replacements() -> list[tuple[Any, str, Any]]:
    # mindone is imported here because importing it already runs mint operators
    from mindone.diffusers.models import attention_processor, embeddings, normalization
    from mindone.diffusers.models.transformers import transformer_flux
    from mindone.transformers.models.t5 import modeling_t5

    functions = (arange, split, chunk, outer, stack, full, zeros, ones, linspace)
    return [
        *((mint, function.__name__, function) for function in functions),
        *((mint_functional, function.__name__, function) for function in (layer_norm, group_norm, gelu)),
        (mint.nn.Linear, "construct", linear_construct),
        (mint.nn.LayerNorm, "construct", layer_norm_construct),
        (mint.nn.GroupNorm, "construct", group_norm_construct),
        (mint.nn.Conv2d, "construct", conv2d_construct),
        (normalization.RMSNorm, "construct", rms_norm_construct),
        (normalization.AdaLayerNormZero, "construct", ada_layer_norm_zero_construct),
        (normalization.AdaLayerNormZeroSingle, "construct", ada_layer_norm_zero_single_construct),
        (transformer_flux.FluxPosEmbed, "construct", flux_pos_embed_construct),
        (transformer_flux.FluxAttnProcessor, "__call__", flux_attention_call),
        (embeddings.Timesteps, "construct", timesteps_construct),
        (modeling_t5.T5Attention, "compute_bias", t5_compute_bias),
        (attention_processor.Attention, "scaled_dot_product_attention", scaled_dot_product_attention),
    ]
