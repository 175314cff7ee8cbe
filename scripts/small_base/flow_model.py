"""The trainable part of the small model on torch: transformer, T5 and CLIP together, and drawing with them."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from flux_db.demo import tiny_model

CLIP_LENGTH, T5_LENGTH = 28, 32
LATENT = 16  # its side; a token is a 2x2 patch


class FlowModel(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        words = tiny_model.words_of("small")
        clip = tiny_model.clip_config("small", vocab_size=len(tiny_model.clip_vocabulary(words)[0]))
        t5 = tiny_model.t5_config("small", vocab_size=tiny_model.t5_tokenizer_object(words).get_vocab_size())
        config = tiny_model.transformer_config("small", {"latent_channels": channels}, clip, t5)
        self.clip = CLIPTextModel(CLIPTextConfig(**clip))
        self.t5 = T5EncoderModel(T5Config(**{**t5, "dropout_rate": 0.0}))
        self.transformer = FluxTransformer2DModel.from_config(config)
        start_at_identity(self.transformer)

    def forward(self, x_t: Tensor, t: Tensor, guidance: Tensor, clip_ids: Tensor, t5_ids: Tensor) -> Tensor:
        """Velocity; x_t is [B, 64, 4C]: tokens, channels of a 2x2 patch."""
        text = self.t5(t5_ids).last_hidden_state
        pooled = self.clip(clip_ids).pooler_output
        return self.transformer(
            hidden_states=x_t,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=t,
            guidance=guidance,
            img_ids=IMAGE_IDS,
            txt_ids=torch.zeros(text.shape[1], 3),
            return_dict=False,
        )[0]


def image_ids() -> Tensor:
    half = LATENT // 2
    ids = torch.zeros(half, half, 3)
    ids[..., 1] = torch.arange(half)[:, None]
    ids[..., 2] = torch.arange(half)[None, :]
    return ids.reshape(-1, 3)


IMAGE_IDS = image_ids()


def start_at_identity(transformer: FluxTransformer2DModel) -> None:
    """Modulations and the last layer start at zero, as diffusion transformers are trained."""
    for name, module in transformer.named_modules():
        is_modulation = name.endswith(("norm1.linear", "norm1_context.linear", "norm.linear", "norm_out.linear"))
        if isinstance(module, nn.Linear) and (is_modulation or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H*W/4, 4C]"""
    b, c, h, w = latents.shape
    return latents.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpack(tokens: Tensor) -> Tensor:
    """[B, H*W/4, 4C] -> [B, C, H, W]"""
    b, half = tokens.shape[0], LATENT // 2
    return tokens.reshape(b, half, half, -1, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, -1, LATENT, LATENT)


class Tokenizers:
    """The tokenizers of the folder itself; a caption is looked at once."""

    def __init__(self) -> None:
        words = tiny_model.words_of("small")
        vocabulary, merges = tiny_model.clip_vocabulary(words)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "vocab.json").write_text(json.dumps(vocabulary))
            (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges), ""]))
            (folder / "tokenizer_config.json").write_text(json.dumps(tiny_model.CLIP_TOKENIZER))
            self.clip = CLIPTokenizer.from_pretrained(folder)
            (folder / "t5").mkdir()
            (folder / "t5/tokenizer.json").write_text(tiny_model.t5_tokenizer_object(words).to_str())
            (folder / "t5/tokenizer_config.json").write_text(json.dumps(tiny_model.T5_TOKENIZER))
            self.t5 = T5TokenizerFast.from_pretrained(folder / "t5")
        self.known: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, captions: list[str]) -> tuple[np.ndarray, np.ndarray]:
        rows = [self.one(caption) for caption in captions]
        return np.stack([clip for clip, _ in rows]), np.stack([t5 for _, t5 in rows])

    def one(self, caption: str) -> tuple[np.ndarray, np.ndarray]:
        if caption not in self.known:
            clip = self.clip(caption, padding="max_length", max_length=CLIP_LENGTH, truncation=True).input_ids
            t5 = self.t5(caption, padding="max_length", max_length=T5_LENGTH, truncation=True).input_ids
            self.known[caption] = np.array(clip, np.int16), np.array(t5, np.int16)
        return self.known[caption]


def as_ids(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


@torch.no_grad()
def sample(
    model: FlowModel, tokenizers: Tokenizers, prompts: list[str], *, guidance: float, steps: int = 12, seed: int = 0
) -> Tensor:
    """Latents by Euler's method, with the shift of FLUX.1's schedule for this number of tokens."""
    clip_ids, t5_ids = (as_ids(ids) for ids in tokenizers(prompts))
    shape = (len(prompts), LATENT * LATENT // 4, model.transformer.config.in_channels)
    noise = np.random.default_rng(seed).standard_normal(shape, np.float32)
    x = torch.from_numpy(noise)
    shift = np.exp(0.5 + (64 - 256) * 0.65 / 3840)
    sigmas = np.linspace(1.0, 1.0 / steps, steps)
    sigmas = [*(shift * sigmas / (1 + (shift - 1) * sigmas)), 0.0]
    g = torch.full((len(prompts),), guidance)
    for now, after in pairwise(sigmas):
        v = model(x, torch.full((len(prompts),), float(now)), g, clip_ids, t5_ids)
        x = x + (after - now) * v
    return unpack(x)


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: Tensor, scale: float, shift: float) -> np.ndarray:
    """[B, H, W, 3] of bytes"""
    pixels = vae.decode(latents / scale + shift).sample.clamp(-1, 1)
    return ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
