"""Pictures drawn by the model, from stored prompt embeddings: no text encoder is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from PIL import Image

from flux_db.model import flow, loading
from flux_db.model.repeated_calls import CalledOften
from flux_db.model.vae_tiles import decode_in_tiles, is_tiled
from flux_db.settings.prompt_lines import PromptLine
from flux_db.size import Size, drawn_at_once
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


class Group(NamedTuple):
    """Pictures that are drawn together: in one size, in as many steps, by a LoRA of one strength."""

    settings: SampleSettings
    lora: float
    numbers: list[int]
    """Which of the pictures."""


def groups(lines: Sequence[PromptLine], usual: SampleSettings) -> list[Group]:
    """The pictures, each given by its line, in groups; `usual` is what a line without options means."""
    found: dict[tuple[SampleSettings, float], list[int]] = {}
    for number, line in enumerate(lines):
        own = SampleSettings(
            size=line.size(usual.size),
            steps=usual.steps if line.steps is None else line.steps,
            guidance=usual.guidance if line.guidance is None else line.guidance,
        )
        found.setdefault((own, 1.0 if line.lora is None else line.lora), []).append(number)
    return [
        Group(replace(own, batch=drawn_at_once(own.size, len(numbers))), lora, numbers)
        for (own, lora), numbers in found.items()
    ]


class EulerStep(CalledOften, nn.Cell):
    """One denoising step in one graph: packed latents at a noise level, and the change of that level, to the next."""

    def __init__(self, transformer: nn.Cell) -> None:
        # the transformer's parameters keep their names
        super().__init__(auto_prefix=False)
        self.model = transformer

    def construct(self, x_t, timestep, change, guidance, prompt_embeds, pooled, text_ids, image_ids):
        velocity = self.model(
            hidden_states=x_t,
            timestep=timestep.astype(x_t.dtype) / 1000,
            guidance=guidance,
            pooled_projections=pooled,
            encoder_hidden_states=prompt_embeds,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        return (x_t.astype(ms.float32) + change * velocity).astype(x_t.dtype)


class Sampler:
    """Draws with a transformer that may be in training. The host only counts the denoising steps."""

    def __init__(
        self, model: Path, transformer: nn.Cell, dtype: ms.Type, variant: str | None = None, tiling: str = "auto"
    ) -> None:
        self.transformer = transformer
        self.dtype = dtype
        self.tiling = tiling
        self.scheduler = loading.load_scheduler(model)
        self.vae = loading.load_vae(model, loading.VAE_DTYPE, variant)
        self.step = EulerStep(transformer)
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

    def pixels(self, requests: Sequence[Request], settings: SampleSettings) -> list[np.ndarray]:
        """One batch of pictures before rounding, each [3, H, W]; white is 1 and black is -1."""
        # every batch is full, so that there is one compiled shape
        padded = [*requests, *[requests[-1]] * (settings.batch - len(requests))]
        h, w = (side // self.factor for side in settings.size)
        latents = flow.unpack(self.denoise(padded, settings, h, w).astype(ms.float32), h, w)
        latents = latents / self.vae.config.scaling_factor + self.vae.config.shift_factor
        if is_tiled(self.tiling, *settings.size):
            return [decode_in_tiles(self._decode, one, self.factor) for one in latents.asnumpy()[: len(requests)]]
        # one at a time: the VAE needs more memory than the transformer
        return [self._decode(latents[i]) for i in range(len(requests))]

    def _decode(self, latents: Tensor | np.ndarray) -> np.ndarray:
        """[C, h, w] -> [3, H, W]"""
        latents = latents if isinstance(latents, Tensor) else Tensor(np.ascontiguousarray(latents))
        return self.vae.decode(latents.expand_dims(0), return_dict=False)[0].asnumpy()[0]

    def denoise(self, requests: Sequence[Request], settings: SampleSettings, height: int, width: int) -> Tensor:
        """Packed latents from noise; height and width are the latents'."""
        noise = [
            generator(r.seed, r.number, r.purpose).standard_normal((self.channels, height, width), np.float32)
            for r in requests
        ]
        x_t = flow.pack(Tensor(np.stack(noise))).astype(self.dtype)
        prompt_embeds = Tensor(np.stack([r.prompt_embeds for r in requests])).astype(self.dtype)
        pooled = Tensor(np.stack([r.pooled_prompt_embeds for r in requests])).astype(self.dtype)
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = Tensor(np.full(len(requests), settings.guidance, np.float32))
        text_ids = Tensor(np.zeros((prompt_embeds.shape[1], 3), np.float32))
        image_ids = Tensor(flow.image_position_ids(height, width))
        timesteps, sigmas = sampling_schedule(self.scheduler, settings.steps, x_t.shape[1])
        for i, timestep in enumerate(timesteps):
            t = Tensor(np.full(len(requests), timestep, np.float32))
            change = Tensor(sigmas[i + 1] - sigmas[i])
            x_t = self.step(x_t, t, change, guidance, prompt_embeds, pooled, text_ids, image_ids)
        return x_t


def sampling_schedule(scheduler: Any, steps: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Timesteps [steps] and noise levels [steps + 1], with the scheduler's shift for a picture of so many tokens."""
    c = scheduler.config
    slope = (c.max_shift - c.base_shift) / (c.max_image_seq_len - c.base_image_seq_len)
    mu = tokens * slope + c.base_shift - slope * c.base_image_seq_len
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.timesteps.asnumpy(), scheduler.sigmas.asnumpy()


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
