"""How smooth the latents of the small VAE are: python scripts/small_base/smoothness.py

For each channel the mean square difference of neighbours over twice the variance: 1 is white noise, 0 is constant. A
transformer learns smooth latents sooner.
"""

from __future__ import annotations

import torch
from common import HELD_OUT_SEED, arguments, pictures, to_tensor
from train_flow import load_vae


@torch.no_grad()
def main() -> None:
    given = arguments("Measure how smooth the latents are.", minutes=0)
    z = load_vae(given.work).encode(to_tensor(pictures(given.work, 256, HELD_OUT_SEED)[:64])).latent_dist.mean
    step = (z[..., 1:] - z[..., :-1]).square().mean(dim=(0, 2, 3))
    roughness = step / (2 * z.var(dim=(0, 2, 3)))
    share = z.var(dim=(0, 2, 3)) / z.var(dim=(0, 2, 3)).sum()
    print("channels:", " ".join(f"{value:.2f}" for value in sorted(roughness.tolist())))
    print(f"mean {roughness.mean():.3f}, weighted by variance {(roughness * share).sum():.3f}")


if __name__ == "__main__":
    main()
