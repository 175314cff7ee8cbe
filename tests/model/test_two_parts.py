"""One vector with two parts: each is updated as if it were alone, with its own rate and decay, and may stop."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from flux_db.model.optim import SecondPart, build_optimizer, learning_rates
from flux_db.settings.schema import OptimConfig, TextEncoderConfig

SHAPES = ((3, 4), (5,), (2, 3))
FIRST, SECOND = 17, 6
"""Elements: the last tensor is the second part."""
STEPS, TRAINED = 4, 3


def starts():
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def gradients():
    return np.random.default_rng(4).standard_normal((STEPS, FIRST + SECOND)).astype(np.float32)


def build(values, second=None, **options):
    params = [Parameter(Tensor(value), name=f"p{i}") for i, value in enumerate(values)]
    return build_optimizer(params, OptimConfig(**options), second=second)


def update(optimizer, gradient, lr):
    optimizer(Tensor(gradient), Tensor(np.array(lr, np.float32)), Tensor(True))


def rows(first, second):
    return [np.array([first, second, step < TRAINED], np.float32) for step in range(STEPS)]


def test_adamw_updates_each_part_as_if_it_were_alone(cpu):
    both = build(starts(), SecondPart(1, 0.3), adam_weight_decay=0.1)
    first = build(starts()[:2], adam_weight_decay=0.1)
    second = build(starts()[2:], adam_weight_decay=0.3)
    for step, (gradient, lr) in enumerate(zip(gradients(), rows(1e-2, 3e-3), strict=True)):
        update(both, gradient, lr)
        update(first, gradient[:FIRST], lr[0])
        if step < TRAINED:
            update(second, gradient[FIRST:], lr[1])
    alone = np.concatenate([first.weights.asnumpy(), second.weights.asnumpy()])
    assert np.abs(both.weights.asnumpy() - alone).max() <= 1e-7
    for name in ("exp_avg", "exp_avg_sq"):
        wanted = np.concatenate([getattr(one, name).asnumpy() for one in (first, second)])
        assert np.array_equal(getattr(both, name).asnumpy(), wanted)
    assert np.array_equal(both.parameters[2].asnumpy().ravel(), both.weights.asnumpy()[FIRST:])


def test_prodigy_finds_one_step_size_for_both(cpu):
    whole = build(starts(), optimizer="prodigy", adam_weight_decay=0.1)
    both = build(starts(), SecondPart(1, 0.1), optimizer="prodigy", adam_weight_decay=0.1)
    for step, (gradient, lr) in enumerate(zip(gradients(), rows(1.0, 1.0), strict=True)):
        before = both.weights.asnumpy().copy()
        update(whole, gradient, lr[0])
        update(both, gradient, lr)
        moved = both.weights.asnumpy() != before
        if step < TRAINED:
            assert np.array_equal(both.weights.asnumpy(), whole.weights.asnumpy())
            assert float(both.d.asnumpy()) == float(whole.d.asnumpy())
    assert moved[:FIRST].any() and not moved[FIRST:].any(), "after its last step the second part stays as it is"


@pytest.mark.parametrize("on", [True, False])
def test_a_part_that_is_not_trained_is_no_part_of_the_gradient(cpu, on):
    optimizer = build(starts(), SecondPart(1, 0.0))
    gradient = gradients()[0]
    gradient[-1] = np.nan

    class Trained(ms.nn.Cell):
        def construct(self, gradient, lr):
            return optimizer.trained(gradient, lr)

    found = Trained()(Tensor(gradient), Tensor(np.array([1, 1, on], np.float32))).asnumpy()
    assert np.array_equal(found[:FIRST], gradient[:FIRST])
    assert np.isnan(found[-1]) == on and (on or not found[FIRST:].any())


def test_learning_rates_of_both_parts_follow_one_course():
    config = OptimConfig(learning_rate=1e-3, lr_scheduler="cosine", lr_warmup_steps=2)
    text = TextEncoderConfig(train_text_encoder=True, text_encoder_lr=5e-6, text_encoder_steps=7)
    found = learning_rates(config, 10, 4.0, text)
    assert found.shape == (10, 3) and found[2, 0] == np.float32(4e-3) and found[2, 1] == np.float32(5e-6)
    assert np.allclose(found[:, 1] / 5e-6, found[:, 0] / 4e-3, atol=1e-6)
    assert found[:, 2].tolist() == [1] * 7 + [0] * 3
    assert np.array_equal(learning_rates(config, 10, 4.0), found[:, 0])
    prodigy = OptimConfig(optimizer="prodigy", learning_rate=1.0)
    assert learning_rates(prodigy, 2, 1.0, text)[0].tolist() == [1, 1, 1]
