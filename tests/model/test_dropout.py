"""LoRA dropout: exact against numpy, for every shape of input, and random as far as statistics can tell."""

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from flux_db.model import dropout
from flux_db.stream import DROPOUT_MODULUS, dropout_key


def keys(*positions):
    return np.stack([dropout_key(7, position) for position in positions])


def in_numpy(p, layer, key, tokens, channels):
    """[B, tokens, channels] true where a channel is kept, in whole numbers of any size."""
    key_factor, token_factor, addend = dropout.layer_table(layer).astype(np.int64)
    rows = key.astype(np.int64)[:, None] * key_factor
    rows = (rows + dropout.token_table(tokens).astype(np.int64) * token_factor + addend) ** 3 % DROPOUT_MODULUS
    first, second = dropout.channel_table(channels).astype(np.int64)
    value = rows[..., 0:1] * first + rows[..., 1:2] * second + rows[..., 2:3]
    return value % DROPOUT_MODULUS < dropout.threshold(p)


def on_device(p, layer, key, shape, dtype=ms.float32):
    cell = dropout.StepDropout(p, layer, Parameter(Tensor(key), name="key", requires_grad=False)).set_train(True)
    return cell(Tensor(np.ones(shape, np.float32)).astype(dtype)).astype(ms.float32).asnumpy()


@pytest.mark.parametrize("shape", [(3, 40, 64), (3, 64), (3, 1, 64)], ids=["tokens", "rows", "one token"])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_exactly_numpys(cpu, shape, p):
    key = keys(0, 1, 5)
    kept = in_numpy(p, 4, key, shape[1] if len(shape) == 3 else 1, 64).reshape(shape)
    got = on_device(p, 4, key, shape)
    np.testing.assert_array_equal(got > 0, kept)
    np.testing.assert_allclose(got[kept], DROPOUT_MODULUS / dropout.threshold(p), rtol=1e-6)


def test_in_half_precision_the_mask_is_the_same_and_without_training_there_is_none(cpu):
    key = keys(2, 3)
    np.testing.assert_array_equal(on_device(0.3, 1, key, (2, 8, 32), ms.float16) > 0, in_numpy(0.3, 1, key, 8, 32))
    cell = dropout.StepDropout(0.3, 1, Parameter(Tensor(key), name="key", requires_grad=False)).set_train(False)
    assert (cell(Tensor(np.ones((2, 8, 32), np.float32))).asnumpy() == 1.0).all()


def test_every_remainder_is_exact_in_float32():
    x = np.arange(2**21, dtype=np.float32)
    inverse, modulus = np.float32(1.0 / DROPOUT_MODULUS), np.float32(DROPOUT_MODULUS)
    got = x - np.floor((x + np.float32(0.5)) * inverse) * modulus
    np.testing.assert_array_equal(got, np.arange(2**21) % DROPOUT_MODULUS)
    assert 2 * (DROPOUT_MODULUS - 1) ** 2 + DROPOUT_MODULUS < 2**21, "the largest number that comes up"


def correlation(a, b):
    return abs(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1])


def test_share_kept_and_no_correlation_between_examples_layers_tokens_channels_and_steps():
    p, tokens, channels = 0.3, 200, 512
    masks = np.stack([in_numpy(p, layer, keys(*range(4)), tokens, channels) for layer in range(6)]).astype(float)
    deviation = np.sqrt(p * (1 - p))
    assert masks.mean() == pytest.approx(1 - p, abs=5 * deviation / np.sqrt(masks.size) + 0.5 / DROPOUT_MODULUS)
    for axes in ((0, 1, 2), (0, 1, 3), (2, 3)):  # per channel, per token, per layer and example
        means = masks.mean(axis=axes)
        assert means.std() < 1.5 * deviation / np.sqrt(masks.size / means.size)
    noise = 5 / np.sqrt(tokens * channels)
    for one, other in itertools.combinations(masks.reshape(24, tokens, channels), 2):
        assert correlation(one, other) < noise, "layers, examples and steps"
    one = masks[0, 0]
    for shift in (1, 2, 3, 16, 64):
        assert correlation(one[shift:], one[:-shift]) < noise, "tokens"
        assert correlation(one[:, shift:], one[:, :-shift]) < noise, "channels"
