#!/usr/bin/env python
"""The same training step in torch, to compare with: diffusers' FLUX transformer, peft's LoRA, torch's AdamW.

    python scripts/bench_torch.py MODEL_FOLDER

Needs the `interop` extra. 128 px, batch 1, rank 16, 64 text tokens, cached latents and embeddings: what
scripts/bench_step.py measures here. Prints the median seconds per step.
"""

import statistics
import sys
import time

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

# The layers that diffusers' script trains by default.
LAYERS = [
    *(f"attn.{name}" for name in ("to_k", "to_q", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")),
    *(f"{name}.net.{part}" for name in ("ff", "ff_context") for part in ("0.proj", "2")),
]
TEXT_TOKENS, SIDE, STEPS = 64, 8, 50


def main(folder: str) -> None:
    torch.manual_seed(0)
    model = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer").requires_grad_(False)
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, init_lora_weights="gaussian", target_modules=LAYERS))
    weights = [p for p in model.train().parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=1e-4)
    inputs = {
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([1.0]),
        "pooled_projections": torch.randn(1, model.config.pooled_projection_dim),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, model.config.joint_attention_dim),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
        "img_ids": torch.zeros(SIDE * SIDE, 3),
    }
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        latents, noise = torch.randn(2, 1, SIDE * SIDE, model.config.in_channels)
        velocity = model(hidden_states=0.5 * latents + 0.5 * noise, **inputs, return_dict=False)[0]
        loss = ((velocity - (noise - latents)) ** 2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - start)
    print(f"{statistics.median(seconds[1:]):.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
