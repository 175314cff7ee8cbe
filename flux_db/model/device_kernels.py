"""Where the CPU and Ascend do the same in different forms: each with its reason, and nowhere else.

`DIFFERENCES` is the whole list; docs/devices.md repeats it, and a test compares the two.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import ops
from mindspore.ops.auto_generate import RmsNorm, SplitWithSize
from mindspore.ops.operations.nn_ops import FlashAttentionScore

from flux_db.model.cpu_layers import layer_norm, repeated, tanh_gelu

DIFFERENCES = {
    "attention": "Ascend: FlashAttentionScore in the layout BNSD, which the CPU lacks. CPU: two products and a "
    "softmax, with queries and keys normalised and turned together: starting a kernel takes as long as its work",
    "RMSNorm and LayerNorm": "Ascend: a fused kernel each. CPU: none for the first, and for the second one that is ten "
    "times slower than its parts",
    "unequal shapes": "CPU: a vector is repeated first; its sums of unequal shapes are 5 times slower and keep memory",
    "GELU": "Ascend: one fused kernel instead of eight. CPU: its kernel takes ten times as long as the product before",
    "split of tokens": "Ascend: SplitWithSize, whose gradient is one Concat. CPU: two slices, for lack of that kernel",
    "int8 matrices": "Ascend: gathered as they are, and handed over as a view, without which MindSpore copies them. "
    "CPU: gathered as float32, because its AllGather has no int8, "
    "and handed over as they are, because views are copies",
    "mint": "CPU: functions of mindspore.mint that have no CPU kernel, as mindspore.ops. Ascend: mindone's own",
    "Conv2d and GroupNorm": "CPU: mint's layers, which the VAE is made of, have no CPU kernel; from MindSpore 2.9 on "
    "Conv2d is matrix products where the CPU has AVX-512. Ascend: mindone's own",
}

_cast, _add, _mul = ops.Cast(), ops.Add(), ops.Mul()


# --- attention ---------------------------------------------------------------------------------------------------


def attend_on_ascend(self, query, key, value, scale):
    """Flash attention over [B, H, S, D]; the kernel has no float32."""
    dtype = query.dtype
    if dtype == ms.float32:
        query, key, value = _cast(query, ms.float16), _cast(key, ms.float16), _cast(value, ms.float16)
    flash = FlashAttentionScore(head_num=query.shape[1], keep_prob=1.0, scale_value=scale, input_layout="BNSD")
    return _cast(flash(query, key, value, None, None, None, None)[3], dtype)


# --- text and image apart ----------------------------------------------------------------------------------------


def split_tokens_on_cpu(self, x, first, axis):
    """The first tokens and the rest, along an axis of any tensor."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    start = (0,) * x.ndim
    middle = (0,) * axis + (first,) + (0,) * (x.ndim - axis - 1)
    head = ops.Slice()(x, start, (*before, first, *after))
    return head, ops.Slice()(x, middle, (*before, x.shape[axis] - first, *after))


def split_tokens_on_ascend(self, x, first, axis):
    return SplitWithSize()(x, (first, x.shape[axis] - first), axis)


# --- RMSNorm -----------------------------------------------------------------------------------------------------


def rms_norm_on_ascend(self, hidden_states):
    if self.weight is None:
        gain = ops.ones((hidden_states.shape[-1],), hidden_states.dtype)
    else:
        gain = self.weight
        hidden_states = _cast(hidden_states, gain.dtype)
    normed = RmsNorm(self.eps)(hidden_states, gain)[0]
    return normed if self.bias is None else _add(normed, self.bias)


# --- GELU --------------------------------------------------------------------------------------------------------


def gelu(input, *, approximate="none"):
    """For mindspore.mint on the CPU."""
    x = _cast(input, ms.float32)  # in fp16 the square overflows beyond 255, and then its gradient is NaN
    if approximate == "tanh":
        out = tanh_gelu(x)
    else:
        out = _mul(_mul(x, 0.5), _add(ops.Erf()(_mul(x, 0.7071067811865476)), 1.0))
    return _cast(out, input.dtype)


def activate_on_cpu(self, x):
    return gelu(x, approximate="tanh")


def activate_on_ascend(self, x):
    return ops.GeLU()(x)


# --- functions and layers of mindspore.mint that have no CPU kernel ----------------------------------------------


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


def randn(*size):
    """For the start values of layers, which the weight files replace."""
    return ops.StandardNormal()(size)


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    # [B, C, H, W] -> [B, G, C/G*H*W]: normalising a group is a LayerNorm over its row
    rows = input.reshape(input.shape[0], num_groups, -1)
    normed = layer_norm(rows, (rows.shape[-1],), eps=eps).reshape(input.shape)
    per_channel = (1, input.shape[1]) + (1,) * (input.ndim - 2)
    if weight is not None:
        normed = normed * repeated(weight.reshape(per_channel), input.shape)
    return normed if bias is None else ops.BiasAdd()(normed, bias)


def group_norm_construct(self, input):
    return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
