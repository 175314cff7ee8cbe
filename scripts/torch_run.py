"""What diffusers' example script does, as a loop of its own, and sampling by diffusers' pipeline; for bench_peers.py.

    python scripts/torch_run.py train MODEL PICTURES OUTPUT --resolution 128 --batch 1 --tokens 64 --steps 50
    python scripts/torch_run.py sample MODEL --resolution 128 --tokens 64 --steps 20 --pictures 4

Needs the `interop` extra. `train` encodes, trains with AdamW and rank 16, saves the LoRA, and prints a line for each
step; `sample` prints the seconds of a first and of a second round.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from bench_torch import LAYERS
from diffusers import FluxPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image

PROMPT = "a photo of sks dog"


def train(given: argparse.Namespace) -> None:
    torch.manual_seed(0)
    pipeline = FluxPipeline.from_pretrained(given.model)
    with torch.no_grad():
        texts = pipeline.encode_prompt(PROMPT, PROMPT, max_sequence_length=given.tokens)
        latents = [encode(pipeline.vae, path, given.resolution) for path in sorted(Path(given.folder).glob("*.png"))]
    model = pipeline.transformer.requires_grad_(False)
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, init_lora_weights="gaussian", target_modules=LAYERS))
    weights = [p for p in model.train().parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=1e-4)
    side = latents[0].shape[-1] // 2
    image_ids = FluxPipeline._prepare_latent_image_ids(given.batch, side, side, "cpu", torch.float32)
    for step in range(given.steps):
        x_0 = torch.cat([latents[(step * given.batch + i) % len(latents)] for i in range(given.batch)])
        noise, sigma = torch.randn_like(x_0), torch.rand(given.batch)
        x_t = (1 - sigma.view(-1, 1, 1, 1)) * x_0 + sigma.view(-1, 1, 1, 1) * noise
        velocity = model(
            hidden_states=packed(x_t),
            timestep=sigma,
            guidance=torch.ones(given.batch) if model.config.guidance_embeds else None,
            pooled_projections=texts[1].repeat(given.batch, 1),
            encoder_hidden_states=texts[0].repeat(given.batch, 1, 1),
            txt_ids=texts[2],
            img_ids=image_ids,
            return_dict=False,
        )[0]
        loss = ((velocity - packed(noise - x_0)) ** 2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"Steps: {step + 1}/{given.steps} [loss {loss.item():.3f}", end="\r", flush=True, file=sys.stderr)
    FluxPipeline.save_lora_weights(given.output, transformer_lora_layers=get_peft_model_state_dict(model))


def encode(vae: torch.nn.Module, path: Path, side: int) -> torch.Tensor:
    pixels = np.asarray(Image.open(path).convert("RGB").resize((side, side)), np.float32) / 127.5 - 1.0
    moments = vae.encode(torch.from_numpy(pixels).permute(2, 0, 1)[None]).latent_dist.sample()
    return (moments - vae.config.shift_factor) * vae.config.scaling_factor


def packed(latents: torch.Tensor) -> torch.Tensor:
    return FluxPipeline._pack_latents(latents, *latents.shape)


def sample(given: argparse.Namespace) -> None:
    pipeline = FluxPipeline.from_pretrained(given.model)
    pipeline.set_progress_bar_config(disable=True)
    texts = pipeline.encode_prompt(PROMPT, PROMPT, max_sequence_length=given.tokens)
    for _ in range(2):
        start = time.perf_counter()
        pipeline(
            prompt_embeds=texts[0],
            pooled_prompt_embeds=texts[1],
            num_images_per_prompt=given.pictures,
            num_inference_steps=given.steps,
            height=given.resolution,
            width=given.resolution,
        )
        print(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "sample"])
    parser.add_argument("model")
    parser.add_argument("folder", nargs="?")
    parser.add_argument("output", nargs="?")
    for name, value in {"resolution": 128, "batch": 1, "tokens": 64, "steps": 50, "pictures": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    {"train": train, "sample": sample}[given.what](given)


if __name__ == "__main__":
    main()
