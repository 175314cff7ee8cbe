"""The operators that training is made of, computed on the device and compared with numpy.

`attention`, `dropout_cell` and `dropout_reference` are the only places that know how the model computes these.
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from flux_db.doctor.result import Row, judged, not_here, timed
from flux_db.model import adapter, operators
from flux_db.model.optim import FixedSum, flatten
from flux_db.model.runtime import DTYPES, Runtime

HEAD_SIZE = 128
TENSORS = 684
"""Of a LoRA in all attention and feed-forward layers of FLUX.1-dev: two in each of 342 layers."""

# Rounding of the inputs' precision, with room for the order of sums.
TOLERANCE = {"no": 1e-5, "fp16": 5e-3, "bf16": 4e-2}


# --- how the model computes ------------------------------------------------------------------------------------------


def attention(device: str, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention over [B, H, S, D], as the model on this device computes it."""
    if device == "CPU":
        return operators.softmax_attention(query, key, value, scale)
    heads = query.shape[1]
    return ops.flash_attention_score(query, key, value, heads, scalar_value=scale, input_layout="BNSD")


def dropout_cell(p: float, layer: int, key: np.ndarray) -> nn.Cell:
    parameter = Parameter(Tensor(key, ms.int32), name="dropout_key", requires_grad=False)
    return adapter.StepDropout(p, layer, parameter).set_train(True)


def dropout_reference(p: float, layer: int, key: np.ndarray, tokens: int, channels: int) -> np.ndarray:
    """Which entries [B, tokens, channels] are kept, in numpy."""
    with np.errstate(over="ignore"):
        state = _mix(key.astype(np.uint32).reshape(-1, 1, 1) + np.uint32(layer * 668265261 % 2**32))
        state = _mix(state + np.arange(tokens, dtype=np.uint32).reshape(1, -1, 1) * np.uint32(374761393))
        state = _mix(state + np.arange(channels, dtype=np.uint32).reshape(1, 1, -1) * np.uint32(1274126177))
    return (state & np.uint32(0xFFFFFF)) < int((1.0 - p) * 2**24)


def _mix(h: np.ndarray) -> np.ndarray:
    h = (h ^ ((h >> np.uint32(15)) & np.uint32(0x1FFFF))) * np.uint32(739982445)
    h = (h ^ ((h >> np.uint32(12)) & np.uint32(0xFFFFF))) * np.uint32(695872825)
    return h ^ ((h >> np.uint32(15)) & np.uint32(0x1FFFF))


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
        self.device = device
        self.scale = scale
        self.weight = weight
        self.gradient = ops.GradOperation(get_all=True)

    def forward(self, query, key, value):
        return attention(self.device, query, key, value, self.scale)

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
    told = "errors " + ", ".join(f"{name} {error:.1e}" for name, error in zip(names, errors, strict=True))
    return judged(
        f"attention, head {HEAD_SIZE}, {precision}",
        max(errors) <= TOLERANCE[precision],
        told,
        "the attention kernel is wrong here: try another CANN version",
    )


def int_products() -> Row:
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 46340, (2, 100_000)).astype(np.int32)  # products below 2^31
    wrong = int((Graph(ops.mul)(Tensor(a), Tensor(b)).asnumpy() != a * b).sum())
    return judged(
        "int32 products", wrong == 0, f"{wrong} of {a.size} wrong", "dropout masks are wrong: no --lora_dropout"
    )


def dropout_mask() -> Row:
    p, layer, key = 0.3, 3, np.array([12345, 2**30 + 7], np.int32)
    x = np.ones((2, 24, 256), np.float32)
    kept = dropout_cell(p, layer, key)(Tensor(x)).asnumpy() != 0
    wrong = int((kept != dropout_reference(p, layer, key, 24, 256)).sum())
    told = f"{wrong} of {kept.size} wrong, {kept.mean():.3f} kept"
    return judged("dropout mask", wrong == 0, told, "do not use --lora_dropout here")


def t5_buckets() -> Row:
    """The embedding of the bucket table: its rows are their numbers, so that the result is the table."""
    length, count = 96, 32
    table = operators.relative_buckets(length, length, count, 128)
    rows = np.repeat(np.arange(count, dtype=np.float32)[:, None], 4, axis=1)
    found = Graph(_rows_of)(Tensor(rows), Tensor(table)).asnumpy()
    wrong = int((found != table[..., None]).sum())
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
    told = "the same bits" if len(sums) == 1 else f"{len(sums)} different results"
    return judged("sum, four times", len(sums) == 1, told, "use --deterministic, or runs cannot be resumed exactly")


def check_all(runtime: Runtime) -> list[Row]:
    # float32 products are rounded on Ascend, so there the precisions of training are checked
    precisions = ("bf16", "fp16") if runtime.device == "Ascend" else ("no", "fp16")
    rows = [timed(f"matmul, {p}", lambda p=p: matmul(p)) for p in precisions]
    rows.append(timed("fp16 overflow is Inf", overflow))
    rows += [
        timed(f"attention, head {HEAD_SIZE}, {p}", lambda p=p: attention_at_head_size(runtime.device, p))
        for p in precisions
    ]
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
