"""Pictures drawn by the model, from stored prompt embeddings: no text encoder is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from PIL import Image

from flux_db.model import flow, loading
from flux_db.model.quiet import quiet
from flux_db.size import Size
from flux_db.stream import Purpose, generator


@dataclass(frozen=True, kw_only=True)
class Request:
    """One picture to draw; seed, number and purpose alone decide its starting noise."""

    prompt_embeds: np.ndarray
    """[L, D]"""
    pooled_prompt_embeds: np.ndarray
    """[D']"""
    seed: int
    number: int
    purpose: Purpose = Purpose.SAMPLE


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    size: Size
    steps: int
    guidance: float
    batch: int = 1


class Sampler:
    """mindone's FLUX pipeline around a transformer that may be in training."""

    def __init__(self, model: Path, transformer: nn.Cell, dtype: ms.Type, variant: str | None = None) -> None:
        self.transformer = transformer
        self.dtype = dtype
        with quiet():
            from mindone.diffusers import FluxPipeline

            self.pipeline: Any = FluxPipeline(
                scheduler=loading.load_scheduler(model),
                vae=loading.load_vae(model, loading.VAE_DTYPE, variant),
                text_encoder=None,
                tokenizer=None,
                text_encoder_2=None,
                tokenizer_2=None,
                transformer=transformer,
            )
        self.pipeline.set_progress_bar_config(disable=True)
        self.vae = self.pipeline.vae
        self.channels = self.vae.config.latent_channels
        self.factor = 2 ** (len(self.vae.config.block_out_channels) - 1)

    def draw(self, requests: Sequence[Request], settings: SampleSettings) -> Iterator[Image.Image]:
        """The pictures, one batch at a time."""
        return map(to_picture, self.draw_pixels(requests, settings))

    def draw_pixels(self, requests: Sequence[Request], settings: SampleSettings) -> Iterator[np.ndarray]:
        """The same before rounding, each [3, H, W]; not looked at, so that they may hold anything."""
        was_training = self.transformer.training
        self.transformer.set_train(False)
        try:
            for start in range(0, len(requests), settings.batch):
                yield from self.pixels(requests[start : start + settings.batch], settings)
        finally:
            self.transformer.set_train(was_training)

    def pixels(self, requests: Sequence[Request], settings: SampleSettings) -> np.ndarray:
        """One batch of pictures before rounding: [N, 3, H, W], white is 1 and black is -1."""
        # every batch is full, so that there is one compiled shape
        padded = [*requests, *[requests[-1]] * (settings.batch - len(requests))]
        h, w = (side // self.factor for side in settings.size)
        noise = [
            generator(r.seed, r.number, r.purpose).standard_normal((self.channels, h, w), np.float32) for r in padded
        ]
        tokens = self.pipeline(
            prompt_embeds=Tensor(np.stack([r.prompt_embeds for r in padded])).astype(self.dtype),
            pooled_prompt_embeds=Tensor(np.stack([r.pooled_prompt_embeds for r in padded])).astype(self.dtype),
            latents=flow.pack(Tensor(np.stack(noise))).astype(self.dtype),
            height=settings.size.height,
            width=settings.size.width,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance,
            output_type="latent",
        )[0]
        latents = flow.unpack(tokens.astype(ms.float32), h, w) / self.vae.config.scaling_factor
        pixels = self.vae.decode(latents + self.vae.config.shift_factor, return_dict=False)[0].asnumpy()
        return pixels[: len(requests)]


def to_picture(pixels: np.ndarray) -> Image.Image:
    """[3, H, W] in -1..1 -> picture."""
    if not np.isfinite(pixels).all():
        raise ValueError("the model drew a picture with values that are not finite")
    scaled = np.clip((pixels.transpose(1, 2, 0) + 1.0) * 127.5, 0.0, 255.0)
    return Image.fromarray(scaled.round().astype(np.uint8))


def grid(rows: Sequence[Sequence[Image.Image]], gap: int = 4) -> Image.Image:
    """All pictures in one, row by row."""
    cell_w = max(p.width for row in rows for p in row)
    cell_h = max(p.height for row in rows for p in row)
    columns = max(len(row) for row in rows)
    sheet = Image.new("RGB", (columns * (cell_w + gap) - gap, len(rows) * (cell_h + gap) - gap), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            sheet.paste(picture, (x * (cell_w + gap), y * (cell_h + gap)))
    return sheet
