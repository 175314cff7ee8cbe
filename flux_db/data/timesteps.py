"""Which noise level an example is trained at, and how its error is weighted: pure functions of numpy."""

from __future__ import annotations

import math

import numpy as np

# A float holds e to this power, and not much more.
LARGEST_EXPONENT = 700.0


def timestep_fraction(
    rng: np.random.Generator, scheme: str, *, logit_mean: float = 0.0, logit_std: float = 1.0, mode_scale: float = 1.29
) -> float:
    """Draw u in [0, 1) by the density of the weighting scheme; `none`, `sigma_sqrt` and `cosmap` draw uniformly."""
    if scheme == "logit_normal":
        return sigmoid(rng.normal(logit_mean, logit_std))
    u = float(rng.random())
    if scheme == "mode":
        return 1.0 - u - mode_scale * (math.cos(math.pi * u / 2.0) ** 2 - 1.0 + u)
    return u


def drawn_sigma(
    rng: np.random.Generator, sampling: str, tokens: int, *, sigmoid_scale: float = 1.0, flow_shift: float = 3.0
) -> float:
    """Draw a noise level in (0, 1) by --timestep_sampling, for a picture of so many tokens."""
    if sampling == "uniform":
        return float(rng.random())
    t = sigmoid(sigmoid_scale * rng.standard_normal())
    if sampling == "sigmoid":
        return t
    return shifted(t, flow_shift if sampling == "shift" else flux_shift(tokens))


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(min(-x, LARGEST_EXPONENT)))


def shifted(t: float, shift: float) -> float:
    """A noise level moved towards 1 by a shift above 1; 0 and 1 stay."""
    return shift * t / (1.0 + (shift - 1.0) * t)


def flux_shift(tokens: int) -> float:
    """The shift that FLUX.1 was trained with and samples with: more for larger pictures, from 256 to 4096 tokens."""
    return math.exp(0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256))


def nearest_index(sigma: float, sigmas: np.ndarray) -> int:
    """Row of the sigma table, which descends, that is nearest to a noise level."""
    after = int(np.searchsorted(-sigmas, -sigma))
    candidates = range(max(after - 1, 0), min(after + 1, len(sigmas)))
    return min(candidates, key=lambda i: abs(float(sigmas[i]) - sigma))


def timestep_index(u: float, num_timesteps: int) -> int:
    """Row of the sigma table for u; clamped, because a density may round to exactly 1."""
    return min(max(int(u * num_timesteps), 0), num_timesteps - 1)


def loss_weights(scheme: str, sigmas: np.ndarray) -> np.ndarray:
    """Weight of the squared error at each sigma (same shape, float32)."""
    sigmas = np.asarray(sigmas, np.float64)
    if scheme == "sigma_sqrt":
        weights = sigmas**-2.0
    elif scheme == "cosmap":
        weights = 2.0 / (math.pi * (1.0 - 2.0 * sigmas + 2.0 * sigmas**2))
    else:
        weights = np.ones_like(sigmas)
    return weights.astype(np.float32)


def robust_table(loss: str, delta: float, schedule: str, sigmas: np.ndarray) -> np.ndarray | None:
    """[2, T]: threshold and scale of --loss huber and smooth_l1 at each sigma, in float32; None for l2.

    An error d then counts scale * d^2 / (sqrt(d^2 + threshold^2) + threshold). With scale 2 threshold (huber) this is
    d^2 for a small d, and with scale 2 (smooth_l1) it is 2 |d| for a large one.
    """
    if loss == "l2":
        return None
    sigmas = np.asarray(sigmas, np.float64)
    thresholds = delta**sigmas if schedule == "exponential" else np.full_like(sigmas, delta)
    scales = 2.0 * thresholds if loss == "huber" else np.full_like(sigmas, 2.0)
    return np.stack([thresholds, scales]).astype(np.float32)
