"""A training step on the tiny transformer, and its loss by the formula in numpy."""

from __future__ import annotations

import dataclasses

import mindspore as ms
import numpy as np
from mindspore import Tensor

from flux_db.model import adapter, flow, loading, optim
from flux_db.stream import Purpose, dropout_key, generator
from flux_db.training.build import step_settings

ROWS, CHANNELS, SIDE, TOKENS = 2, 16, 4, 8


def inputs(width, pooled_width, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "pictures": draw(rows, 2 * CHANNELS, SIDE, SIDE),
        "eps": draw(rows, CHANNELS, SIDE, SIDE),
        "noise": draw(rows, CHANNELS, SIDE, SIDE),
        "index": rng.integers(100, 900, rows).astype(np.int32),
        "prompt_embeds": draw(rows, TOKENS, width),
        "pooled": draw(rows, pooled_width),
        "dropout_key": np.stack([dropout_key(0, row) for row in range(rows)]),
        "lr": np.array(1e-2, np.float32),
        "boundary": np.array(True),
    }


def call(step, values):
    return step(*(Tensor(v) for v in values.values())).asnumpy()


def make(cpu, world, tmp_path, *, scheme="none", layers="attn.to_q", **changes):
    """A step on the tiny transformer; LoRA B is not zero, so that the LoRA takes part in the loss."""
    config = world.config(tmp_path, weighting_scheme=scheme, lora_layers=layers, **changes.pop("flags", {}))
    runtime = dataclasses.replace(cpu, dtype=changes.get("dtype", ms.float32))
    transformer = loading.load_transformer(changes.pop("model", world.model), runtime.dtype)
    key = adapter.inject(transformer, config.lora, 0, ROWS)
    for name, parameter in adapter.parameters(transformer).items():
        if name.endswith("lora_B"):
            parameter.set_data(
                Tensor(generator(1, len(name), Purpose.LORA).standard_normal(parameter.shape, np.float32))
            )
    settings = dataclasses.replace(step_settings(config, runtime, world.model, prior=False), **changes)
    optimizer = optim.build_optimizer(list(adapter.parameters(transformer).values()), config.optim)
    return transformer, settings, optimizer, key


def velocity(transformer, settings, values):
    """What the transformer answers, called directly on inputs made in numpy."""
    _, x_t, _ = noised(settings, values)
    b, c, h, w = x_t.shape
    tokens = x_t.reshape(b, c, h // 2, 2, w // 2, 2).transpose(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    guidance = None if settings.guidance_scale is None else Tensor(np.full(b, settings.guidance_scale, np.float32))
    out = transformer(
        hidden_states=Tensor(tokens.astype(np.float32)),
        timestep=Tensor(settings.timesteps[values["index"]]),
        guidance=guidance,
        pooled_projections=Tensor(values["pooled"]),
        encoder_hidden_states=Tensor(values["prompt_embeds"]),
        txt_ids=Tensor(np.zeros((TOKENS, 3), np.float32)),
        img_ids=Tensor(flow.image_position_ids(h, w)),
    )[0]
    return out.asnumpy().astype(np.float64)


def noised(settings, values):
    """The latent, the noised latent and the sigma, in double."""
    mean, logvar = np.split(values["pictures"].astype(np.float64), 2, axis=1)
    x_0 = (mean + np.exp(0.5 * logvar) * values["eps"] - settings.vae_shift) * settings.vae_scale
    sigma = settings.sigmas[values["index"]].astype(np.float64)[:, None, None, None]
    return x_0, (1 - sigma) * x_0 + sigma * values["noise"], sigma


def square(difference, sigma):
    return difference**2


def loss_in_numpy(settings, values, answer, weight_of, error_of=square):
    """`error_of(difference, sigma)` at each latent; sigma is [B, 1, 1]."""
    x_0, _, sigma = noised(settings, values)
    target = values["noise"].astype(np.float64) - x_0
    b, c, h, w = target.shape
    target = target.reshape(b, c, h // 2, 2, w // 2, 2).transpose(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    mask = np.broadcast_to(values.get("mask", np.ones((b, 1, h, w))).astype(np.float64), (b, c, h, w))
    mask = mask.reshape(b, c, h // 2, 2, w // 2, 2).transpose(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    errors = mask * error_of(answer - target, sigma[..., 0])
    errors = errors.reshape(b, -1).mean(1) * weight_of(sigma.ravel())
    if settings.prior_loss_weight is None:
        return errors.mean()
    half = b // 2
    return errors[:half].mean() + settings.prior_loss_weight * errors[half:].mean()
