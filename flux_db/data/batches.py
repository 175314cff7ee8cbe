"""Micro-batch i of a run."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from flux_db import stream
from flux_db.data.dataset import Dataset, Example
from flux_db.data.draw_order import DrawOrder
from flux_db.data.encode_cache import Cache
from flux_db.data.masks import loss_weights, mask_at
from flux_db.data.pixels import load_unchanged, resize_and_crop, to_rgb
from flux_db.data.timesteps import drawn_sigma, nearest_index, timestep_fraction, timestep_index
from flux_db.errors import UserError
from flux_db.settings.concepts import Concept, concepts_of
from flux_db.settings.preserved import is_preserved, preserved_prompt
from flux_db.settings.schema import Config
from flux_db.size import Size
from flux_db.step_inputs import StepInputs
from flux_db.stream import BatchLayout, Purpose

SUBJECT, CLASS, PRESERVED = 0, 1, 2
"""Streams of random numbers."""

NOISES = {"eps": Purpose.POSTERIOR, "noise": Purpose.NOISE}
"""Columns of standard normal numbers in the shape of the latents."""

_THREADS = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "batch")


class _Stacks:
    """Rows of a column in one array. Those of the named columns are kept and used again while the rows are the same."""

    def __init__(self, kept: Sequence[str]) -> None:
        self._kept: dict[str, tuple[list[np.ndarray], np.ndarray]] = {name: ([], np.empty(0)) for name in kept}

    def stack(self, name: str, rows: list[np.ndarray]) -> np.ndarray:
        if name not in self._kept:
            return np.stack(rows)
        known, stacked = self._kept[name]
        if len(known) != len(rows) or any(a is not b for a, b in zip(known, rows, strict=True)):
            stacked = np.stack(rows)
            stacked.flags.writeable = False
            self._kept[name] = rows, stacked
        return stacked


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Indexable: item i is micro-batch `start` + i. A pure function of i; holds no picture in memory."""

    config: Config
    dataset: Dataset
    cache: Cache
    layout: BatchLayout
    latent_shape: tuple[int, int, int]
    """[C, h, w] of the latent of a square of --resolution."""
    learning_rates: np.ndarray
    """[steps] of the whole run; [steps, 3] if CLIP is trained."""
    sigmas: np.ndarray
    """[T] noise level of each timestep index, descending."""
    start: int = 0

    def __len__(self) -> int:
        return len(self.learning_rates) * self.layout.accumulation - self.start

    def __getitem__(self, i: int) -> StepInputs:
        micro_step = self.start + int(i)
        positions = self.layout.positions(micro_step)
        entries = [(k, self.dataset.examples[self.draw_order.item(k)], SUBJECT) for k in positions]
        if self.dataset.class_examples:
            entries += [(k, self._class_example(k, example.size), CLASS) for k, example, _ in entries]
        # in threads: reading, drawing and copying release Python's lock
        reading = _THREADS.map(lambda entry: self._row(*entry), entries)
        noise, drawing = self._noise(entries)
        rows = list(reading)
        of_class = [self._preserved(k, example) for k, example, _ in entries] if is_preserved(self.config) else []
        of_column = {name: [row[name] for row in (*rows, *of_class) if name in row] for name in rows[0]}
        columns = {name: self._stacks.stack(name, of_column[name]) for name in of_column}
        for job in drawing:
            job.result()
        lr = np.array(self.learning_rates[micro_step // self.layout.accumulation], np.float32)
        return StepInputs(**columns, **noise, lr=lr, boundary=np.array(self.layout.is_boundary(micro_step)))

    def _noise(self, entries: Sequence[tuple[int, Example, int]]) -> tuple[dict[str, np.ndarray], list[Future]]:
        """Two columns, and the jobs that draw them, row by row: most of a batch's time."""
        shape = (len(entries), *self._latent_shape(entries[0][1].size))
        arrays = {name: np.empty(shape, np.float32) for name in NOISES}
        jobs = [
            _THREADS.submit(self._rng(k, purpose, stream_id).standard_normal, dtype=np.float32, out=arrays[name][row])
            for name, purpose in NOISES.items()
            for row, (k, _, stream_id) in enumerate(entries)
        ]
        return arrays, jobs

    @cached_property
    def _stacks(self) -> _Stacks:
        return _Stacks(("prompt_embeds", "pooled_prompt_embeds"))

    @cached_property
    def _concepts(self) -> tuple[Concept, ...]:
        return concepts_of(self.config)

    def concept_counts(self, step: int) -> np.ndarray:
        """How many examples of each concept an optimizer step, counted from 1, has over all devices."""
        batch = self.layout.global_batch
        items = [self.draw_order.item(k) for k in range((step - 1) * batch, step * batch)]
        numbers = [self.dataset.examples[item].concept for item in items]
        return np.bincount(numbers, minlength=len(self._concepts))

    @cached_property
    def draw_order(self) -> DrawOrder:
        return self.dataset.draw_order(self.config.output.seed, self.layout.global_batch)

    def size(self, i: int) -> Size:
        """Of the pictures of item i; on all devices the same."""
        position = self.layout.positions(self.start + i)[0]
        return self.dataset.examples[self.draw_order.item(position)].size

    def __iter__(self) -> Iterator[StepInputs]:
        return (self[i] for i in range(len(self)))

    def _class_example(self, k: int, size: Size) -> Example:
        """The class example at a position, in the size of the subject's example there."""
        examples = self.dataset.class_examples
        return replace(examples[stream.item(self.config.output.seed, k, len(examples), CLASS)], size=size)

    def _row(self, k: int, example: Example, stream_id: int) -> dict[str, np.ndarray]:
        """One example: everything random about it comes from its position k in the stream."""
        text = "" if stream_id == SUBJECT and self._drops_caption(k, example) else example.prompt
        picture, mask = self._picture(example, k, stream_id)
        latent = self._latent_shape(example.size)
        row = {
            "pictures": picture,
            "index": np.int32(self._timestep(k, stream_id, latent)),
            **self._text(text),
            "dropout_key": stream.dropout_key(self.config.output.seed, k, stream_id),
        }
        if self.dataset.weighted:
            row["mask"] = self._loss_weights(mask, latent) * np.float32(example.weight)
        if self.dataset.is_of_several:
            row["concept"] = np.zeros(len(self._concepts), np.float32)
            row["concept"][example.concept] = stream_id == SUBJECT
        return row

    def _preserved(self, k: int, example: Example) -> dict[str, np.ndarray]:
        """What a row of --preserve_class has of its own; the picture, its noise and its timestep are the subject's."""
        text = preserved_prompt(example.prompt, self._concepts[example.concept])
        if text is None:
            raise UserError(f'--preserve_class: the trigger is not in the prompt "{example.prompt}"')
        return {**self._text(text), "dropout_key": stream.dropout_key(self.config.output.seed, k, PRESERVED)}

    def _text(self, text: str) -> dict[str, np.ndarray]:
        """The two columns of a prompt."""
        prompt = self._prompt(text)
        return {
            "prompt_embeds": prompt["prompt_embeds"],
            "pooled_prompt_embeds": self._token_ids(text) if self._has_clip else prompt["pooled_prompt_embeds"],
        }

    def _timestep(self, k: int, stream_id: int, latent: tuple[int, int, int]) -> int:
        """Index of the noise level of an example."""
        loss, rng = self.config.loss, self._rng(k, Purpose.TIMESTEP, stream_id)
        if loss.timestep_sampling == "scheme":
            density = {name: getattr(loss, name) for name in ("logit_mean", "logit_std", "mode_scale")}
            return timestep_index(timestep_fraction(rng, loss.weighting_scheme, **density), len(self.sigmas))
        tokens = latent[1] * latent[2] // 4  # a token is a 2x2 patch
        shape = {"sigmoid_scale": loss.sigmoid_scale, "flow_shift": loss.flow_shift}
        return nearest_index(drawn_sigma(rng, loss.timestep_sampling, tokens, **shape), self.sigmas)

    def _rng(self, k: int, purpose: Purpose, stream_id: int) -> np.random.Generator:
        return stream.generator(self.config.output.seed, k, purpose, stream_id)

    def _picture(self, example: Example, k: int, stream_id: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Latent moments or pixels, and the mask at the latent's size."""
        data = self.config.data
        flip = data.random_flip and bool(self._rng(k, Purpose.FLIP, stream_id).random() < 0.5)
        if data.cache_latents:
            versions = example.versions
            number = int(self._rng(k, Purpose.CACHED_CROP, stream_id).integers(len(versions)))
            arrays = self._cached(self.cache.picture_file(versions[number], flip), str(example.picture.path))
            return arrays["moments"], arrays.get("mask")
        u, v = (0.5, 0.5) if data.center_crop else self._rng(k, Purpose.CROP, stream_id).random(2)
        image = to_rgb(load_unchanged(example.picture.path, example.picture.digest), self.cache.background)
        pixels = resize_and_crop(image, example.size, (u, v), flip)
        if example.mask is None:
            return pixels, None
        latent = self._latent_shape(example.size)[1:]
        return pixels, mask_at(example.mask, example.picture.size, example.size, (u, v), flip, latent)

    def _latent_shape(self, size: Size) -> tuple[int, int, int]:
        channels, side, _ = self.latent_shape
        shrink = self.config.data.resolution // side
        return channels, size.height // shrink, size.width // shrink

    def _loss_weights(self, mask: np.ndarray | None, latent: tuple[int, int, int]) -> np.ndarray:
        """[1, h, w]; class examples, and pictures without a mask, count fully."""
        if mask is None:
            return np.ones((1, *latent[1:]), np.float32)
        return loss_weights(mask, self.config.data.unmasked_weight)[None]

    def _drops_caption(self, k: int, example: Example) -> bool:
        share = self._concepts[example.concept].caption_dropout
        return share > 0 and bool(self._rng(k, Purpose.CAPTION, SUBJECT).random() < share)

    def _prompt(self, prompt: str) -> dict[str, np.ndarray]:
        return self._cached(self.cache.prompt_file(prompt), f'the prompt "{prompt}"')

    @property
    def _has_clip(self) -> bool:
        return self.config.text_encoder.train_text_encoder

    def _token_ids(self, prompt: str) -> np.ndarray:
        return self._cached(self.cache.token_file(prompt), f'the tokens of the prompt "{prompt}"')["ids"]

    def _cached(self, path: Path, what: str) -> dict[str, np.ndarray]:
        arrays = self.cache.read(path)
        if arrays is None:
            raise UserError(
                f"{path}: the stored encoding of {what} is gone or damaged; start again to have it made anew"
            )
        return arrays


def prefetch(source: BatchSource, workers: int) -> Iterator[StepInputs]:
    """The source's batches in order; with workers, prepared ahead in as many threads."""
    if workers == 0:
        yield from source
        return
    pool = ThreadPoolExecutor(workers, "prefetch")
    try:
        ahead = deque(pool.submit(source.__getitem__, i) for i in range(min(workers + 1, len(source))))
        for i in range(len(source)):
            batch = ahead.popleft().result()
            if i + workers + 1 < len(source):
                ahead.append(pool.submit(source.__getitem__, i + workers + 1))
            yield batch
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
