"""What the small model scores: python scripts/small_base/evaluate.py

Decibels of the VAE on held-out drawings, and how often the judge finds in a sample what its prompt asks for. Reads the
packed files, as fp16 as they are.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from common import HELD_OUT_SEED, arguments, pictures, to_tensor
from diffusers import FluxPipeline
from PIL import Image
from train_vae import decibels, subject_pictures

from flux_db.demo.judge import judge
from flux_db.demo.tiny_model import write_tiny_model
from flux_db.demo.world import SUBJECTS, prompt_of, random_scene
from flux_db.score.prompts import wanted

PROMPTS = 1024
BATCH = 16
STEPS = 12  # as in the demo


@torch.no_grad()
def main() -> None:
    given = arguments("Score the small model.", minutes=0)
    with tempfile.TemporaryDirectory() as name:
        write_tiny_model(Path(name, "model"), "small")
        pipe = FluxPipeline.from_pretrained(Path(name, "model"), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    figures = {"held out": decibels(pipe.vae, to_tensor(pictures(given.work, 256, HELD_OUT_SEED)))}
    figures |= {subject: decibels(pipe.vae, subject_pictures(subject)) for subject in SUBJECTS}
    print("VAE: " + ", ".join(f"{name} {value:.2f} dB" for name, value in figures.items()), flush=True)
    prompts = [prompt_of(random_scene(HELD_OUT_SEED, i)) for i in range(PROMPTS)]
    for guidance in (1.0, 3.5):
        drawn = sample(pipe, prompts, guidance)
        show(drawn[:64]).save(given.work / f"samples_{guidance}.png")
        shares = following(drawn, prompts)
        print(f"guidance {guidance}: " + ", ".join(f"{q} {share:.3f}" for q, share in shares.items()), flush=True)


def sample(pipe: FluxPipeline, prompts: list[str], guidance: float) -> list[Image.Image]:
    drawn: list[Image.Image] = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        drawn += pipe(
            part,
            height=64,
            width=64,
            guidance_scale=guidance,
            num_inference_steps=STEPS,
            max_sequence_length=20,
            generator=[torch.Generator().manual_seed(start + i) for i in range(len(part))],
        ).images
    return drawn


def following(drawn: list[Image.Image], prompts: list[str]) -> dict[str, float]:
    """Of each attribute, the share of prompts with it whose sample shows it."""
    verdict, hits = judge(drawn), defaultdict(list)
    for i, prompt in enumerate(prompts):
        for question, answer in wanted(prompt).answers.items():
            hits[question].append(verdict.best(question)[i] == answer)
    return {question: float(np.mean(values)) for question, values in hits.items()}


def show(drawn: list[Image.Image], columns: int = 8) -> Image.Image:
    rows = [drawn[i : i + columns] for i in range(0, len(drawn), columns)]
    return Image.fromarray(np.concatenate([np.concatenate([np.asarray(p) for p in row], axis=1) for row in rows]))


if __name__ == "__main__":
    main()
