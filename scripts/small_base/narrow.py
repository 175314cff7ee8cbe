"""Fewer latent channels for networks that are trained: python scripts/small_base/narrow.py

With 16 channels the transformer learned places and colours, but hardly the shape of things: half of the channels hold
detail that looks like noise. So the VAE keeps the 8 principal directions of its latents and goes on learning:

    narrow.py vae      16 channels -> 8; then train_vae.py again
    narrow.py balance  channels that are rough from place to place become small, the smooth ones large, so that noise
                       hides details first, as in natural pictures; exact, as the decoder undoes it
    narrow.py flow     the transformer's first and last layer for the new channels; then train_flow.py again
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from common import HELD_OUT_SEED, WORK, load, pictures, save, to_tensor
from torch import Tensor
from train_vae import build_vae, channels_of

CHANNELS = 8
SMOOTH = 0.2
"""Roughness at which a channel keeps a deviation of 1."""


@torch.no_grad()
def narrow_vae(work: Path) -> None:
    state = load(work / "vae.pt")
    old = state["vae"]
    wide = channels_of(state)
    flat = latents(work, state).permute(1, 0, 2, 3).reshape(wide, -1)
    mean = flat.mean(dim=1)
    variances, directions = torch.linalg.eigh(torch.cov(flat))
    keep = variances.argsort(descending=True)[:CHANNELS]
    down = (directions[:, keep] / variances[keep].sqrt()).T  # [8, 16]: to channels of deviation 1
    up = directions[:, keep] * variances[keep].sqrt()  # [16, 8]
    means = torch.einsum("ck,kixy->cixy", down, old["encoder.conv_out.weight"][:wide])
    bias = down @ (old["encoder.conv_out.bias"][:wide] - mean)
    new = dict(old)
    new["encoder.conv_out.weight"] = torch.cat([means, torch.zeros_like(means)])
    new["encoder.conv_out.bias"] = torch.cat([bias, torch.full((CHANNELS,), -7.0)])
    first = old["decoder.conv_in.weight"]
    new["decoder.conv_in.weight"] = torch.einsum("oixy,ic->ocxy", first, up)
    new["decoder.conv_in.bias"] = old["decoder.conv_in.bias"] + torch.einsum("oixy,i->o", first, mean)
    # the averaged weights of the flow still speak of the wide channels: how to translate them
    save(work / "translation.pt", {"down": down, "up": up, "mean": mean, "size": torch.ones(CHANNELS)})
    save(work / "vae.pt", {"vae": new, "step": state["step"], "spent": 0.0})


@torch.no_grad()
def balance(work: Path) -> None:
    state = load(work / "vae.pt")
    z = latents(work, state)
    roughness = (z[..., 1:] - z[..., :-1]).square().mean(dim=(0, 2, 3)) / (2 * z.var(dim=(0, 2, 3)))
    size = (SMOOTH / roughness).sqrt() / z.std(dim=(0, 2, 3))
    print("roughness", [round(value, 2) for value in roughness.tolist()])
    vae, n = state["vae"], len(size)
    vae["encoder.conv_out.weight"][:n] *= size[:, None, None, None]
    vae["encoder.conv_out.bias"][:n] *= size
    vae["encoder.conv_out.bias"][n:] += 2 * size.log()  # of the variance's logarithm
    vae["decoder.conv_in.weight"] /= size[None, :, None, None]
    translation = load(work / "translation.pt")
    save(work / "translation.pt", translation | {"size": size})
    save(work / "vae.pt", {name: value for name, value in state.items() if name != "optimizer"})


@torch.no_grad()
def narrow_flow(work: Path) -> None:
    flow, translation = load(work / "flow.pt"), load(work / "translation.pt")
    size = translation["size"]
    lift = flow["scale"] * translation["up"] / size  # [16, 8]
    lower = size[:, None] * translation["down"] / flow["scale"]  # [8, 16]
    shift = flow["scale"] * (translation["mean"] - flow["shift"])
    for weights in (flow["model"], flow["average"]):
        first, last = "transformer.x_embedder", "transformer.proj_out"
        # a token is 16 channels x 4 places
        wide = weights[f"{first}.weight"].unflatten(1, (-1, 4))
        weights[f"{first}.bias"] += torch.einsum("hck,c->h", wide, shift)
        weights[f"{first}.weight"] = torch.einsum("hck,cd->hdk", wide, lift).flatten(1)
        weights[f"{last}.weight"] = lowered(weights[f"{last}.weight"], lower)
        weights[f"{last}.bias"] = lowered(weights[f"{last}.bias"], lower)
    # a new warm-up and a new course of the learning rate
    start = {"seen": flow["seen"], "step": 0, "spent": 0.0}
    save(work / "flow.pt", {"model": flow["model"], "average": flow["average"], **start})


def lowered(weight: Tensor, lower: Tensor) -> Tensor:
    """[64, ...] -> [32, ...]"""
    return torch.einsum("dc,ck...->dk...", lower, weight.unflatten(0, (-1, 4))).flatten(0, 1)


@torch.no_grad()
def latents(work: Path, state: dict) -> Tensor:
    vae = build_vae(channels_of(state)).eval()
    vae.load_state_dict(state["vae"])
    return vae.encode(to_tensor(pictures(work, 256, HELD_OUT_SEED)[:128])).latent_dist.mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["vae", "balance", "flow"])
    parser.add_argument("--work", type=Path, default=WORK)
    given = parser.parse_args()
    {"vae": narrow_vae, "balance": balance, "flow": narrow_flow}[given.stage](given.work)


if __name__ == "__main__":
    sys.exit(main())
