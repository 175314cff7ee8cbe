"""Train transformer, T5 and CLIP of the small model: python scripts/small_base/train_flow.py

Flow matching on latents that are encoded once, one caption in ten left empty. In the last third most of a batch has
another target: the velocity under classifier-free guidance, computed with the averaged weights; its strength is the
guidance value that the model is given. The averaged weights are the result.
"""

from __future__ import annotations

import argparse
import copy
import random
from pathlib import Path

import numpy as np
import torch
from common import (
    SEED,
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
from flow_model import LATENT, FlowModel, Tokenizers, as_ids, decode, pack, sample
from PIL import Image
from torch import Tensor
from train_vae import build_vae, channels_of

from flux_db.demo.world import caption, random_scene

COUNT = 16_000
CAPTIONS = 4
BATCH = 32
PEAK = 1e-3
DISTIL_FROM = 0.7
DISTIL_SHARE = 0.6
EMPTY_SHARE = 0.1
LENGTHS = (20, 20, 20, 20, 20, 32)
"""Of the T5 tokens: FLUX.1 does not mask the padding, so the model must know several."""


def all_captions(tokenizers: Tokenizers) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of CLIP and T5, each [N, CAPTIONS, L]."""
    rows = []
    for i in range(COUNT):
        rng, scene = random.Random(f"captions/{i}"), random_scene(SEED, i)
        rows.append(tokenizers([caption(scene, rng) for _ in range(CAPTIONS)]))
    return np.stack([clip for clip, _ in rows]), np.stack([t5 for _, t5 in rows])


@torch.no_grad()
def all_latents(work: Path, vae: AutoencoderKL) -> np.ndarray:
    """Means and deviations of the posteriors, [N, 2, C, 16, 16], encoded once."""
    channels = vae.config.latent_channels
    path = work / f"latents_{channels}_{COUNT}.npy"
    if not path.exists():
        array, shape = pictures(work, COUNT), (COUNT, 2, channels, LATENT, LATENT)
        rows = np.lib.format.open_memmap(work / "encoding.npy", "w+", np.float16, shape)
        for start in range(0, COUNT, 50):
            posterior = vae.encode(to_tensor(array[start : start + 50])).latent_dist
            rows[start : start + 50] = torch.stack([posterior.mean, posterior.std], dim=1).numpy()
        rows.flush()
        (work / "encoding.npy").rename(path)
    return np.load(path)


def load_vae(work: Path) -> AutoencoderKL:
    state = load(work / "vae.pt")
    assert state is not None, "train_vae.py comes first"
    vae = build_vae(channels_of(state)).eval()
    vae.load_state_dict(state["vae"])
    return vae


def scale_and_shift(latents: np.ndarray) -> tuple[float, float]:
    """scaling_factor and shift_factor of the VAE's config."""
    means = latents[:4000, 0].astype(np.float32)
    return round(1.0 / float(means.std()), 4), round(float(means.mean()), 4)


class Draws:
    """Everything random of one step."""

    def __init__(self, latents: np.ndarray, clip: np.ndarray, t5: np.ndarray, empty: tuple, scale: float, shift: float):
        self.latents, self.clip, self.t5, self.empty, self.scale, self.shift = latents, clip, t5, empty, scale, shift

    def of(self, step: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        rng = rng_of(step, "flow")
        rows, which = rng.integers(0, COUNT, size), rng.integers(0, CAPTIONS, size)
        moments = self.latents[rows].astype(np.float32)
        z = moments[:, 0] + moments[:, 1] * rng.standard_normal(moments[:, 0].shape, np.float32)
        x_0 = pack(torch.from_numpy((z - self.shift) * self.scale))
        eps = torch.from_numpy(rng.standard_normal(tuple(x_0.shape), np.float32))
        normal = 1 / (1 + np.exp(-(0.3 + 1.1 * rng.standard_normal(size))))
        t = np.where(rng.random(size) < 0.2, rng.random(size), normal).astype(np.float32)
        guidance = rng.uniform(1.0, 5.0, size).astype(np.float32)
        clip_ids, t5_ids = self.clip[rows, which], self.t5[rows, which][:, : rng.choice(LENGTHS)]
        drop = rng.random(size) < EMPTY_SHARE
        clip_ids[drop], t5_ids[drop] = self.empty[0], self.empty[1][: t5_ids.shape[1]]
        return x_0, eps, torch.from_numpy(t), torch.from_numpy(guidance), as_ids(clip_ids), as_ids(t5_ids)


def loss_of(model: FlowModel, teacher: FlowModel, draws: Draws, step: int, size: int, *, distil: bool) -> Tensor:
    x_0, eps, t, guidance, clip_ids, t5_ids = draws.of(step, size)
    x_t = (1 - t[:, None, None]) * x_0 + t[:, None, None] * eps
    target = eps - x_0
    if distil:
        n, one = round(size * DISTIL_SHARE), torch.ones(size)
        empty = [as_ids(ids)[None].expand(n, -1) for ids in (draws.empty[0], draws.empty[1][: t5_ids.shape[1]])]
        with torch.no_grad():
            v = teacher(
                torch.cat([x_t[:n], x_t[:n]]),
                torch.cat([t[:n], t[:n]]),
                torch.ones(2 * n),
                torch.cat([clip_ids[:n], empty[0]]),
                torch.cat([t5_ids[:n], empty[1]]),
            )
        v_text, v_empty = v.chunk(2)
        target[:n] = v_empty + guidance[:n, None, None] * (v_text - v_empty)
        guidance = torch.cat([guidance[:n], one[n:]])
    return ((model(x_t, t, guidance, clip_ids, t5_ids) - target) ** 2).mean()


@torch.no_grad()
def average(teacher: FlowModel, model: FlowModel, step: int) -> None:
    keep = min(0.997, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(teacher.parameters()), list(model.parameters()), 1 - keep)


def contact_sheet(path: Path, vae: AutoencoderKL, model: FlowModel, tokenizers: Tokenizers, draws: Draws) -> None:
    prompts = [
        *("a photo of a brown dog on the beach", "a photo of sks dog in the snow", "a white dog at night"),
        *("a red car in the city", "a blue cup in a room", "a grey cat with a red collar in the forest"),
        *("a yellow bird flying in a meadow", "a pink robot in the desert"),
    ]
    rows = [decode(vae, sample(model, tokenizers, prompts, guidance=g), draws.scale, draws.shift) for g in (1.0, 3.5)]
    Image.fromarray(np.concatenate([np.concatenate(list(row), axis=1) for row in rows])).save(path)


class Training:
    """The weights, their average, the optimizer, and how far they are."""

    def __init__(self, path: Path, minutes: float, channels: int) -> None:
        self.path = path
        torch.manual_seed(0)
        self.model = FlowModel(channels)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        named = list(self.model.named_parameters())
        tables = [p for name, p in named if "embedding" in name or "shared" in name]
        rest = [p for name, p in named if not ("embedding" in name or "shared" in name)]
        # A word that no caption uses must keep its vector: no decay of the tables.
        groups = [{"params": rest, "weight_decay": 0.01}, {"params": tables, "weight_decay": 0.0}]
        self.parameters = [*rest, *tables]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98), fused=True)
        self.step = self.seen = 0
        self.clock = Clock(minutes)
        if state := load(path):
            self.model.load_state_dict(state["model"])
            self.average.load_state_dict(state["average"])
            if "optimizer" in state:
                self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seen, self.clock = state["step"], state["seen"], Clock(minutes, state["spent"])
        # The elementwise half of a block's time nearly goes; compiled once for all blocks of a kind.
        for block in (*self.model.transformer.transformer_blocks, *self.model.transformer.single_transformer_blocks):
            block.compile(dynamic=False)

    def save(self, factors: dict[str, float]) -> None:
        state = {"model": self.model.state_dict(), "average": self.average.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "step": self.step, "seen": self.seen}
        save(self.path, state | factors | {"spent": self.clock.spent})

    def update(self, draws: Draws, workers: Workers, progress: float) -> tuple[float, float]:
        """One step of all workers; the loss, and how much of the time is spent by the first one's clock."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(PEAK, self.step, progress, warmup=200)
        size = BATCH // workers.count
        number = self.step * workers.count + workers.rank
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.average, draws, number, size, distil=progress > DISTIL_FROM)
        loss.backward()
        mean, progress = workers.average_gradients(self.parameters, loss.item(), self.clock.progress)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        average(self.average, self.model, self.step)
        self.step, self.seen = self.step + 1, self.seen + size * workers.count
        return mean, progress


def train(rank: int, given: argparse.Namespace) -> None:
    work = given.work
    workers, tokenizers, vae = Workers(work, rank, given.threads), Tokenizers(), load_vae(work)
    latents = all_latents(work, vae)
    start = load(work / "flow.pt") or {}
    scale, shift = (start["scale"], start["shift"]) if "scale" in start else scale_and_shift(latents)
    draws = Draws(latents, *all_captions(tokenizers), tokenizers.one(""), scale, shift)
    training = Training(work / "flow.pt", given.minutes, vae.config.latent_channels)
    if workers.is_first:
        sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in training.model.named_children()}
        print("  ".join(f"{name} {size / 1e6:.2f} M" for name, size in sizes.items()), flush=True)
        print(f"scaling_factor {scale} shift_factor {shift}", flush=True)
    losses: list[float] = []
    last_saved, progress = training.clock.spent, float(workers.mean(torch.tensor([training.clock.progress])))
    while progress < 1.0 and not workers.is_orphan:
        loss, progress = training.update(draws, workers, progress)
        losses.append(loss)
        if workers.is_first and training.step % 50 == 0:
            print(f"step {training.step} {training.clock.spent:.0f} s loss {np.mean(losses[-50:]):.4f}", flush=True)
        if workers.is_first and (training.clock.spent - last_saved > 240 or progress >= 1.0):
            last_saved = training.clock.spent
            training.save({"scale": scale, "shift": shift})
            contact_sheet(work / f"flow_{training.step:05}.png", vae, training.average, tokenizers, draws)
    if workers.is_first:
        print(f"{training.step} steps, {training.seen} pictures", flush=True)


def main() -> None:
    given = arguments("Train transformer and text encoders of the small model.", minutes=65)
    all_latents(given.work, load_vae(given.work))
    run_workers(train, given)


if __name__ == "__main__":
    main()
