"""Optimizers against float64 numpy and numbers from torch, schedules against formulas and numbers from diffusers."""

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from flux_db.model.optim import AdamW, FixedSum, FlatOptimizer, Prodigy, build_optimizer, flatten, learning_rate
from flux_db.settings.schema import OptimConfig

SHAPES = ((3, 4), (5,), (2, 1, 3))


def problem(steps, start_size):
    """Start values and gradients for tensors of several shapes; the second starts at zero, as LoRA's B does."""
    rng = np.random.RandomState(11)
    starts = [(start_size * rng.randn(*shape)).astype(np.float32) for shape in SHAPES]
    starts[1][:] = 0.0
    slopes = [rng.randn(*shape) for shape in SHAPES]
    gradients = [
        [((1 + 0.5 * np.sin(i)) * s + 0.3 * rng.randn(*s.shape)).astype(np.float32) * 1e-3 for s in slopes]
        for i in range(steps)
    ]
    return starts, gradients


def joined(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


def build(starts, **options) -> FlatOptimizer:
    params = [Parameter(Tensor(value), name=f"p{i}") for i, value in enumerate(starts)]
    return build_optimizer(params, OptimConfig(**options))


def update(optimizer, gradient, lr, apply=True):
    optimizer(Tensor(gradient, ms.float32), Tensor(lr, ms.float32), Tensor(apply))


def weights(optimizer):
    return [p.asnumpy().copy() for p in optimizer.parameters]


def snapshot(optimizer):
    state = {name: p.asnumpy().tobytes() for name, p in optimizer.state().items()}
    return state | {p.name: p.asnumpy().tobytes() for p in optimizer.parameters}


# --- running average ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "prodigy"])
def test_the_average_is_that_of_diffusers_ema_model(name):
    """Decay 0 at first, then (1 + n) / (10 + n) up to the one asked for; a skipped step leaves it as it is."""
    starts, gradients = problem(steps=8, start_size=0.1)
    optimizer = build(starts, optimizer=name, ema_decay=0.4)
    assert np.array_equal(joined(optimizer.values(averaged=True)), joined(starts))
    plain = build(starts, optimizer=name)
    average, updates = None, 0
    for i, gradient in enumerate(gradients):
        skipped = i == 3
        before = optimizer.ema.asnumpy().copy()
        for one in (optimizer, plain):
            update(one, joined(gradient), 1e-2, apply=not skipped)
        assert np.array_equal(optimizer.weights.asnumpy(), plain.weights.asnumpy()), "the average changes no weight"
        if skipped:
            assert np.array_equal(optimizer.ema.asnumpy(), before)
            continue
        weights, n = optimizer.weights.asnumpy().astype(np.float64), updates
        decay = 0.0 if n == 0 else min(0.4, (1 + n) / (10 + n))
        average = weights if average is None else decay * average + (1 - decay) * weights
        updates += 1
        np.testing.assert_allclose(optimizer.ema.asnumpy(), average, rtol=1e-5, atol=1e-8)


def test_layers_have_the_average_only_while_it_is_asked_for():
    starts, gradients = problem(steps=3, start_size=0.1)
    optimizer = build(starts, ema_decay=0.9)
    for gradient in gradients:
        update(optimizer, joined(gradient), 1e-2)
    own, average = weights(optimizer), optimizer.values(averaged=True)
    with optimizer.average_in_layers():
        assert all(np.array_equal(a, b) for a, b in zip(weights(optimizer), average, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(weights(optimizer), own, strict=True))
    assert not np.array_equal(joined(own), joined(average))


# --- AdamW -------------------------------------------------------------------------------------------------------


def np_adamw(p, gradients, lrs, beta1, beta2, eps, decay):
    """Algorithm of torch.optim.AdamW's documentation, float64. -> p and the two moments"""
    p, m, v = p.astype(np.float64), 0.0, 0.0
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        g = g.astype(np.float64)
        p = p - lr * decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        p = p - lr * m_hat / (np.sqrt(v_hat) + eps)
    return p, m, v


@pytest.mark.parametrize(
    ("beta1", "beta2", "eps", "decay"),
    [(0.9, 0.99, 1e-6, 0.1), (0.9, 0.999, 1e-8, 1e-4), (0.0, 0.95, 1e-3, 0.0), (0.5, 0.9999, 1e-8, 1.0)],
)
def test_adamw_is_torchs_algorithm(beta1, beta2, eps, decay):
    starts, gradients = problem(steps=20, start_size=0.1)
    lrs = [1e-2 * (1 + i) / 20 for i in range(20)]
    optimizer = build(starts, adam_beta1=beta1, adam_beta2=beta2, adam_epsilon=eps, adam_weight_decay=decay)
    assert isinstance(optimizer, AdamW)
    for gradient, lr in zip(gradients, lrs, strict=True):
        update(optimizer, joined(gradient), lr)
    got, m, v = weights(optimizer), [], []
    for i, start in enumerate(starts):
        wanted, *moments = np_adamw(start, [g[i] for g in gradients], lrs, beta1, beta2, eps, decay)
        m.append(moments[0])
        v.append(moments[1])
        assert np.abs(wanted - start).max() > 1e-3
        np.testing.assert_allclose(got[i], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(optimizer.exp_avg.asnumpy(), joined(m), rtol=1e-5, atol=1e-6 * np.abs(joined(m)).max())
    np.testing.assert_allclose(optimizer.exp_avg_sq.asnumpy(), joined(v), rtol=3e-6)
    assert optimizer.updates.asnumpy() == 20
    if (beta1, beta2) == (0.9, 0.99):
        # torch 2.13.0, torch.optim.AdamW in float64 on the same numbers
        golden = [0.0797595033713999, -0.09304655718943114, 0.16767746799936345]
        np.testing.assert_allclose([got[0][0, 0], got[1][4], got[2][1, 0, 2]], golden, rtol=1e-5)


def test_adamw_with_a_factor_for_each_tensor_is_one_adamw_for_each(cpu):
    """As torch's parameter groups: a factor is on the learning rate, and so on the decay too."""
    starts, gradients = problem(4, 1.0)
    factors, lrs = (0.5, 1.0, 16.0), (1e-2, 3e-3, 1e-2, 2e-3)
    params = [Parameter(Tensor(value), name=f"p{i}") for i, value in enumerate(starts)]
    optimizer = build_optimizer(params, OptimConfig(adam_weight_decay=0.1), factors=factors)
    assert "rate_factors" not in optimizer.state(), "follows from the settings"
    for gradient, lr in zip(gradients, lrs, strict=True):
        update(optimizer, joined(gradient), lr)
    for i, (start, factor) in enumerate(zip(starts, factors, strict=True)):
        own = [step[i] for step in gradients]
        expected = np_adamw(start, own, [lr * factor for lr in lrs], 0.9, 0.999, 1e-8, 0.1)[0]
        np.testing.assert_allclose(weights(optimizer)[i], expected, rtol=2e-6, atol=1e-7)
    with pytest.raises(ValueError, match="one step size"):
        build_optimizer(params, OptimConfig(optimizer="prodigy"), factors=factors)


# --- Prodigy -----------------------------------------------------------------------------------------------------


def np_prodigy(p, gradients, lrs, beta1, beta2, eps, decay, d0=1e-6):
    """prodigyopt with decouple, use_bias_correction and safeguard_warmup on; on one vector, float64. -> p and d's"""
    p = p.astype(np.float64)
    p0, m, v, s = p.copy(), np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    beta3, d, d_max, numerator, k, course = math.sqrt(beta2), d0, d0, 0.0, 0, []
    for g, lr in zip(gradients, lrs, strict=True):
        if lr > 0:
            g = g.astype(np.float64)
            dlr = d * lr * math.sqrt(1 - beta2 ** (k + 1)) / (1 - beta1 ** (k + 1))
            numerator = beta3 * numerator + d / d0 * dlr * np.dot(g, p0 - p)
            m = beta1 * m + d * (1 - beta1) * g
            v = beta2 * v + d * d * (1 - beta2) * g * g
            s = beta3 * s + d / d0 * d * g
            d_hat = numerator / np.abs(s).sum()
            if d == d0:
                d = max(d, d_hat)
            d_max = max(d_max, d_hat)
            d = d_max
            p = p - decay * dlr * p - dlr * m / (np.sqrt(v) + d * eps)
            k += 1
        course.append(d)
    return p, course


@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_prodigy_is_prodigyopts_algorithm(eps):
    starts, gradients = problem(steps=30, start_size=1e-3)
    lrs = [min(i, 4) / 4 for i in range(30)]  # a warm-up from 0
    optimizer = build(starts, optimizer="prodigy", adam_beta2=0.99, adam_weight_decay=0.01, adam_epsilon=eps)
    assert isinstance(optimizer, Prodigy)
    flat = [joined(gradient) for gradient in gradients]
    wanted, course = np_prodigy(joined(starts), flat, lrs, 0.9, 0.99, eps, 0.01)
    for i, (gradient, lr) in enumerate(zip(flat, lrs, strict=True)):
        update(optimizer, gradient, lr)
        # while the weights have moved by 1e-6 only, their fp32 rounding shows in d
        assert optimizer.d.asnumpy() == pytest.approx(course[i], rel=1e-3), i
    assert course[-1] > 20 * course[0]
    got = weights(optimizer)
    moved, should = joined(got) - joined(starts), wanted - joined(starts)
    np.testing.assert_allclose(moved, should, rtol=1e-3, atol=1e-3 * np.abs(should).max())
    assert optimizer.updates.asnumpy() == 29  # not 30: the step at learning rate 0 does not count
    if eps == 1e-8:
        # prodigyopt 1.1.2 on torch 2.13.0 in float64, on the same numbers
        assert course[9::10] == pytest.approx([1.2409649282661277e-06, 1.1031200373399047e-05, 0.00012111306653999169])
        golden = [0.0012582959069267403, -0.0004706590091140432, 0.001203042109627034]
        np.testing.assert_allclose([got[0][0, 0], got[1][4], got[2][1, 0, 2]], golden, rtol=1e-3)


def test_prodigy_finds_its_step_size():
    rng = np.random.RandomState(2)
    target, stiffness = rng.randn(23), rng.uniform(0.5, 2.0, 23)
    starts, _ = problem(steps=0, start_size=1e-3)
    optimizer = build(starts, optimizer="prodigy", adam_weight_decay=0.0)

    def loss():
        return 0.5 * (stiffness * (joined(weights(optimizer)) - target) ** 2).sum()

    first = loss()
    for _ in range(200):
        update(optimizer, stiffness * (joined(weights(optimizer)) - target), 1.0)
    assert loss() < first / 100
    assert 0.01 < optimizer.d.asnumpy() < 10.0


# --- both --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "prodigy"])
def test_a_step_that_is_not_applied_changes_no_bit(name):
    starts, gradients = problem(steps=3, start_size=0.1)
    optimizer = build(starts, optimizer=name, adam_weight_decay=0.1)
    for gradient in gradients[:2]:
        update(optimizer, joined(gradient), 0.5)
    before = snapshot(optimizer)
    bad = joined(gradients[2])
    update(optimizer, bad, 0.5, apply=False)
    assert snapshot(optimizer) == before
    for value in (np.nan, np.inf):
        bad[3] = value
        update(optimizer, bad, 0.5, apply=False)
        assert snapshot(optimizer) == before
    update(optimizer, joined(gradients[2]), 0.5)
    after = snapshot(optimizer)
    unchanged = {key for key in before if before[key] == after[key]}
    assert unchanged <= {"start", "d"}
    assert optimizer.updates.asnumpy() == 3


def test_prodigy_waits_for_a_learning_rate_and_a_gradient():
    starts, gradients = problem(steps=1, start_size=0.1)
    optimizer = build(starts, optimizer="prodigy", adam_weight_decay=0.1)
    before = snapshot(optimizer)
    update(optimizer, joined(gradients[0]), 0.0)
    update(optimizer, np.zeros(23), 1.0)
    assert snapshot(optimizer) == before


class Owner(nn.Cell):
    """MindSpore renames parameters of a cell that becomes part of another."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def construct(self):
        return flatten(self.optimizer.parameters)


@pytest.mark.parametrize(
    ("name", "more"), [("adamw", set()), ("prodigy", {"d", "numerator", "s", "start"})], ids=["adamw", "prodigy"]
)
def test_state_names_and_flatten(name, more):
    starts, _ = problem(steps=0, start_size=0.1)
    optimizer = build(starts, optimizer=name)
    owner = Owner(optimizer)
    state = optimizer.state()
    assert set(state) == {"updates", "bias_correction1", "bias_correction2", "exp_avg", "exp_avg_sq"} | more
    assert state["exp_avg_sq"] is optimizer.exp_avg_sq
    assert state["exp_avg"].shape == (23,) and state["updates"].shape == ()
    assert not any(p.requires_grad for p in state.values())
    owned = {id(p) for p in owner.get_parameters()} - {id(p) for p in (optimizer.weights, *optimizer.parameters)}
    assert owned == {id(p) for p in state.values()}, "a checkpoint of state() and weights is complete"
    np.testing.assert_array_equal(owner().asnumpy(), joined(starts))


# --- learning-rate schedules -------------------------------------------------------------------------------------

SCHEDULES = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: math.cos(math.pi * x / 2) ** 2,
    "cosine_with_restarts": lambda x: math.cos(math.pi / 2 * (3 * x - math.floor(3 * x + 1e-12))) ** 2,
    "polynomial": lambda x: (1 - 1e-4) * (1 - x) ** 2 + 1e-4,  # 1e-7 is 1e-4 of 1e-3
    "constant_with_warmup": lambda x: 1.0,
}

# diffusers, get_scheduler(name, SGD(lr=1e-3), num_warmup_steps=10, num_training_steps=100, num_cycles=3, power=2)
GOLDEN = {
    "linear": {5: 0.0005, 11: 0.000988888888888889, 41: 0.0006555555555555556, 99: 1.1111111111111112e-05, 100: 0.0},
    "cosine": {5: 0.0005, 11: 0.0009996954135095479, 41: 0.0007347357813929454, 99: 3.0458649045211895e-07, 100: 0.0},
    "cosine_with_restarts": {5: 0.0005, 33: 0.000128427587261303, 40: 0.001, 99: 2.7390523158632995e-06, 100: 0.0},
    "polynomial": {
        5: 0.0005,
        11: 0.0009779034444444446,
        41: 0.00042981011111111107,
        99: 2.2344444444444358e-07,
        100: 1e-7,
    },
    "constant": {0: 0.001, 5: 0.001, 99: 0.001, 100: 0.001},
    "constant_with_warmup": {0: 0.0, 5: 0.0005, 9: 0.0009, 10: 0.001, 100: 0.001},
}


def schedule(name, **options) -> OptimConfig:
    options = {"learning_rate": 1e-3, "lr_warmup_steps": 10, "lr_num_cycles": 3, "lr_power": 2.0} | options
    return OptimConfig(lr_scheduler=name, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_its_formula(name):
    wanted = [1e-3 * (step / 10 if step < 10 else SCHEDULES[name]((step - 10) / 90)) for step in range(100)]
    got = [learning_rate(schedule(name), step, 100) for step in range(100)]
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", GOLDEN)
def test_schedule_is_that_of_diffusers(name):
    got = {step: learning_rate(schedule(name), step, 100) for step in GOLDEN[name]}
    assert got == pytest.approx(GOLDEN[name], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", GOLDEN)
def test_schedule_is_defined_past_its_end_and_for_odd_lengths(name):
    end = GOLDEN[name][100]
    assert [learning_rate(schedule(name), step, 100) for step in (101, 150, 100_000)] == [pytest.approx(end)] * 3
    for warmup, total in ((0, 1), (10, 10), (10, 4), (0, 0)):
        values = [learning_rate(schedule(name, lr_warmup_steps=warmup), step, total) for step in range(30)]
        assert all(0.0 <= value <= 1e-3 for value in values), (warmup, total)
    assert learning_rate(schedule(name, lr_warmup_steps=0), 0, 50) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", GOLDEN)
def test_scale_multiplies_the_base_rate(name):
    for step in (0, 5, 10, 57, 99, 100):
        scaled = learning_rate(schedule(name), step, 100, 8.0)
        assert scaled == pytest.approx(learning_rate(schedule(name, learning_rate=8e-3), step, 100), rel=1e-12)
    assert learning_rate(schedule(name), 10, 100, 8.0) == pytest.approx(8e-3)


def test_a_long_sum_has_the_same_bits_every_time(cpu):
    """MindSpore's own sum of this vector has not: one in forty differs in its last bit."""
    for length in (1, 2, 10, 400_000, 400_001):
        values = np.random.default_rng(0).standard_normal(length).astype(np.float32) ** 2
        total, vector = FixedSum(length), Tensor(values)
        found = {float(total(vector).asnumpy()) for _ in range(1 if length < 400_000 else 200)}
        assert len(found) == 1
        assert found.pop() == pytest.approx(float(values.astype(np.float64).sum()), rel=1e-6)
