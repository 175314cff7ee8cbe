"""The layers of mindone's FLUX models in graph primitives: the same formulations on the CPU and on Ascend.

Parameters, names and classes stay mindone's; `operators.py` puts these functions in the place of its own. Primitives
and not tensor methods or `mint` functions, for three reasons: they compile several times faster, both devices have
kernels for them, and they keep the scope of the cell that calls them, by which MindSpore decides what it recomputes.

What a device needs in another form is in `device_kernels.py`; the cells below find it as a method of their own.
"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

_reshape, _transpose, _cast, _expand_dims = ops.Reshape(), ops.Transpose(), ops.Cast(), ops.ExpandDims()
_matmul, _matmul_transposed = ops.MatMul(), ops.MatMul(transpose_b=True)
_bmm, _bmm_transposed = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True)
_add, _mul, _sigmoid = ops.Add(), ops.Mul(), ops.Sigmoid()
_slice, _maximum, _minimum, _depend = ops.Slice(), ops.Maximum(), ops.Minimum(), ops.Depend()

# --- layers ------------------------------------------------------------------------------------------------------


def repeated(x, shape):
    """A tensor whose sides are 1 or those of `shape`, for a sum or product with a tensor of that shape."""
    return x


def when_needed(early, x):
    """A tensor that is there before x, and is to be used after x only: a weight, or what modulates a block.

    Devices run a graph in breadth first. What is made of such a tensor alone (a matrix that is whole again, or gathered
    from the devices) would otherwise be made for all blocks at the beginning of a step, and wait there in memory.
    """
    return _depend(early, ops.stop_gradient(x))


def as_argument(weight):
    """A weight for a cell with a gradient of its own: as a view, because MindSpore would copy the weight itself."""
    return _reshape(weight, (1, *weight.shape))


def gatherable(weight):
    """A part of a weight, in a type that devices can gather."""
    return weight


def add_bias(rows, bias):
    """[rows, N] + [N]"""
    return _add(rows, bias)


def linear(x, weight, bias):
    # [..., K] -> [rows, K] x [N, K]^T -> [..., N]
    rows = _matmul_transposed(_reshape(x, (-1, x.shape[-1])), weight)
    if bias is not None:
        rows = add_bias(rows, bias)
    return _reshape(rows, (*x.shape[:-1], weight.shape[0]))


def linear_construct(self, x):
    return linear(x, self.weight, self.bias)


def lora_linear_construct(self, x, *args, **kwargs):
    """The product of the frozen layer and, in the type of the LoRA's weights, its low-rank part."""
    result = self.base_layer(x)
    if self.disable_adapters or self.merged:
        return result
    for name in self.active_adapters:
        if name in self.lora_A.keys():  # noqa: SIM118  (graph mode wants keys())
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            low = linear(self.lora_dropout[name](_cast(x, a.dtype)), a, None)
            part = linear(_mul(low, self.scaling[name]), b, None)
            result = _cast(_add(result, part), result.dtype)
    return result


@ops.constexpr
def _ones(shape, dtype):
    return Tensor(np.ones(shape, np.float32)).astype(dtype)


@ops.constexpr
def _zeros(shape, dtype):
    return Tensor(np.zeros(shape, np.float32)).astype(dtype)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    axis = input.ndim - len(normalized_shape)  # the kernel takes no negative axis but -1
    gain = _ones(tuple(normalized_shape), input.dtype) if weight is None else weight
    shift = _zeros(tuple(normalized_shape), input.dtype) if bias is None else bias
    return ops.LayerNorm(axis, axis, eps)(input, gain, shift)[0]


def layer_norm_construct(self, input):
    return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def silu(x):
    return _mul(x, _sigmoid(x))


def silu_construct(self, x):
    return silu(x)


def modulate(x, scale, shift):
    """[B, S, D] scaled and shifted by [B, D]."""
    factor = repeated(_expand_dims(_add(scale, 1.0), 1), x.shape)
    return _add(_mul(x, factor), repeated(_expand_dims(shift, 1), x.shape))


def modulated_norm(norm, x, scale, shift):
    """[B, S, D] by a norm without weights of its own, then scaled and shifted by [B, D]."""
    return modulate(norm(x), scale, shift)


def gate(x, factor):
    """[B, S, D] scaled by [B, D]."""
    return _mul(repeated(_expand_dims(factor, 1), x.shape), x)


# --- modulated norms ---------------------------------------------------------------------------------------------


# Shifts, scales and gates are kept: they are vectors, and cost a product each to compute again.
_split_two, _split_three, _split_six = (ops.Split(1, parts).recompute(False) for parts in (2, 3, 6))


def ada_layer_norm_zero_construct(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
    if self.emb is not None:
        emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = _split_six(self.linear(when_needed(silu(emb), x)))
    return modulated_norm(self.norm, x, scale_msa, shift_msa), gate_msa, shift_mlp, scale_mlp, gate_mlp


def ada_layer_norm_zero_single_construct(self, x, emb=None):
    shift_msa, scale_msa, gate_msa = _split_three(self.linear(when_needed(silu(emb), x)))
    return modulated_norm(self.norm, x, scale_msa, shift_msa), gate_msa


def ada_layer_norm_continuous_construct(self, x, conditioning_embedding):
    scale, shift = _split_two(self.linear(_cast(silu(conditioning_embedding), x.dtype)))
    return modulated_norm(self.norm, x, scale, shift)


# --- rotary embedding --------------------------------------------------------------------------------------------


@ops.constexpr
def _rotary_tables(axes_dim, theta):
    """Per channel its frequency [D], and one-hot rows [axes, D] that say which position axis it turns with."""
    frequencies = [np.repeat(theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim), 2) for dim in axes_dim]
    rows = np.repeat(np.eye(len(axes_dim)), axes_dim, axis=1)
    return Tensor(np.concatenate(frequencies), ms.float32), Tensor(rows, ms.float32)


def flux_pos_embed_construct(self, ids):
    frequencies, rows = _rotary_tables(self.axes_dim, self.theta)
    # [S, axes] x [axes, D] -> [S, D]
    angles = _mul(_matmul(_cast(ids, ms.float32), rows), frequencies)
    return ops.Cos()(angles), ops.Sin()(angles)


@ops.constexpr
def _quarter_turn(dim, dtype):
    """[D, D] matrix that takes each channel pair (a, b) to (-b, a)."""
    turn = np.zeros((dim, dim), np.float32)
    even = np.arange(0, dim, 2)
    turn[even + 1, even], turn[even, even + 1] = -1.0, 1.0
    return Tensor(turn).astype(dtype)


def rotate(x, cos, sin):
    """Rotary embedding of [B, S, H, D] with [S, D] tables.

    A constant product is quicker than slicing every other channel, and exact in every precision: each sum has one term.
    """
    turn = _quarter_turn(x.shape[-1], x.dtype)
    turned = _reshape(_matmul(_reshape(x, (-1, x.shape[-1])), turn), x.shape)
    straight = _mul(_cast(x, ms.float32), repeated(_expand_dims(cos, 1), x.shape))
    across = _mul(_cast(turned, ms.float32), repeated(_expand_dims(sin, 1), x.shape))
    return _cast(_add(straight, across), x.dtype)


# --- attention ---------------------------------------------------------------------------------------------------


def _heads(x, heads):
    return _reshape(x, (x.shape[0], x.shape[1], heads, -1))  # [B, S, H*D] -> [B, S, H, D]


def swap_heads(x):
    return _transpose(x, (0, 2, 1, 3))  # [B, S, H, D] <-> [B, H, S, D]


def _joined_heads(x):
    return _reshape(swap_heads(x), (x.shape[0], x.shape[2], -1))  # [B, H, S, D] -> [B, S, H*D]


def queries_and_keys(self, image, text, rotary):
    """(queries, keys) of image and text, [B, S, H, D] each: normalised, joined and turned -> two of [B, H, S, D]."""
    query, key = self.norm_q(image[0]), self.norm_k(image[1])
    if text is not None:
        query = ops.Concat(1)((self.norm_added_q(text[0]), query))
        key = ops.Concat(1)((self.norm_added_k(text[1]), key))
    if rotary is not None:
        query, key = rotate(query, *rotary), rotate(key, *rotary)
    return swap_heads(query), swap_heads(key)


def flux_attention_construct(
    self, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
):
    if attention_mask is not None:
        raise ValueError("FLUX's attention takes no mask here")
    image = _heads(self.to_q(hidden_states), self.heads), _heads(self.to_k(hidden_states), self.heads)
    value, text = _heads(self.to_v(hidden_states), self.heads), None
    if self.added_kv_proj_dim is not None:
        text_query, text_key = self.add_q_proj(encoder_hidden_states), self.add_k_proj(encoder_hidden_states)
        text = _heads(text_query, self.heads), _heads(text_key, self.heads)
        value = ops.Concat(1)((_heads(self.add_v_proj(encoder_hidden_states), self.heads), value))
    query, key = self.queries_and_keys(image, text, image_rotary_emb)
    out = self.attend(query, key, swap_heads(value), self.scale)
    if encoder_hidden_states is None:
        return _joined_heads(out)
    # Divided before the heads are joined: the layers below must get the result of a primitive. Gradients that meet at a
    # part of a tuple lose their scope, and MindSpore then recomputes in a circle ("Graph cycle exists").
    text, image = self.split_tokens(out, encoder_hidden_states.shape[1], 2)
    return self.to_out[0](_joined_heads(image)), self.to_add_out(_joined_heads(text))


# Queries of the VAE's attention at a time: all at once, at 1024 px, would be a matrix of 1 GB.
VAE_QUERIES = 4096


def softmax_attention(query, key, value, scale):
    """Plain attention over [B, H, S, D], with the softmax in fp32."""
    scores = _cast(_bmm_transposed(_mul(query, scale), key), ms.float32)
    return _bmm(_cast(ops.Softmax(-1)(scores), value.dtype), value)


def vae_attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """The VAE's attention: [B, H, S, D], never masked, in fp32 on both devices, a part of the queries at a time."""
    if attn_mask is not None:
        raise ValueError("the VAE's attention takes no mask here")
    b, heads, length, width = query.shape
    scale = width**-0.5 if scale is None else scale
    if length <= VAE_QUERIES or length % VAE_QUERIES != 0:
        return softmax_attention(query, key, value, scale)
    parts = ()
    for start in range(0, length, VAE_QUERIES):
        part = _slice(query, (0, 0, start, 0), (b, heads, VAE_QUERIES, width))
        parts += (softmax_attention(part, key, value, scale),)
    return ops.Concat(2)(parts)


# --- blocks ------------------------------------------------------------------------------------------------------
#
# Of a recomputed cell MindSpore keeps the results. It finds them only if the function is called `construct` (hence the
# classes) and ends in primitives with no branch before them. Otherwise all blocks become one part, which is recomputed
# at once and saves nothing. tests/graph reads from the compiled graph that this holds.


def _within_fp16(x):
    """As in the original: what would be infinite in fp16 is its largest number."""
    return _minimum(_maximum(x, -65504.0), 65504.0) if x.dtype == ms.float16 else x


def _feed_forward(self, layers, x):
    return layers[2](self.activate(layers[0].proj(x)))  # between them is a dropout of 0


class DoubleBlock:
    """Image and text with weights of their own, together in the attention.

    The result is joined: of a block with two results that the next one reads, MindSpore finds no gradient for the
    recomputation to wait for, and a device may then recompute in the forward and save nothing.
    """

    def construct(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        image, text = hidden_states, _within_fp16(encoder_hidden_states)
        image_normed, image_gate, image_shift, image_scale, image_mlp_gate = self.norm1(image, emb=temb)
        text_normed, text_gate, text_shift, text_scale, text_mlp_gate = self.norm1_context(text, emb=temb)
        image_out, text_out = self.attn(image_normed, text_normed, None, image_rotary_emb)
        image = _add(image, gate(image_out, image_gate))
        text = _add(text, gate(text_out, text_gate))
        image_normed = modulated_norm(self.norm2, image, image_scale, image_shift)
        text_normed = modulated_norm(self.norm2_context, text, text_scale, text_shift)
        image_out = gate(_feed_forward(self, self.ff.net, image_normed), image_mlp_gate)
        text_out = gate(_feed_forward(self, self.ff_context.net, text_normed), text_mlp_gate)
        return ops.Concat(1)((_add(text, text_out), _add(image, image_out)))


class SingleBlock:
    """Image and text as one sequence; attention and feed-forward side by side."""

    def construct(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        # text and image come joined: mindone joins and divides them in every block
        both = _within_fp16(hidden_states)
        normed, gate_out = self.norm(both, emb=temb)
        mlp = self.activate(self.proj_mlp(normed))
        attention = self.attn(normed, None, None, image_rotary_emb)
        return _add(both, gate(self.proj_out(ops.Concat(2)((attention, mlp))), gate_out))


class Transformer:
    """FLUX.1's transformer, without what this program does not give it: control nets, picture prompts."""

    def construct(
        self,
        hidden_states,
        encoder_hidden_states=None,
        pooled_projections=None,
        timestep=None,
        img_ids=None,
        txt_ids=None,
        guidance=None,
        joint_attention_kwargs=None,
        controlnet_block_samples=None,
        controlnet_single_block_samples=None,
        return_dict=False,
        controlnet_blocks_repeat=False,
    ):
        if return_dict or controlnet_block_samples is not None or controlnet_single_block_samples is not None:
            raise ValueError("the transformer is called with return_dict=False and without control nets here")
        image = self.x_embedder(hidden_states)
        time = _mul(_cast(timestep, image.dtype), 1000.0)
        if guidance is None:
            temb = self.time_text_embed(time, pooled_projections)
        else:
            temb = self.time_text_embed(time, _mul(_cast(guidance, image.dtype), 1000.0), pooled_projections)
        text = self.context_embedder(encoder_hidden_states)
        rotary = self.pos_embed(ops.Concat(0)((txt_ids, img_ids)))
        length = encoder_hidden_states.shape[1]
        both = ops.Concat(1)((text, image))
        for block in self.transformer_blocks:
            text, image = self.split_tokens(both, length, 1)
            both = block(image, text, temb, rotary)
        for block in self.single_transformer_blocks:
            both = block(both, None, temb, rotary)
        image = self.split_tokens(_within_fp16(both), length, 1)[1]
        return (self.proj_out(self.norm_out(image, temb)),)


# --- timesteps ---------------------------------------------------------------------------------------------------


@ops.constexpr
def _timestep_frequencies(half_dim, downscale_freq_shift, scale):
    """[half_dim] frequencies. In numpy: the CPU's exp is wrong by 4e-6, and guidance 3.5 multiplies that by 3500.

    The scale is part of them: of three constants in a product, two of which differ in shape or type, MindSpore 2.8 and
    later rewrite the order for ever while they compile, and guidance is a constant.
    """
    # exponents in float32 as in the original, so that they round as they do there
    exponent = np.float32(-math.log(10000)) * np.arange(half_dim, dtype=np.float32)
    exponent = exponent / np.float32(half_dim - downscale_freq_shift)
    return Tensor(np.exp(exponent.astype(np.float64)) * scale, ms.float32)


def timesteps_construct(self, timesteps):
    frequencies = _timestep_frequencies(self.num_channels // 2, self.downscale_freq_shift, self.scale)
    # [B, 1] x [D/2] -> [B, D/2]
    angles = _mul(_reshape(_cast(timesteps, ms.float32), (-1, 1)), frequencies)
    cos, sin = ops.Cos()(angles), ops.Sin()(angles)
    return ops.Concat(-1)((cos, sin) if self.flip_sin_to_cos else (sin, cos))


# --- T5 ----------------------------------------------------------------------------------------------------------


def relative_buckets(query_length: int, key_length: int, num_buckets: int, max_distance: int) -> np.ndarray:
    """[query, key] bucket of each distance, both ways.

    In numpy: a device's logarithm can be one bit off and puts distances 16, 32 and 64 one bucket low.
    """
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
    return Tensor(relative_buckets(query_length, key_length, num_buckets, max_distance))


def t5_compute_bias(self, query_length, key_length, cache_position=None):
    # an encoder's queries are its keys; mindone hands query_length over as a tensor
    buckets = _bucket_table(
        key_length, key_length, self.relative_attention_num_buckets, self.relative_attention_max_distance
    )
    return _expand_dims(_transpose(self.relative_attention_bias(buckets), (2, 0, 1)), 0)  # [1, H, query, key]
