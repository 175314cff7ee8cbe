"""The operators that training is made of, computed on the device and compared with numpy.

`attention`, `rms_norm`, `gelu` and `dropout_reference` are the only places that know how the model computes these.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from flux_db.doctor.result import Row, judged, not_here, timed
from flux_db.model import cpu_layers, device_kernels, dropout, formulations
from flux_db.model.optim import FixedSum, flatten
from flux_db.model.runtime import DTYPES, Runtime

HEAD_SIZE = 128
TENSORS = 684
"""Of a LoRA in all attention and feed-forward layers of FLUX.1-dev: two in each of 342 layers."""

# Rounding of the inputs' precision, with room for the order of sums.
TOLERANCE = {"no": 1e-5, "fp16": 5e-3, "bf16": 4e-2}


# --- how the model computes ------------------------------------------------------------------------------------------


def attention(device: str) -> Callable[..., Tensor]:
    """(cell, query, key, value, scale) over [B, H, S, D]."""
    return cpu_layers.attend if device == "CPU" else device_kernels.attend_on_ascend


def rms_norm(device: str) -> Callable[..., Tensor]:
    """(cell with weight, bias and eps, x)"""
    return cpu_layers.rms_norm if device == "CPU" else device_kernels.rms_norm_on_ascend


def gelu(device: str) -> Callable[..., Tensor]:
    """(cell, x)"""
    return device_kernels.activate_on_cpu if device == "CPU" else device_kernels.activate_on_ascend


def dropout_reference(p: float, layer: int, key: np.ndarray, tokens: int, channels: int) -> np.ndarray:
    """Which entries [B, tokens, channels] are kept, in whole numbers."""
    key_factor, token_factor, addend = dropout.layer_table(layer).astype(np.int64)
    per_token = dropout.token_table(tokens).astype(np.int64) * token_factor + addend
    state = (key.astype(np.int64)[:, None, :] * key_factor + per_token) % dropout.MODULUS
    r0, r1, r2 = np.split(state**3 % dropout.MODULUS, dropout.NUMBERS, axis=2)
    first, second = dropout.channel_table(channels).astype(np.int64)
    return (r0 * first + r1 * second + r2) % dropout.MODULUS < dropout.threshold(p)


# --- checks ----------------------------------------------------------------------------------------------------------


class Graph(nn.Cell):
    """A function, compiled as the model is."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


# MindSpore compiles named functions; a lambda inside a call it does not find.
START, LENGTH = 1234, 777


def _rows_of(table, numbers):
    return ops.gather(table, numbers, 0)


def _joined(*tensors):
    return flatten(tensors)


def _piece(vector):
    return ops.Slice()(vector, (START,), (LENGTH,))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max())


def as_float32(tensor: Tensor) -> np.ndarray:
    return tensor.astype(ms.float32).asnumpy()


def rounded(array: np.ndarray, precision: str) -> np.ndarray:
    """What the device is given, as the numbers that it is."""
    return as_float32(Tensor(array).astype(DTYPES[precision])).astype(np.float64)


def matmul(precision: str) -> Row:
    a, b = draw(512, 3072), draw(3072, 256, seed=1)
    dtype = DTYPES[precision]
    found = as_float32(Graph(ops.matmul)(Tensor(a).astype(dtype), Tensor(b).astype(dtype)))
    error = relative_error(found, rounded(a, precision) @ rounded(b, precision))
    holds = error <= TOLERANCE[precision]
    return judged(f"matmul, {precision}", holds, f"largest error {error:.1e}", "do not train with this precision here")


def overflow() -> Row:
    """The finite check of every step rests on this."""
    found = as_float32(Graph(ops.mul)(Tensor([60000.0, 1.0], ms.float16), Tensor([60000.0, 2.0], ms.float16)))
    holds = bool(np.isinf(found[0])) and found[1] == 2.0
    return judged("fp16 overflow is Inf", holds, f"60000 * 60000 = {found[0]:g}", "unset MS_ASCEND_CHECK_OVERFLOW_MODE")


class AttentionWithGradient(nn.Cell):
    def __init__(self, device: str, scale: float, weight: Tensor) -> None:
        super().__init__()
        self.attention = attention(device)
        self.scale = scale
        self.weight = weight
        self.gradient = ops.GradOperation(get_all=True)

    def forward(self, query, key, value):
        return self.attention(self, query, key, value, self.scale)

    def total(self, query, key, value):
        return (self.forward(query, key, value) * self.weight).sum()

    def construct(self, query, key, value):
        return self.forward(query, key, value), self.gradient(self.total)(query, key, value)


def attention_reference(query: np.ndarray, key: np.ndarray, value: np.ndarray, weight: np.ndarray) -> list[np.ndarray]:
    """Output, and the gradients of sum(output * weight) for query, key and value, in double."""
    scale = query.shape[-1] ** -0.5
    scores = query @ key.swapaxes(-1, -2) * scale
    exp = np.exp(scores - scores.max(-1, keepdims=True))
    p = exp / exp.sum(-1, keepdims=True)
    dp = weight @ value.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return [p @ value, ds @ key, ds.swapaxes(-1, -2) @ query, p.swapaxes(-1, -2) @ weight]


def attention_at_head_size(device: str, precision: str) -> Row:
    shape = (1, 2, 80, HEAD_SIZE)
    arrays = [draw(*shape, seed=seed) for seed in range(4)]
    dtype = DTYPES[precision]
    query, key, value, weight = (Tensor(array).astype(dtype) for array in arrays)
    out, gradients = AttentionWithGradient(device, HEAD_SIZE**-0.5, weight)(query, key, value)
    wanted = attention_reference(*(rounded(array, precision) for array in arrays))
    errors = [relative_error(as_float32(f), w) for f, w in zip((out, *gradients), wanted, strict=True)]
    names = ("output", "dq", "dk", "dv")
    detail = "errors " + ", ".join(f"{name} {error:.1e}" for name, error in zip(names, errors, strict=True))
    return judged(
        f"attention, head {HEAD_SIZE}, {precision}",
        max(errors) <= TOLERANCE[precision],
        detail,
        "the attention kernel is wrong here: try another CANN version",
    )


class Normed(nn.Cell):
    def __init__(self, device: str, gain: Tensor) -> None:
        super().__init__()
        self.function = rms_norm(device)
        self.weight, self.bias, self.eps = Parameter(gain, name="weight"), None, 1e-6

    def construct(self, x):
        return self.function(self, x)


class Activated(nn.Cell):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.function = gelu(device)

    def construct(self, x):
        return self.function(self, x)


def norm_and_gelu(device: str, precision: str) -> Row:
    """The two kernels that are fused on Ascend."""
    x, gain, dtype = draw(64, HEAD_SIZE), draw(HEAD_SIZE, seed=1), DTYPES[precision]
    given, factor = rounded(x, precision), rounded(gain, precision)
    normed = as_float32(Normed(device, Tensor(gain).astype(dtype))(Tensor(x).astype(dtype)))
    activated = as_float32(Activated(device)(Tensor(x).astype(dtype)))
    wanted = given / np.sqrt((given**2).mean(-1, keepdims=True) + 1e-6) * factor
    inner = math.sqrt(2 / math.pi) * (given + 0.044715 * given**3)
    errors = relative_error(normed, wanted), relative_error(activated, 0.5 * given * (1 + np.tanh(inner)))
    detail = "errors RMSNorm {:.1e}, GELU {:.1e}".format(*errors)
    holds = max(errors) <= TOLERANCE[precision]
    return judged(
        f"RMSNorm and GELU, {precision}", holds, detail, "these kernels are wrong here: try another CANN version"
    )


def int_products() -> Row:
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 46340, (2, 100_000)).astype(np.int32)  # products below 2^31
    wrong = int((Graph(ops.mul)(Tensor(a), Tensor(b)).asnumpy() != a * b).sum())
    return judged(
        "int32 products",
        wrong == 0,
        f"{wrong} of {a.size} wrong",
        "whole numbers are wrong here: try another CANN version",
    )


def dropout_mask() -> Row:
    p, layer = 0.3, 17
    key = np.random.default_rng(5).integers(0, dropout.MODULUS, (2, dropout.NUMBERS)).astype(np.float32)
    parameter = Parameter(Tensor(key), name="dropout_key", requires_grad=False)
    cell = dropout.StepDropout(p, layer, parameter).set_train(True)
    kept = cell(Tensor(np.ones((2, 24, 256), np.float32))).asnumpy() != 0
    wrong = int((kept != dropout_reference(p, layer, key, 24, 256)).sum())
    detail = f"{wrong} of {kept.size} wrong, {kept.mean():.3f} kept"
    return judged("dropout mask", wrong == 0, detail, "do not use --lora_dropout here")


class Buckets(nn.Cell):
    """T5's relative position bias, with each bucket's number as its embedding: the result is the table of buckets."""

    relative_attention_num_buckets = 32
    relative_attention_max_distance = 128

    def __init__(self) -> None:
        super().__init__()
        numbers = np.arange(self.relative_attention_num_buckets, dtype=np.float32)
        table = Tensor(np.stack([numbers, numbers], axis=1))
        self.relative_attention_bias = nn.Embedding(*table.shape, embedding_table=table)

    def construct(self, x):
        return formulations.t5_compute_bias(self, x.shape[0], x.shape[0])


def t5_buckets() -> Row:
    cell = Buckets()
    wanted = formulations.relative_buckets(
        96, 96, cell.relative_attention_num_buckets, cell.relative_attention_max_distance
    )
    found = cell(Tensor(np.zeros(96, np.float32))).asnumpy()
    wrong = int((found != wanted).sum())
    return judged("T5 buckets", wrong == 0, f"{wrong} of {found.size} wrong", "prompts would be encoded wrongly")


def concat_of_a_lora() -> Row:
    tensors = [Tensor(np.full((3, 1 + i % 5), i, np.float32)) for i in range(TENSORS)]
    wanted = np.concatenate([t.asnumpy().reshape(-1) for t in tensors])
    found = Graph(_joined)(*tensors).asnumpy()
    holds = np.array_equal(found, wanted)
    return judged(f"Concat of {TENSORS}", holds, "exact" if holds else "wrong", "the optimizer step would be wrong")


def select_and_slice() -> Row:
    x, y = draw(10_000), draw(10_000, seed=1)
    flag = Tensor(np.array(False))
    chosen = Graph(ops.select)(flag, Tensor(x), Tensor(y)).asnumpy()
    piece = Graph(_piece)(Tensor(x)).asnumpy()
    holds = np.array_equal(chosen, y) and np.array_equal(piece, x[START : START + LENGTH])
    return judged("Select and Slice", holds, "exact" if holds else "wrong", "the optimizer step would be wrong")


def sums_twice() -> Row:
    x = Tensor(draw(2_000_000))
    cell = FixedSum(2_000_000)
    sums = {cell(x).asnumpy().tobytes() for _ in range(4)}
    detail = "the same bits" if len(sums) == 1 else f"{len(sums)} different results"
    return judged("sum, four times", len(sums) == 1, detail, "use --deterministic, or runs cannot be resumed exactly")


def check_all(runtime: Runtime) -> list[Row]:
    # float32 products are rounded on Ascend, so there the precisions of training are checked
    precisions = ("bf16", "fp16") if runtime.device == "Ascend" else ("no", "fp16")
    rows = [timed(f"matmul, {p}", lambda p=p: matmul(p)) for p in precisions]
    rows.append(timed("fp16 overflow is Inf", overflow))
    rows += [
        timed(f"attention, head {HEAD_SIZE}, {p}", lambda p=p: attention_at_head_size(runtime.device, p))
        for p in precisions
    ]
    rows += [timed(f"RMSNorm and GELU, {p}", lambda p=p: norm_and_gelu(runtime.device, p)) for p in precisions]
    if runtime.device == "CPU":
        rows.append(not_here("bf16", "the CPU backend has no bf16 kernels"))
    checks = {
        "int32 products": int_products,
        "dropout mask": dropout_mask,
        "T5 buckets": t5_buckets,
        f"Concat of {TENSORS}": concat_of_a_lora,
        "Select and Slice": select_and_slice,
        "sum, four times": sums_twice,
    }
    return rows + [timed(name, check) for name, check in checks.items()]
