"""The run of bench_quality.py by diffusers and peft on torch: the same base, pictures, steps and prompts.

    python scripts/torch_lora.py --model DIR --pictures DIR --output DIR --seed 1 --prompts "a photo of sks dog" ...

It follows diffusers' train_dreambooth_lora_flux.py: uniform timesteps, guidance 1, AdamW, cached latents. Runs in an
environment with the `interop` extra. The samples go to a folder that `flux-db score` reads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import yaml
from diffusers import FluxPipeline
from diffusers.optimization import get_scheduler
from peft import LoraConfig
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flux_db.run.sample_files import round_folder, write
from flux_db.settings.schema import DEFAULT_LAYERS

PROMPT = "a photo of sks dog"
LENGTH = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", nargs="+", required=True, help="of the samples")
    parser.add_argument("--num", type=int, default=3, help="samples of each prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    config = {"instance_data_dir": str(given.pictures), "instance_prompt": PROMPT, "max_train_steps": given.steps}
    (given.output / "config.yaml").write_text(yaml.safe_dump(config))
    torch.manual_seed(given.seed)
    pipe = FluxPipeline.from_pretrained(given.model, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.requires_grad_(False)
    draw_samples(pipe, given, 0)
    pipe.transformer.add_adapter(
        LoraConfig(
            r=given.rank, lora_alpha=given.rank, init_lora_weights="gaussian", target_modules=list(DEFAULT_LAYERS)
        )
    )
    train(pipe, given)
    draw_samples(pipe, given, given.steps)


def train(pipe: FluxPipeline, given: argparse.Namespace) -> None:
    pixels = [np.asarray(Image.open(path).convert("RGB")) for path in sorted(given.pictures.glob("*.png"))]
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        posterior = pipe.vae.encode(x).latent_dist
        text, pooled, text_ids = pipe.encode_prompt(prompt=PROMPT, prompt_2=PROMPT, max_sequence_length=LENGTH)
    side = x.shape[-1] // pipe.vae_scale_factor
    image_ids = pipe._prepare_latent_image_ids(given.batch, side // 2, side // 2, x.device, x.dtype)
    parameters = [p for p in pipe.transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=given.learning_rate, betas=(0.9, 0.999), weight_decay=1e-4, eps=1e-8)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=given.steps)
    sigmas = pipe.scheduler.sigmas[:-1] if len(pipe.scheduler.sigmas) == 1001 else pipe.scheduler.sigmas
    pipe.transformer.train()
    order = torch.cat([torch.randperm(len(x)) for _ in range(given.steps * given.batch // len(x) + 1)])
    for step in range(given.steps):
        rows = order[step * given.batch : (step + 1) * given.batch]
        z = posterior.mean[rows] + posterior.std[rows] * torch.randn_like(posterior.std[rows])
        x_0 = (z - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
        eps = torch.randn_like(x_0)
        sigma = sigmas[torch.randint(0, len(sigmas), (given.batch,))]
        x_t = (1 - sigma[:, None, None, None]) * x_0 + sigma[:, None, None, None] * eps
        b, c, h, w = x_0.shape
        v = pipe.transformer(
            hidden_states=pipe._pack_latents(x_t, b, c, h, w),
            timestep=sigma,
            guidance=torch.ones(b),
            pooled_projections=pooled.expand(b, -1),
            encoder_hidden_states=text.expand(b, -1, -1),
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        loss = ((v - pipe._pack_latents(eps - x_0, b, c, h, w)) ** 2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    pipe.transformer.eval()


def draw_samples(pipe: FluxPipeline, given: argparse.Namespace, step: int) -> None:
    folder = round_folder(given.output, step)
    folder.mkdir(parents=True, exist_ok=True)
    for i, prompt in enumerate(given.prompts):
        pictures = pipe(
            [prompt] * given.num,
            height=64,
            width=64,
            num_inference_steps=12,
            guidance_scale=3.5,
            max_sequence_length=LENGTH,
            generator=[torch.Generator().manual_seed(42 + n) for n in range(given.num)],
        ).images
        for n, picture in enumerate(pictures):
            write(folder / f"{i * given.num + n:02d}.png", picture, prompt=prompt, number=n, seed=42)


if __name__ == "__main__":
    main()
