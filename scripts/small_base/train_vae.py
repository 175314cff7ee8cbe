"""Train the VAE of the small model: python scripts/small_base/train_vae.py

With --decoder only the decoder goes on learning: the latents, and what train_flow.py has learned of them, stay valid.

L1, L1 of image gradients and a little KL. Latents of half the side must decode to the picture of half the side: without
that most channels are noise from place to place, which a transformer learns slowly.

A third of the pictures have other colours or are collages, so that the VAE does not depend on the palette of the world:
the subjects, which it never sees, have other colours and marks.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from common import (
    HELD_OUT_SEED,
    Clock,
    Workers,
    arguments,
    learning_rate,
    load,
    pictures,
    rng_of,
    run_workers,
    save,
    to_tensor,
)
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn.functional import avg_pool2d

from flux_db.demo.tiny_model import vae_config
from flux_db.demo.world import SUBJECTS, draw, subject_scene

COUNT = 12_000
BATCH = 8
CROPS_UNTIL = 0.5
"""So much of the time goes to pieces of a quarter of the size: four times the steps."""
PEAK = 1.5e-3
HALF_WEIGHT = 0.5
"""Of the loss at half the side."""


def batch(array: np.ndarray, step: int, side: int) -> Tensor:
    rng = rng_of(step, "vae")
    rows, tops, lefts = rng.integers(0, len(array), BATCH), *rng.integers(0, 65 - side, (2, BATCH))
    places = zip(rows, tops, lefts, strict=True)
    x = to_tensor(np.stack([array[i, top : top + side, left : left + side] for i, top, left in places]))
    for i in range(BATCH):
        kind = rng.random()
        if rng.random() < 0.5:
            x[i] = x[i].flip(-1)
        if kind < 0.2:  # other colours
            x[i] = x[i][torch.from_numpy(rng.permutation(3))] * float(rng.choice([-1.0, 1.0]))
        elif kind < 0.3:  # a piece of another picture
            j, (top, left) = int(rng.integers(BATCH)), rng.integers(0, side - 16, 2)
            x[i, :, top : top + 16, left : left + 16] = x[j, :, :16, :16].clone()
    return x.contiguous(memory_format=torch.channels_last)


def gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]


def loss_of(vae: AutoencoderKL, x: Tensor, rng: np.random.Generator) -> Tensor:
    posterior = vae.encode(x).latent_dist
    noise = torch.from_numpy(rng.standard_normal(tuple(posterior.mean.shape), np.float32))
    z = posterior.mean + posterior.std * noise
    whole = distance(x, vae.decode(z).sample)
    half = distance(avg_pool2d(x, 2), vae.decode(avg_pool2d(z, 2)).sample)
    return whole + HALF_WEIGHT * half + 1e-6 * posterior.kl().mean()


def distance(x: Tensor, y: Tensor) -> Tensor:
    edges = sum((a - b).abs().mean() for a, b in zip(gradients(x), gradients(y), strict=True))
    return (x - y).abs().mean() + edges


def decibels(vae: AutoencoderKL, x: Tensor) -> float:
    """Mean over pictures of the peak signal to noise ratio, through the posterior's mean."""
    with torch.no_grad():
        y = torch.cat([vae.decode(vae.encode(part).latent_dist.mean).sample.clamp(-1, 1) for part in x.split(32)])
    error = ((x - y) ** 2).mean(dim=(1, 2, 3)) / 4
    return float((-10 * error.log10()).mean())


def subject_pictures(subject: str, count: int = 64) -> Tensor:
    return to_tensor(np.stack([np.asarray(draw(subject_scene(subject, HELD_OUT_SEED, i))) for i in range(count)]))


def train(rank: int, given: argparse.Namespace) -> None:
    workers = Workers(given.work, rank, given.threads)
    array = pictures(given.work, COUNT)
    torch.manual_seed(0)
    vae = AutoencoderKL.from_config(vae_config("small")).to(memory_format=torch.channels_last)
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK, betas=(0.9, 0.98), weight_decay=1e-3)
    path, step, clock = given.work / "vae.pt", 0, Clock(given.minutes)
    if state := load(path):
        vae.load_state_dict(state["vae"])
        optimizer.load_state_dict(state["optimizer"])
        step, clock = state["step"], Clock(given.minutes, state["spent"])
    vae.encoder.requires_grad_(not given.decoder)
    held_out = to_tensor(pictures(given.work, 256, HELD_OUT_SEED))
    last_saved, progress = clock.spent, float(workers.mean(torch.tensor([clock.progress])))
    while progress < 1.0 and not workers.is_orphan:
        optimizer.param_groups[0]["lr"] = learning_rate(PEAK, step, progress)
        number = step * workers.count + rank
        x = batch(array, number, 32 if progress < CROPS_UNTIL else 64)
        loss = loss_of(vae, x, rng_of(number, "vae noise"))
        optimizer.zero_grad()
        loss.backward()
        mean, progress = workers.average_gradients(parameters, loss.item(), clock.progress)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if workers.is_first and (clock.spent - last_saved > 30 or progress >= 1.0):
            last_saved = clock.spent
            state = {"vae": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "spent": clock.spent}
            save(path, state)
            figure = decibels(vae, held_out[:16])
            print(f"step {step} {clock.spent:.0f} s loss {mean:.4f} held out {figure:.2f} dB", flush=True)
    if workers.is_first:
        figures = {"held out": decibels(vae, held_out)} | {s: decibels(vae, subject_pictures(s)) for s in SUBJECTS}
        print("  ".join(f"{name} {value:.2f} dB" for name, value in figures.items()), f"after {step} steps", flush=True)


def main() -> None:
    given = arguments("Train the VAE of the small model.", minutes=15, decoder="train only the decoder")
    pictures(given.work, COUNT)
    pictures(given.work, 256, HELD_OUT_SEED)
    run_workers(train, given)


if __name__ == "__main__":
    main()
