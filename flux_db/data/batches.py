"""Micro-batch i of a run, as arrays in the order that the training step takes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flux_db import stream
from flux_db.data import timesteps
from flux_db.data.buckets import Size
from flux_db.data.dataset import Dataset, Sample
from flux_db.data.draw_order import Order
from flux_db.data.encode_cache import Cache, read
from flux_db.data.masks import loss_weights, mask_at
from flux_db.data.pixels import load_rgb, resize_and_crop
from flux_db.errors import UserError
from flux_db.settings.schema import Config
from flux_db.stream import Dealing, Purpose

Batch = tuple[np.ndarray, ...]

COLUMNS = (
    "pictures",
    "eps",
    "noise",
    "index",
    "prompt_embeds",
    "pooled_prompt_embeds",
    "dropout_key",
    "lr",
    "boundary",
)
MASK_COLUMN = "mask"


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Indexable: item i is micro-batch `start` + i. A pure function of i; holds no picture in memory."""

    config: Config
    dataset: Dataset
    cache: Cache
    dealing: Dealing
    latent_shape: tuple[int, int, int]
    """[C, h, w] of the latent of a square of --resolution."""
    learning_rates: np.ndarray
    """[steps] of the whole run."""
    num_timesteps: int
    start: int = 0

    def __len__(self) -> int:
        return len(self.learning_rates) * self.dealing.accumulation - self.start

    def __getitem__(self, i: int) -> Batch:
        micro_step = self.start + int(i)
        positions = self.dealing.positions(micro_step)
        samples = [self.dataset.samples[self.order.item(k)] for k in positions]
        rows = [self._row(k, sample, lane=0) for k, sample in zip(positions, samples, strict=True)]
        if self.dataset.class_samples:
            classes = [self._class_sample(k, sample.size) for k, sample in zip(positions, samples, strict=True)]
            rows += [self._row(k, sample, lane=1) for k, sample in zip(positions, classes, strict=True)]
        columns = [np.stack(column) for column in zip(*rows, strict=True)]
        masks = [columns.pop()] if self.dataset.masked else []
        lr = np.float32(self.learning_rates[micro_step // self.dealing.accumulation])
        return (*columns, np.array(lr), np.array(self.dealing.is_boundary(micro_step)), *masks)

    @property
    def columns(self) -> list[str]:
        """The names of a batch's arrays, in order."""
        return [*COLUMNS, MASK_COLUMN] if self.dataset.masked else list(COLUMNS)

    @cached_property
    def order(self) -> Order:
        return self.dataset.order(self.config.output.seed, self.dealing.global_batch)

    def size(self, i: int) -> Size:
        """Height and width of the pictures of item i; on all cards the same."""
        position = self.dealing.positions(self.start + i)[0]
        return self.dataset.samples[self.order.item(position)].size

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))

    def _class_sample(self, k: int, size: Size) -> Sample:
        """The class sample at a position, in the size of the subject's sample there."""
        samples = self.dataset.class_samples
        return replace(samples[stream.item(self.config.output.seed, k, len(samples), lane=1)], size=size)

    def _row(self, k: int, sample: Sample, lane: int) -> Batch:
        """One sample: everything random about it comes from its position k in the stream."""
        loss = self.config.loss
        u = timesteps.timestep_fraction(
            self._rng(k, Purpose.TIMESTEP, lane),
            loss.weighting_scheme,
            logit_mean=loss.logit_mean,
            logit_std=loss.logit_std,
            mode_scale=loss.mode_scale,
        )
        prompt = self._prompt("" if lane == 0 and self._drops_caption(k) else sample.prompt)
        picture, mask = self._picture(sample, k, lane)
        latent = self._latent_shape(sample.size)
        return (
            picture,
            self._rng(k, Purpose.POSTERIOR, lane).standard_normal(latent, np.float32),
            self._rng(k, Purpose.NOISE, lane).standard_normal(latent, np.float32),
            np.int32(timesteps.timestep_index(u, self.num_timesteps)),
            prompt["prompt_embeds"],
            prompt["pooled_prompt_embeds"],
            np.int32(self._rng(k, Purpose.DROPOUT, lane).integers(-(2**31), 2**31)),
            *([self._loss_weights(mask, latent)] if self.dataset.masked else []),
        )

    def _rng(self, k: int, purpose: Purpose, lane: int) -> np.random.Generator:
        return stream.generator(self.config.output.seed, k, purpose, lane)

    def _picture(self, sample: Sample, k: int, lane: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Latent moments or pixels, and the mask at the latent's size."""
        data = self.config.data
        flip = data.random_flip and bool(self._rng(k, Purpose.FLIP, lane).random() < 0.5)
        if data.cache_latents:
            versions = sample.versions
            number = int(self._rng(k, Purpose.CACHED_CROP, lane).integers(len(versions)))
            arrays = _cached(self.cache.picture_file(versions[number], flip), str(sample.picture.path))
            return arrays["moments"], arrays.get("mask")
        u, v = (0.5, 0.5) if data.center_crop else self._rng(k, Purpose.CROP, lane).random(2)
        image = load_rgb(sample.picture.path, self.cache.background)
        pixels = resize_and_crop(image, sample.size, (u, v), flip)
        if sample.mask is None:
            return pixels, None
        latent = self._latent_shape(sample.size)[1:]
        return pixels, mask_at(sample.mask, sample.picture.size, sample.size, (u, v), flip, latent)

    def _latent_shape(self, size: Size) -> tuple[int, int, int]:
        channels, side, _ = self.latent_shape
        shrink = self.config.data.resolution // side
        return channels, size[0] // shrink, size[1] // shrink

    def _loss_weights(self, mask: np.ndarray | None, latent: tuple[int, int, int]) -> np.ndarray:
        """[1, h, w]; class samples, and pictures without a mask, count fully."""
        if mask is None:
            return np.ones((1, *latent[1:]), np.float32)
        return loss_weights(mask, self.config.data.unmasked_weight)[None]

    def _drops_caption(self, k: int) -> bool:
        share = self.config.data.caption_dropout
        return share > 0 and bool(self._rng(k, Purpose.CAPTION, lane=0).random() < share)

    def _prompt(self, prompt: str) -> dict[str, np.ndarray]:
        return _cached(self.cache.prompt_file(prompt), f'the prompt "{prompt}"')


def _cached(path, what: str) -> dict[str, np.ndarray]:
    arrays = read(path)
    if arrays is None:
        raise UserError(f"{path}: the stored encoding of {what} is gone or damaged; start again to have it made anew")
    return arrays


def prefetch(source: BatchSource, workers: int) -> Iterator[Batch]:
    """The source's batches in order; with workers, prepared ahead in as many threads."""
    if workers == 0 or len(source) == 0:
        return iter(source)
    return dataset_of(source, workers).create_tuple_iterator(num_epochs=1, output_numpy=True)


def dataset_of(source: BatchSource, workers: int):
    """A MindSpore dataset of the same batches in the same order."""
    from mindspore.dataset import GeneratorDataset

    workers = min(max(1, workers), os.cpu_count() or 1)  # MindSpore refuses more
    return GeneratorDataset(
        source, source.columns, shuffle=False, num_parallel_workers=workers, python_multiprocessing=False
    )
