"""Flow matching as pure functions in the graph: latents, noising, packing, loss. For the host: data/timesteps.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops


def image_position_ids(height: int, width: int) -> np.ndarray:
    """[height/2 * width/2, 3] ids of the packed latent's tokens: (0, row, column). Sizes are the latent's."""
    rows, columns = np.meshgrid(np.arange(height // 2), np.arange(width // 2), indexing="ij")
    ids = np.stack([np.zeros_like(rows), rows, columns], axis=-1)
    return ids.reshape(-1, 3).astype(np.float32)


def latents_from_moments(moments: Tensor, eps: Tensor, shift: float, scale: float) -> Tensor:
    """The VAE's posterior sampled with the given noise, in the transformer's range: [B, 2C, H, W] -> [B, C, H, W]."""
    mean, logvar = ops.chunk(moments, 2, 1)
    std = ops.exp(0.5 * ops.clamp(logvar, -30.0, 20.0))
    return (mean + std * eps - shift) * scale


def add_noise(x_0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The straight path from picture (sigma 0) to noise (sigma 1); sigma is [B]."""
    sigma = sigma.reshape(-1, 1, 1, 1)
    return (1.0 - sigma) * x_0 + sigma * noise


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H/2 * W/2, 4C]: one token per 2x2 patch."""
    b, c, h, w = latents.shape
    patches = latents.reshape(b, c, h // 2, 2, w // 2, 2)
    return patches.transpose(0, 2, 4, 1, 3, 5).reshape(b, (h // 2) * (w // 2), c * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """[B, H/2 * W/2, 4C] -> [B, C, H, W], the inverse of `pack`; sizes are the latent's."""
    b, _, c = tokens.shape
    patches = tokens.reshape(b, height // 2, width // 2, c // 4, 2, 2)
    return patches.transpose(0, 3, 1, 4, 2, 5).reshape(b, c // 4, height, width)


def squared_error(prediction: Tensor, target: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Weighted mean squared error of each sample, in fp32: [B, tokens, 4C] -> [B].

    `mask` [B, tokens, 4] weighs the latents of each token. The mean is over all of them, not over the mask's sum: a
    picture of a small subject counts less, and with a mask of ones nothing changes.
    """
    return weight * _masked_mean(_squares(prediction, target), mask)


def robust_error(
    prediction: Tensor, target: Tensor, weight: Tensor, delta: Tensor, scale: Tensor, mask: Tensor | None = None
) -> Tensor:
    """The same for --loss huber and smooth_l1: `delta` and `scale` [B] are columns of data/timesteps.robust_table.

    d^2 / (sqrt(d^2 + delta^2) + delta) is sqrt(d^2 + delta^2) - delta without a difference of nearly equal numbers.
    """
    squares, delta = _squares(prediction, target), delta.reshape(-1, 1, 1)
    # a power, whose gradient is one too: MindSpore's library for Ascend has no kernel for the gradient of sqrt
    errors = squares / (ops.pow(squares + delta * delta, 0.5) + delta)
    return weight * scale * _masked_mean(errors, mask)


def _squares(prediction, target):
    difference = prediction.astype(ms.float32) - target.astype(ms.float32)
    return difference * difference


def _masked_mean(errors, mask):
    if mask is not None:
        b, tokens, _ = errors.shape
        # packed as C x 4: the four latents of a token are the last axis
        errors = errors.reshape(b, tokens, -1, 4) * mask.reshape(b, tokens, 1, 4)
    return errors.reshape(errors.shape[0], -1).mean(1)


def prior_preservation(errors: Tensor, prior_loss_weight: float) -> Tensor:
    """Loss of a batch whose first half are instance samples and whose second half are class samples."""
    half = errors.shape[0] // 2
    return errors[:half].mean() + prior_loss_weight * errors[half:].mean()
