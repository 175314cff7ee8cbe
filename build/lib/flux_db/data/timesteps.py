"""Which noise level an example is trained at, and how its error is weighted: pure functions of numpy."""

from __future__ import annotations

import math

import numpy as np


def timestep_fraction(
    rng: np.random.Generator, scheme: str, *, logit_mean: float = 0.0, logit_std: float = 1.0, mode_scale: float = 1.29
) -> float:
    """Draw u in [0, 1) by the density of the weighting scheme; `none`, `sigma_sqrt` and `cosmap` draw uniformly."""
    if scheme == "logit_normal":
        return float(1.0 / (1.0 + math.exp(-rng.normal(logit_mean, logit_std))))
    u = float(rng.random())
    if scheme == "mode":
        return 1.0 - u - mode_scale * (math.cos(math.pi * u / 2.0) ** 2 - 1.0 + u)
    return u


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
