"""LoRA dropout whose mask is a function of (the example's key, layer, token, channel): a step has no randomness inside.

The masks are made on the device by arithmetic with whole numbers below 2^21 in float32: exact everywhere, and made of
operators that run on Ascend's vector units. Shifts and integer products that overflow, of which a hash is usually
made, run on its slow AICPU or are not defined there.

Every row (example, token) has three numbers R below 1019, scrambled from key, layer and token; every channel has a pair
C of its own. A channel is kept if R0 C0 + R1 C1 + R2 modulo 1019 is below a threshold. 1019 is a prime for which the
cube, which scrambles, is one to one.
"""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from flux_db.model import formulations
from flux_db.stream import DROPOUT_MODULUS as MODULUS
from flux_db.stream import DROPOUT_NUMBERS as NUMBERS

_add, _sub, _mul, _floor, _less = ops.Add(), ops.Sub(), ops.Mul(), ops.Floor(), ops.Less()
_reshape, _cast = ops.Reshape(), ops.Cast()


def threshold(p: float) -> int:
    """How many of the MODULUS values mean that a channel is kept."""
    return round((1.0 - p) * MODULUS)


def token_table(tokens: int) -> np.ndarray:
    """[tokens, NUMBERS]; the first rows of a longer table are those of a shorter one."""
    return np.random.Generator(np.random.Philox(1)).integers(0, MODULUS, (tokens, NUMBERS)).astype(np.float32)


def channel_table(channels: int) -> np.ndarray:
    """[2, channels] pairs, no two of them the same."""
    pairs = np.random.Generator(np.random.Philox(2)).permutation(MODULUS**2)[:channels]
    return np.stack([pairs // MODULUS, pairs % MODULUS]).astype(np.float32)


def layer_table(layer: int) -> np.ndarray:
    """[3, NUMBERS]: factor of the key, factor of the token, addend."""
    return np.random.Generator(np.random.Philox(3, counter=layer)).integers(1, MODULUS, (3, NUMBERS)).astype(np.float32)


def _modulo(x):
    """x mod MODULUS for whole numbers 0 <= x < 2^21, exact: the half keeps the quotient away from whole numbers."""
    return _sub(x, _mul(_floor(_mul(_add(x, 0.5), 1.0 / MODULUS)), float(MODULUS)))


def _product(per_token, per_channel, shape):
    return _mul(formulations.repeated(per_token, shape), formulations.repeated(per_channel, shape))


@ops.constexpr
def _layer_constants(layer, tokens, channels):
    key_factor, token_factor, addend = layer_table(layer)
    # what does not depend on the key, [tokens, NUMBERS], reduced already
    per_token = (token_table(tokens) * token_factor + addend) % MODULUS
    return Tensor(key_factor), Tensor(per_token.astype(np.float32)), *map(Tensor, channel_table(channels))


class StepDropout(nn.Cell):
    """Dropout of a LoRA layer's input, [B, D] or [B, tokens, D]; `key` [B, NUMBERS] is set by the training step."""

    def __init__(self, p: float, layer: int, key: Parameter) -> None:
        super().__init__()
        self.threshold = float(threshold(p))
        self.scale = MODULUS / threshold(p)
        self.layer = layer
        self.key = key

    def construct(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        rows = self.key.shape[0]
        tokens = x.shape[1] if x.ndim == 3 else 1
        key_factor, per_token, first, second = _layer_constants(self.layer, tokens, x.shape[-1])
        # [B, 1, NUMBERS] + [tokens, NUMBERS] -> [B, tokens, NUMBERS]
        state = _modulo(_add(_reshape(_mul(self.key, key_factor), (rows, 1, NUMBERS)), per_token))
        state = _modulo(_mul(_modulo(_mul(state, state)), state))
        shape = (rows, tokens, x.shape[-1])
        r0, r1, r2 = ops.Split(2, NUMBERS)(state)
        number = _add(_add(_product(r0, first, shape), _product(r1, second, shape)), formulations.repeated(r2, shape))
        kept = _less(_modulo(number), self.threshold)
        mask = _mul(_cast(kept, x.dtype), self.scale)
        return _mul(x, _reshape(mask, x.shape))
