"""Micro-batch i of a run, as arrays in the order that the training step takes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flux_db import flow, stream
from flux_db.config import Config
from flux_db.dataset import Dataset, Sample
from flux_db.encode import Cache, read
from flux_db.errors import UserError
from flux_db.images import load_rgb, resize_and_crop
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


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Indexable: item i is micro-batch `start` + i. A pure function of i; holds no picture in memory."""

    config: Config
    dataset: Dataset
    cache: Cache
    dealing: Dealing
    latent_shape: tuple[int, int, int]
    """[C, h, w] of one picture's latent."""
    learning_rates: np.ndarray
    """[steps] of the whole run."""
    num_timesteps: int
    start: int = 0

    def __len__(self) -> int:
        return len(self.learning_rates) * self.dealing.accumulation - self.start

    def __getitem__(self, i: int) -> Batch:
        micro_step = self.start + int(i)
        positions = self.dealing.positions(micro_step)
        rows = [self._row(k, self.dataset.samples, lane=0) for k in positions]
        if self.dataset.class_samples:
            rows += [self._row(k, self.dataset.class_samples, lane=1) for k in positions]
        columns = [np.stack(column) for column in zip(*rows, strict=True)]
        lr = np.float32(self.learning_rates[micro_step // self.dealing.accumulation])
        return (*columns, np.array(lr), np.array(self.dealing.is_boundary(micro_step)))

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))

    def _row(self, k: int, samples: tuple[Sample, ...], lane: int) -> Batch:
        """One sample: everything random about it comes from its position k in the stream."""
        seed, loss = self.config.output.seed, self.config.loss
        sample = samples[stream.item(seed, k, len(samples), lane)]
        u = flow.timestep_fraction(
            self._rng(k, Purpose.TIMESTEP, lane),
            loss.weighting_scheme,
            logit_mean=loss.logit_mean,
            logit_std=loss.logit_std,
            mode_scale=loss.mode_scale,
        )
        prompt = self._prompt(sample.prompt)
        return (
            self._picture(sample, k, lane),
            self._rng(k, Purpose.POSTERIOR, lane).standard_normal(self.latent_shape, np.float32),
            self._rng(k, Purpose.NOISE, lane).standard_normal(self.latent_shape, np.float32),
            np.int32(flow.timestep_index(u, self.num_timesteps)),
            prompt["prompt_embeds"],
            prompt["pooled_prompt_embeds"],
            np.int32(self._rng(k, Purpose.DROPOUT, lane).integers(-(2**31), 2**31)),
        )

    def _rng(self, k: int, purpose: Purpose, lane: int) -> np.random.Generator:
        return stream.generator(self.config.output.seed, k, purpose, lane)

    def _picture(self, sample: Sample, k: int, lane: int) -> np.ndarray:
        data = self.config.data
        flip = data.random_flip and bool(self._rng(k, Purpose.FLIP, lane).random() < 0.5)
        if data.cache_latents:
            return _cached(self.cache.picture_file(sample, flip), str(sample.picture.path))["moments"]
        u, v = (0.5, 0.5) if data.center_crop else self._rng(k, Purpose.CROP, lane).random(2)
        image = load_rgb(sample.picture.path, self.cache.background)
        return resize_and_crop(image, (data.resolution, data.resolution), (u, v), flip)

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
        source, list(COLUMNS), shuffle=False, num_parallel_workers=workers, python_multiprocessing=False
    )
