"""Optimizers over one flat vector of all LoRA weights, and learning-rate schedules as functions of the step.

A LoRA has hundreds of small tensors. Joined into one vector, an update is a dozen operators instead of thousands,
and one all-reduce, one norm and one finite check serve for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from flux_db.settings.schema import OptimConfig, TextEncoderConfig

# Primitives under a HyperMap: a Python loop in graph mode nests a call per round and fails at some hundred tensors,
# and tensor methods compile several times slower.
_map = ops.HyperMap()
_reshape, _slice, _assign = ops.Reshape(), ops.Slice(), ops.Assign()
_concat, _cast = ops.Concat(), ops.Cast()
_select, _greater = ops.Select(), ops.Greater()

# --- optimizers --------------------------------------------------------------------------------------------------


def _flat(tensor):
    return _reshape(tensor, (-1,))


def _assign_piece(flat, parameter, start, size):
    return _assign(parameter, _reshape(_slice(flat, (start,), (size,)), parameter.shape))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors end to end in one vector, in fp32."""
    return _cast(_concat(_map(_flat, tensors)), ms.float32)


class SecondPart(NamedTuple):
    """The tensors at the end of the vector that have a learning rate and weight decay of their own."""

    tensors: int
    weight_decay: float


class FixedSum(nn.Cell):
    """The sum of a vector, first in rows and then of the rows: the same bits every time.

    MindSpore's CPU kernel divides one long vector among threads, not always in the same way. The last bit of the
    gradient's norm then changes from run to run and from rank to rank, and by clipping reaches the weights.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        width = math.isqrt(length - 1) + 1
        self.rows = -(-length // width)
        self.width = width
        self.padding = Tensor(np.zeros(self.rows * width - length), ms.float32)
        self.is_padded = self.rows * width > length

    def construct(self, x: Tensor) -> Tensor:
        if self.is_padded:
            x = _concat((x, self.padding))
        return ops.ReduceSum()(ops.ReduceSum()(_reshape(x, (self.rows, self.width)), 1))


class FlatOptimizer(nn.Cell):
    """Holds the trainable weights and the optimizer's state; `construct(gradient, lr, apply)` makes one update.

    The weights are one flat vector in fp32. The layers' own parameters are copies of its pieces, in the type that they
    compute in. With `apply` false a call changes nothing: neither weights, nor moments, nor the count of updates.
    `factors` are for each tensor what its learning rate is multiplied by; they follow from the settings, so they are no
    part of the state.
    """

    state_names = ("updates", "bias_correction1", "bias_correction2", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Sequence[Parameter],
        config: OptimConfig,
        values: Sequence[np.ndarray] | None = None,
        second: SecondPart | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple(params)
        self.dtype = params[0].dtype
        self.shapes = tuple(tuple(p.shape) for p in params)
        self.sizes = tuple(int(np.prod(shape)) for shape in self.shapes)
        self.starts = tuple(int(start) for start in np.cumsum((0, *self.sizes[:-1])))
        self.weights = self._state("weights", _joined(values or [p.astype(ms.float32).asnumpy() for p in params]))
        self.sum = FixedSum(sum(self.sizes))
        self.beta1, self.beta2 = config.adam_beta1, config.adam_beta2
        # taken here in double: the graph would compute 1 - beta in fp32, which is wrong by 1e-5 for beta 0.999
        self.rest1, self.rest2 = 1.0 - self.beta1, 1.0 - self.beta2
        self.eps, self.weight_decay = config.adam_epsilon, config.adam_weight_decay
        self.has_second = second is not None
        self.second_decay = second.weight_decay if second else 0.0
        self.second_size = sum(self.sizes[len(self.sizes) - second.tensors :]) if second else 0
        self.repeat_first = ops.BroadcastTo((sum(self.sizes) - self.second_size,))
        self.repeat_second = ops.BroadcastTo((max(1, self.second_size),))
        self.one = Tensor(1.0, ms.float32)
        self.has_factors = factors is not None
        # a parameter, and no constant: stored graphs would hold as many numbers as the LoRA has
        self.rate_factors = None
        if factors is not None:
            self.rate_factors = self._state("rate_factors", np.repeat(np.asarray(factors, np.float32), self.sizes))
        self.updates = self._state("updates", 0.0)
        # 1 - beta^t, kept as the running mean of ones: the CPU's exp, expm1 and tanh are wrong by up to 1e-4 here
        self.bias_correction1 = self._state("bias_correction1", 0.0)
        self.bias_correction2 = self._state("bias_correction2", 0.0)
        self.exp_avg = self._state("exp_avg", np.zeros(sum(self.sizes), np.float32))
        self.exp_avg_sq = self._state("exp_avg_sq", np.zeros(sum(self.sizes), np.float32))
        self.has_ema = config.ema_decay is not None
        if self.has_ema:
            self.ema_rest = 1.0 - config.ema_decay
            self.ema = self._state("ema", self.weights.asnumpy())

    def _state(self, name: str, value: float | np.ndarray) -> Parameter:
        return Parameter(Tensor(value, ms.float32), name=f"optimizer.{name}", requires_grad=False)

    def state(self) -> dict[str, Parameter]:
        """The state by name: what a checkpoint has to hold besides the weights."""
        return {name: getattr(self, name) for name in self.state_names}

    def values(self, *, averaged: bool = False) -> list[np.ndarray]:
        """The weights in fp32, each in its shape, in the order of the parameters; or their running average."""
        pieces = np.split((self.ema if averaged else self.weights).asnumpy().copy(), self.starts[1:])
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def take_over(self, values: Sequence[np.ndarray], average: Sequence[np.ndarray] | None = None) -> None:
        """Go on from these weights, which the layers have already, and their average; without one it starts here."""
        ops.assign(self.weights, Tensor(_joined(values)))
        if self.has_ema:
            ops.assign(self.ema, Tensor(_joined(average or values)))

    @contextmanager
    def average_in_layers(self) -> Iterator[None]:
        """While it lasts, the layers have the average of the weights, if there is one: for validation."""
        if not self.has_ema:
            yield
            return
        self._put_in_layers(self.values(averaged=True))
        try:
            yield
        finally:
            self._put_in_layers(self.values())

    def _put_in_layers(self, values: Sequence[np.ndarray]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            ops.assign(parameter, Tensor(value).astype(parameter.dtype))

    def start_here(self) -> None:
        """For an optimizer that takes over weights of another, once they are in place: its own state is fresh."""

    # With a second part `lr` is [3]: rate of the first, rate of the second, and 1 if this step trains the second or 0

    def each(self, first: Tensor, second: Tensor) -> Tensor:
        """One number for each weight: of its part; without a second part one for all."""
        if not self.has_second:
            return first
        return _concat((self.repeat_first(_flat(first)), self.repeat_second(_flat(second))))

    def moved(self, lr: Tensor, apply: Tensor) -> Tensor:
        """Which weights, with their moments, change."""
        if not self.has_second:
            return apply
        return ops.logical_and(apply, _greater(self.each(self.one, lr[2]), 0.5))

    def trained(self, gradient: Tensor, lr: Tensor) -> Tensor:
        """The gradient of the weights that this step trains, and 0 for the others: they are no part of its norm."""
        if not self.has_second:
            return gradient
        return _select(_greater(self.each(self.one, lr[2]), 0.5), gradient, ops.zeros_like(gradient))

    def store(self, state: Parameter, value: Tensor, apply: Tensor) -> None:
        ops.assign(state, ops.select(apply, value, state.value()))

    def assign_weights(self, weights: Tensor, updates: Tensor, apply: Tensor) -> None:
        """`updates`: their number with this one."""
        ops.assign(self.weights, weights)
        if self.has_ema:
            share = self.ema_share(updates) * _cast(apply, ms.float32)
            ops.assign(self.ema, self.ema + share * (weights - self.ema))
        _map(ops.partial(_assign_piece, _cast(weights, self.dtype)), self.parameters, self.starts, self.sizes)

    def ema_share(self, updates: Tensor) -> Tensor:
        """Of the new weights in the average: 1 at first, then 9 / (9 + updates), at least 1 - decay.

        As in diffusers' EMAModel with its default warm-up: the start weights leave no trace in a short run.
        """
        share = ops.maximum(9.0 / (updates + 9.0), Tensor(self.ema_rest, ms.float32))
        return ops.select(updates < 1.5, self.one, share)


def _joined(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(value, np.float32).reshape(-1) for value in values])


class AdamW(FlatOptimizer):
    """AdamW with bias correction, the same arithmetic as torch's.

    Where nothing is to move, all shares of the new are 0 and the gradient is left out, which gives the old bits: a
    choice between old and new for each vector would cost as much as its arithmetic.
    """

    def construct(self, gradient: Tensor, lr: Tensor, apply: Tensor) -> Tensor:
        moved = self.moved(lr, apply)
        is_moved = _cast(moved, ms.float32)
        first, second = (lr[0], lr[1]) if self.has_second else (lr, lr)
        rate, decay = self.each(first, second), self.each(first * self.weight_decay, second * self.second_decay)
        if self.has_factors:
            rate, decay = rate * self.rate_factors, decay * self.rate_factors
        updates = self.updates + 1.0
        bias_correction1 = self.beta1 * self.bias_correction1 + self.rest1
        bias_correction2 = self.beta2 * self.bias_correction2 + self.rest2
        root2 = ops.sqrt(bias_correction2)
        gradient = ops.select(moved, gradient, ops.zeros_like(gradient))
        old, m, v = self.weights.value(), self.exp_avg.value(), self.exp_avg_sq.value()
        m = m + (self.rest1 * is_moved) * (gradient - m)
        v = v + (self.rest2 * is_moved) * (gradient * gradient - v)
        step = (rate * is_moved) * (root2 / bias_correction1)
        new = old * (1.0 - decay * is_moved) - step * (m / (ops.sqrt(v) + self.eps * root2))
        self.store(self.updates, updates, apply)
        self.store(self.bias_correction1, bias_correction1, apply)
        self.store(self.bias_correction2, bias_correction2, apply)
        ops.assign(self.exp_avg, m)
        ops.assign(self.exp_avg_sq, v)
        self.assign_weights(new, updates, apply)
        return updates


class Prodigy(FlatOptimizer):
    """Prodigy: AdamW that estimates its own step size d; `learning_rate` is a factor on it, usually 1.

    With the settings its authors recommend for diffusion: decoupled weight decay, bias correction, safeguarded warm-up.
    """

    state_names = (*FlatOptimizer.state_names, "d", "numerator", "s", "start")
    d_0 = 1e-6

    def __init__(
        self,
        params: Sequence[Parameter],
        config: OptimConfig,
        values: Sequence[np.ndarray] | None = None,
        second: SecondPart | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        if factors is not None:
            raise ValueError("Prodigy has one step size for all weights")
        super().__init__(params, config, values, second)
        self.beta3 = math.sqrt(config.adam_beta2)
        self.d = self._state("d", self.d_0)
        self.numerator = self._state("numerator", 0.0)
        self.s = self._state("s", np.zeros(sum(self.sizes), np.float32))
        self.start = self._state("start", self.weights.asnumpy())

    def start_here(self) -> None:
        ops.assign(self.start, Tensor(self.weights.asnumpy()))

    def construct(self, gradient: Tensor, lr: Tensor, apply: Tensor) -> Tensor:
        given, lr = lr, lr[0] if self.has_second else lr  # one step size for both parts
        updates = self.updates + 1.0
        bias_correction1 = self.beta1 * self.bias_correction1 + self.rest1
        bias_correction2 = self.beta2 * self.bias_correction2 + self.rest2
        d = self.d.value()
        step = d * lr * ops.sqrt(bias_correction2) / bias_correction1
        old = self.weights.value()
        numerator = self.beta3 * self.numerator + (d / self.d_0) * step * self.sum(gradient * (self.start - old))
        m = self.beta1 * self.exp_avg + d * self.rest1 * gradient
        v = self.beta2 * self.exp_avg_sq + d * d * self.rest2 * (gradient * gradient)
        s = self.beta3 * self.s + (d / self.d_0) * d * gradient
        total = self.sum(ops.abs(self.trained(s, given)))
        d_new = ops.maximum(d, numerator / total)
        decay = self.each(self.weight_decay * step, self.second_decay * step)
        new = old * (1.0 - decay) - step * m / (ops.sqrt(v) + d_new * self.eps)
        # as in the original, nothing moves at learning rate 0 (the start of a warm-up) or before the first gradient
        apply = ops.logical_and(apply, ops.logical_and(lr > 0.0, total > 0.0))
        moved = self.moved(given, apply)
        self.store(self.updates, updates, apply)
        self.store(self.bias_correction1, bias_correction1, apply)
        self.store(self.bias_correction2, bias_correction2, apply)
        self.store(self.exp_avg, m, moved)
        self.store(self.exp_avg_sq, v, moved)
        self.store(self.numerator, numerator, apply)
        self.store(self.s, s, moved)
        self.store(self.d, d_new, apply)
        self.assign_weights(ops.select(moved, new, old), updates, apply)
        return updates


def build_optimizer(
    params: Sequence[Parameter],
    config: OptimConfig,
    values: Sequence[np.ndarray] | None = None,
    second: SecondPart | None = None,
    factors: Sequence[float] | None = None,
) -> FlatOptimizer:
    """`values` are the weights in fp32 to start from, if the parameters hold them in half precision only."""
    return {"adamw": AdamW, "prodigy": Prodigy}[config.optimizer](params, config, values, second, factors)


# --- learning-rate schedules -------------------------------------------------------------------------------------


def learning_rate(config: OptimConfig, step: int, total_steps: int, scale: float = 1.0) -> float:
    """Learning rate of optimizer step `step` (from 0); defined for every step, also past the end."""
    base, warmup = config.learning_rate * scale, config.lr_warmup_steps
    if config.lr_scheduler == "constant":
        return base
    if step < warmup:
        return base * step / warmup
    if config.lr_scheduler == "constant_with_warmup":
        return base
    end = min(1e-7, base) if config.lr_scheduler == "polynomial" else 0.0  # the floor that diffusers uses
    if step >= total_steps:
        return end
    progress = (step - warmup) / (total_steps - warmup)
    if config.lr_scheduler == "linear":
        return base * (1.0 - progress)
    if config.lr_scheduler == "cosine":
        return base * 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.lr_scheduler == "cosine_with_restarts":
        return base * 0.5 * (1.0 + math.cos(math.pi * ((config.lr_num_cycles * progress) % 1.0)))
    return (base - end) * (1.0 - progress) ** config.lr_power + end


def learning_rates(
    config: OptimConfig, total_steps: int, scale: float = 1.0, text: TextEncoderConfig | None = None
) -> np.ndarray:
    """[total_steps] rates; with `text`, as the optimizer takes them for two parts: [total_steps, 3].

    The text encoder's rate follows the same course. Prodigy has one rate for both.
    """
    rates = np.array([learning_rate(config, step, total_steps, scale) for step in range(total_steps)])
    if text is None:
        return rates.astype(np.float32)
    second = rates if config.optimizer == "prodigy" else rates * (text.text_encoder_lr / (config.learning_rate * scale))
    trained = np.arange(total_steps) < (text.text_encoder_steps or total_steps)
    return np.stack([rates, second, trained], axis=1).astype(np.float32)
