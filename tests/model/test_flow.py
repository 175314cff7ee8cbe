"""Flow-matching maths against numpy formulas written from the definitions."""

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from flux_db.data.timesteps import (
    drawn_sigma,
    flux_shift,
    loss_weights,
    nearest_index,
    robust_table,
    shifted,
    timestep_fraction,
    timestep_index,
)
from flux_db.model import flow

SCHEMES = ("none", "sigma_sqrt", "logit_normal", "mode", "cosmap")


def philox(seed=3):
    return np.random.Generator(np.random.Philox(seed))


def normal(*shape, seed=0):
    return np.random.RandomState(seed + sum(shape)).randn(*shape).astype(np.float32)


class Fixed:
    """A generator that draws the given number."""

    def __init__(self, u):
        self.u = u

    def random(self):
        return self.u


# --- host side ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.6, 1.7)])
def test_logit_normal_is_normal_in_logit_space(mean, std):
    rng, count = philox(), 20_000
    draws = [timestep_fraction(rng, "logit_normal", logit_mean=mean, logit_std=std) for _ in range(count)]
    assert 0.0 < min(draws) < max(draws) < 1.0
    logits = np.log(draws) - np.log1p(-np.array(draws))
    error = std / math.sqrt(count)  # standard error of the mean; that of the deviation is smaller
    assert abs(logits.mean() - mean) < 4 * error
    assert abs(logits.std() - std) < 4 * error
    assert abs(((logits - mean) ** 3).mean()) < 16 * std**2 * error  # no skew


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
def test_other_schemes_draw_uniformly(scheme):
    rng = philox()
    draws = np.array([timestep_fraction(rng, scheme) for _ in range(20_000)])
    counts = np.histogram(draws, bins=10, range=(0.0, 1.0))[0]
    assert counts.sum() == 20_000
    assert np.abs(counts - 2000).max() < 5 * math.sqrt(2000 * 0.9)
    assert timestep_fraction(Fixed(0.3125), scheme) == 0.3125


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.5, 1.29, 1.75])
def test_mode_is_its_formula_and_stays_monotone_within_0_and_1(scale):
    grid = np.linspace(0.0, 1.0, 201)
    draws = np.array([timestep_fraction(Fixed(u), "mode", mode_scale=scale) for u in grid])
    # SD3 paper, eq. 20, with cos^2(pi u / 2) = (1 + cos(pi u)) / 2
    np.testing.assert_allclose(draws, 1 - grid - scale * ((1 + np.cos(np.pi * grid)) / 2 - 1 + grid), atol=1e-12)
    assert draws.min() >= -1e-12 and draws.max() <= 1 + 1e-12
    assert (np.diff(draws) <= 1e-12).all()
    assert draws[0] == pytest.approx(1.0) and draws[-1] == pytest.approx(0.0, abs=1e-12)


def test_mode_scale_has_the_default_of_the_paper():
    assert timestep_fraction(Fixed(0.25), "mode") == pytest.approx(0.75 - 1.29 * (math.cos(math.pi / 8) ** 2 - 0.75))


def kolmogorov_distance(draws, distribution):
    """Largest difference between the draws' own distribution and the one they should have."""
    x = np.sort(draws)
    expected = np.array([distribution(value) for value in x])
    steps = np.arange(len(x) + 1) / len(x)
    return max(np.abs(expected - steps[:-1]).max(), np.abs(expected - steps[1:]).max())


def of_sigmoid(scale, shift):
    """P(sigma <= x): the shift undone, then the logit is normal."""

    def distribution(x):
        t = x / (shift - (shift - 1) * x)
        return (1 + math.erf(math.log(t / (1 - t)) / scale / math.sqrt(2))) / 2

    return distribution


@pytest.mark.parametrize(
    ("sampling", "tokens", "shape", "distribution"),
    [
        ("uniform", 256, {}, lambda x: x),
        ("sigmoid", 256, {}, of_sigmoid(1.0, 1.0)),
        ("sigmoid", 256, {"sigmoid_scale": 2.0}, of_sigmoid(2.0, 1.0)),
        ("shift", 256, {}, of_sigmoid(1.0, 3.0)),
        ("shift", 256, {"flow_shift": 0.5, "sigmoid_scale": 1.5}, of_sigmoid(1.5, 0.5)),
        ("flux_shift", 4096, {}, of_sigmoid(1.0, 3.158193)),
        ("flux_shift", 1024, {}, of_sigmoid(1.0, 1.877556)),
    ],
)
def test_noise_levels_have_the_density_of_their_formula(sampling, tokens, shape, distribution):
    rng, count = philox(), 4000
    draws = np.array([drawn_sigma(rng, sampling, tokens, **shape) for _ in range(count)])
    assert 0.0 < draws.min() < draws.max() < 1.0
    limit = 1.63 / math.sqrt(count)  # of Kolmogorov and Smirnov: one sample in a hundred exceeds it
    assert kolmogorov_distance(draws, distribution) < limit
    assert kolmogorov_distance(draws, of_sigmoid(1.0, 1.3)) > limit  # another density does not pass


def test_extreme_draws_are_noise_levels_too():
    rng = philox()
    draws = [drawn_sigma(rng, "sigmoid", 256, sigmoid_scale=1e4) for _ in range(200)]
    draws += [timestep_fraction(rng, "logit_normal", logit_mean=mean) for mean in (-800.0, 800.0)]
    assert all(0.0 <= draw <= 1.0 for draw in draws) and min(draws) < 1e-9 and max(draws) > 1 - 1e-9


@pytest.mark.parametrize(("tokens", "shift"), [(256, 1.649), (1024, 1.878), (2304, 2.332), (4096, 3.158)])
def test_the_shift_of_flux_grows_with_the_picture(tokens, shift):
    assert flux_shift(tokens) == pytest.approx(shift, abs=5e-4)


def test_a_noise_level_gets_the_nearest_timestep():
    sigmas = np.linspace(1.0, 0.001, 1000)
    levels = [0.0, 0.0004, 0.001, 0.0014, 0.0016, 0.5, 0.9996, 1.0]
    assert [nearest_index(level, sigmas) for level in levels] == [999, 999, 999, 999, 998, 500, 0, 0]
    table = shifted(sigmas, 3.0)  # of a scheduler with a fixed shift
    for level in np.linspace(0.0, 1.0, 97):
        assert nearest_index(level, table) == np.abs(table - level).argmin()


def test_timestep_index_is_clamped():
    wanted = {-1e-9: 0, 0.0: 0, 0.0009999: 0, 0.001: 1, 0.5: 500, 0.9995: 999, 1.0: 999, 1.0001: 999}
    assert {u: timestep_index(u, 1000) for u in wanted} == wanted
    assert [timestep_index(u, 4) for u in (0.24, 0.25, 0.74, 0.75)] == [0, 1, 2, 3]


def test_loss_weights():
    sigmas = np.array([1.0, 0.8, 0.5, 0.125])
    wanted = {
        "sigma_sqrt": [1.0, 1.5625, 4.0, 64.0],
        # 2 / (pi ((1 - s)^2 + s^2))
        "cosmap": [2 / math.pi, 2 / (math.pi * 0.68), 4 / math.pi, 2 / (math.pi * (0.875**2 + 0.125**2))],
        **dict.fromkeys(("none", "logit_normal", "mode"), [1.0] * 4),
    }
    assert set(wanted) == set(SCHEMES)
    for scheme, weights in wanted.items():
        got = loss_weights(scheme, sigmas.astype(np.float32))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, weights, rtol=1e-6, err_msg=scheme)


def test_robust_thresholds_by_sigma():
    """The formulas of kohya's scripts: delta^sigma, and constant; huber is smooth_l1 times its threshold."""
    sigmas = np.linspace(1.0, 0.0, 5)
    assert robust_table("l2", 0.1, "constant", sigmas) is None
    delta, scale = robust_table("huber", 0.1, "exponential", sigmas)
    np.testing.assert_allclose(delta, [0.1, 10**-0.75, 10**-0.5, 10**-0.25, 1.0], rtol=1e-6)
    np.testing.assert_allclose(scale, 2 * delta, rtol=1e-6)
    delta, scale = robust_table("smooth_l1", 0.1, "constant", sigmas)
    assert delta.dtype == scale.dtype == np.float32
    np.testing.assert_allclose([delta, scale], [[0.1] * 5, [2.0] * 5], rtol=1e-6)


def test_a_robust_error_is_square_near_zero_and_linear_far_away(cpu):
    class Error(nn.Cell):
        def construct(self, d, delta, scale):
            return flow.robust_error(d, ops.zeros_like(d), ops.ones_like(delta), delta, scale)

    d = np.array([1e-4, 0.3, 50.0], np.float32)
    one = np.ones(3, np.float32)
    huber, smooth = (
        Error()(Tensor(d.reshape(3, 1, 1)), Tensor(0.1 * one), Tensor(scale * one)).asnumpy() for scale in (0.2, 2.0)
    )
    wanted = np.sqrt(d.astype(np.float64) ** 2 + 0.01) - 0.1
    np.testing.assert_allclose(huber, 0.2 * wanted, rtol=1e-6)
    np.testing.assert_allclose(smooth, 2 * wanted, rtol=1e-6)
    np.testing.assert_allclose(huber[0], d[0] ** 2, rtol=1e-5)
    np.testing.assert_allclose(smooth[2], 2 * (d[2] - 0.1), rtol=1e-5)


def test_position_ids():
    ids = flow.image_position_ids(4, 6)
    assert ids.dtype == np.float32
    assert ids.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]]


# --- graph side --------------------------------------------------------------------------------------------------


class Graph(nn.Cell):
    """All graph-side functions in one compilation."""

    def construct(self, moments, eps, noise, sigma, weight):
        x_0 = flow.latents_from_moments(moments, eps, 0.1159, 0.3611)
        x_t = flow.add_noise(x_0, noise, sigma)
        tokens = flow.pack(x_t)
        errors = flow.squared_error(tokens.astype(ms.float16), flow.pack(noise - x_0), weight)
        loss = flow.prior_preservation(errors, 0.7)
        return x_0, x_t, tokens, flow.unpack(tokens, x_t.shape[2], x_t.shape[3]), errors, loss


B, C, H, W = 4, 3, 4, 6


@pytest.fixture(scope="module")
def computed(cpu):
    moments = normal(B, 2 * C, H, W)
    moments[0, C, 0, :2] = -80.0, 25.0  # logvar outside of the clamp to -30..20
    eps, noise = normal(B, C, H, W, seed=1), normal(B, C, H, W, seed=2)
    eps[0, 0, 0, :2] = 1e6, 1e-5  # times the clamped deviations exp(-15) and exp(10): 0.31 and 0.22
    sigma, weight = np.float32([0.0, 0.3, 0.9, 1.0]), np.float32([0.5, 2.0, 1.0, 3.0])
    inputs = moments, eps, noise, sigma, weight
    outputs = [out.asnumpy() for out in Graph()(*(Tensor(x) for x in inputs))]
    return [x.astype(np.float64) for x in inputs], outputs


def assert_close(got, wanted):
    assert got.shape == np.shape(wanted)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_latents_from_moments(computed):
    (moments, eps, *_), (x_0, *_) = computed
    mean, logvar = moments[:, :C], np.clip(moments[:, C:], -30, 20)
    assert_close(x_0, (mean + np.sqrt(np.exp(logvar)) * eps - 0.1159) * 0.3611)
    assert x_0[0, 0, 0, 0] == pytest.approx((mean[0, 0, 0, 0] + 0.30590232 - 0.1159) * 0.3611, rel=1e-5)


def test_add_noise(computed):
    (_, _, noise, sigma, _), (x_0, x_t, *_) = computed
    for b in range(B):
        assert_close(x_t[b], x_0[b] + sigma[b] * (noise[b] - x_0[b]))
    np.testing.assert_array_equal(x_t[0], x_0[0])
    np.testing.assert_array_equal(x_t[3], noise[3].astype(np.float32))


def np_pack(x):
    """FLUX's packing by its index formula: token (i, j), channel 4c + 2 dy + dx is pixel (2i + dy, 2j + dx)."""
    b, c, h, w = x.shape
    tokens = np.empty((b, h * w // 4, 4 * c), x.dtype)
    for i, j, k, dy, dx in np.ndindex(h // 2, w // 2, c, 2, 2):
        tokens[:, i * (w // 2) + j, 4 * k + 2 * dy + dx] = x[:, k, 2 * i + dy, 2 * j + dx]
    return tokens


def test_pack_and_unpack(computed):
    _, (_, x_t, tokens, unpacked, *_) = computed
    np.testing.assert_array_equal(tokens, np_pack(x_t))
    np.testing.assert_array_equal(unpacked, x_t)


def test_position_ids_follow_the_packing():
    rows, columns = np.meshgrid(np.arange(H), np.arange(W), indexing="ij")
    pixels = np.stack([rows, columns])[None]  # a latent whose channels are its own coordinates
    corner = np_pack(pixels)[0][:, [0, 4]]  # the upper left pixel of each token
    np.testing.assert_array_equal(flow.image_position_ids(H, W)[:, 1:] * 2, corner)


def test_squared_error(computed):
    (_, _, noise, _, weight), (x_0, _, tokens, _, errors, _) = computed
    prediction = tokens.astype(np.float16).astype(np.float64)  # the difference is taken in fp32, not in fp16
    target = np_pack(noise.astype(np.float32) - x_0).astype(np.float64)
    assert errors.dtype == np.float32
    assert_close(errors, [weight[b] * np.mean((prediction[b] - target[b]) ** 2) for b in range(B)])


def test_prior_preservation_weighs_each_half_by_its_own_weights(computed):
    (*_, weight), (*_, errors, loss) = computed
    wanted = (errors[0] + errors[1]) / 2 + 0.7 * (errors[2] + errors[3]) / 2
    assert_close(loss, wanted)
    # what one mean weight for both halves would give is another number
    plain = errors / weight
    assert abs((plain[:2].mean() + 0.7 * plain[2:].mean()) * weight.mean() - wanted) > 0.1 * wanted
