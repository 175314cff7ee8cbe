"""Prompts to embeddings and pictures to latent moments: once, in a process of its own, kept on disk by content."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flux_db.console import counted, say, stage
from flux_db.data.dataset import Dataset, Example, preserved_prompts
from flux_db.data.encode_cache import Arrays, Cache, text_precision
from flux_db.data.masks import mask_at
from flux_db.data.pixels import load_unchanged, resize_and_crop, to_rgb
from flux_db.progress import progress_bar
from flux_db.settings.concepts import concepts_of
from flux_db.settings.derived import validation_prompts
from flux_db.settings.schema import Config
from flux_db.size import Size

# Reading and hashing a file releases Python's lock.
READERS = min(8, os.cpu_count() or 1)

# CLIP's text model has positions for no more.
CLIP_TOKENS = 77

# T5 gives 8 MB for each.
PROMPTS_AT_ONCE = 4

# The VAE needs about 1.5 GB for a picture of 1024 px on Ascend. The CPU is not quicker with more than one.
PIXELS_AT_ONCE = {"Ascend": 1024 * 1024, "CPU": 128 * 128}
MOST_PICTURES_AT_ONCE = 8

T = TypeVar("T")

# --- what is missing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What the cache does not have yet."""

    prompts: tuple[str, ...]
    pictures: tuple[tuple[Example, bool], ...]
    tokens: tuple[str, ...] = ()
    """Prompts whose token ids CLIP's training needs."""

    def __bool__(self) -> bool:
        return bool(self.prompts or self.pictures or self.tokens)

    def describe(self) -> str:
        parts = [counted(len(self.prompts), "prompt")] if self.prompts else []
        parts += [f"the tokens of {counted(len(self.tokens), 'prompt')}"] if self.tokens else []
        parts += [counted(len(self.pictures), "picture")] if self.pictures else []
        return " and ".join(parts)


def prompts_in_use(config: Config) -> tuple[str, ...]:
    """Prompts besides the captions: class, validation, and the empty one for --caption_dropout."""
    prompts = [config.data.class_prompt] if config.data.with_prior_preservation else []
    prompts += [""] if any(concept.caption_dropout for concept in concepts_of(config)) else []
    return tuple(dict.fromkeys([*prompts, *validation_prompts(config)]))


def missing(config: Config, cache: Cache, dataset: Dataset) -> Work:
    prompts = dict.fromkeys([*dataset.prompts, *preserved_prompts(config, dataset), *prompts_in_use(config)])
    pictures: dict[Path, tuple[Example, bool]] = {}
    if config.data.cache_latents:
        flips = (False, True) if config.data.random_flip else (False,)
        # a class picture may be drawn with any size of the subject's
        in_all_sizes = (replace(s, size=size) for s in dataset.class_examples for size in dataset.sizes)
        for example in (version for s in (*dataset.examples, *in_all_sizes) for version in s.versions):
            for flip in flips:
                pictures.setdefault(cache.picture_file(example, flip), (example, flip))
    for example in dataset.held_out:
        pictures.setdefault(cache.picture_file(example, False), (example, False))
    with ThreadPoolExecutor(READERS) as pool:
        has_prompt = pool.map(lambda prompt: cache.is_sound(cache.prompt_file(prompt)), prompts)
        has_picture = pool.map(cache.is_sound, pictures)
        trained = prompts if config.text_encoder.train_text_encoder else {}
        has_tokens = pool.map(lambda prompt: cache.is_sound(cache.token_file(prompt)), trained)
        return Work(
            tuple(prompt for prompt, there in zip(prompts, has_prompt, strict=True) if not there),
            tuple(entry for entry, there in zip(pictures.values(), has_picture, strict=True) if not there),
            tuple(prompt for prompt, there in zip(trained, has_tokens, strict=True) if not there),
        )


# --- encoding; in the process that `python -m flux_db encode` is --------------------------------------------------


def encode(config: Config, model: Path, cache: Cache, work: Work) -> None:
    """Fill the cache. Loads one encoder after the other and only what is needed."""
    from flux_db.model import runtime

    device = runtime.start(config.runtime, alone=True).device
    cache.folder.mkdir(parents=True, exist_ok=True)
    if work.tokens:
        _store_tokens(model, cache, work.tokens)
    if work.prompts:
        encode_prompts(config, model, cache, work.prompts)
    if work.pictures:
        _encode_pictures(config, model, cache, work.pictures, device)


def encode_prompts(config: Config, model: Path, cache: Cache, prompts: Sequence[str]) -> None:
    from mindspore import Tensor

    from flux_db.model import loading, runtime

    dtype, length = runtime.DTYPES[text_precision(config)], config.data.max_sequence_length
    cache.folder.mkdir(parents=True, exist_ok=True)

    clip_tokenizer, t5_tokenizer = loading.load_tokenizers(model)
    pooled: dict[str, np.ndarray] = {}
    with stage("Encoding prompts with CLIP"):
        clip = loading.load_clip(model, dtype, config.model.variant)
        for group in _groups(prompts, PROMPTS_AT_ONCE):
            ids = clip_token_ids(clip_tokenizer, group)
            rows = clip(Tensor(_filled(ids, PROMPTS_AT_ONCE)), return_dict=False)[1].float().asnumpy()
            pooled |= zip(group, rows[: len(group)], strict=True)
    del clip
    with stage("Loading T5"):
        t5 = loading.load_t5(model, dtype, config.model.variant)
    with progress_bar(total=len(prompts), desc="T5", unit="prompt") as bar, Writer(cache) as writer:
        for group in _groups(prompts, PROMPTS_AT_ONCE):
            ids = token_ids(t5_tokenizer, group, length, "T5")
            rows = t5(Tensor(_filled(ids, PROMPTS_AT_ONCE)), return_dict=False)[0].float().asnumpy()
            for prompt, embeds in zip(group, rows[: len(group)], strict=True):
                arrays = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled[prompt]}
                writer.write(cache.prompt_file(prompt), arrays)
            bar.update(len(group))


def _store_tokens(model: Path, cache: Cache, prompts: Sequence[str]) -> None:
    from flux_db.model import loading

    tokenizer, _ = loading.load_tokenizers(model)
    for prompt, ids in zip(prompts, clip_token_ids(tokenizer, prompts), strict=True):
        cache.write(cache.token_file(prompt), {"ids": np.ascontiguousarray(ids)})


def clip_token_ids(tokenizer: Any, prompts: Sequence[str]) -> np.ndarray:
    """[prompts, CLIP_TOKENS]"""
    return token_ids(tokenizer, prompts, min(tokenizer.model_max_length, CLIP_TOKENS), "CLIP")


def token_ids(tokenizer, prompts: Sequence[str], length: int, encoder: str) -> np.ndarray:
    """[prompts, length] padded ids; says so when a prompt is cut."""
    rows = tokenizer(
        list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="np"
    ).input_ids
    for prompt in prompts if encoder == "T5" else ():
        whole = len(tokenizer(prompt).input_ids)
        if whole > length:
            say(f"warning: T5 sees only the first {length} of {whole} tokens of: {prompt}")
    return rows.astype(np.int32)


def _encode_pictures(
    config: Config, model: Path, cache: Cache, pictures: Sequence[tuple[Example, bool]], device: str
) -> None:
    from mindspore import Tensor, nn

    from flux_db.model import loading

    class Encoder(nn.Cell):
        def __init__(self, vae: nn.Cell) -> None:
            super().__init__()
            self.vae = vae

        def construct(self, pixels):
            return self.vae.encode(pixels)[0]

    def load(entry: tuple[Example, bool]) -> np.ndarray:
        example, flip = entry
        image = to_rgb(load_unchanged(example.picture.path, example.picture.digest), cache.background)
        return resize_and_crop(image, example.size, example.crop, flip)

    with stage("Loading the VAE"):
        encoder = Encoder(loading.load_vae(model, loading.VAE_DTYPE, config.model.variant)).set_train(False)
    # size by size, because each is a graph of its own
    groups = [
        group
        for size, same in itertools.groupby(sorted(pictures, key=_size), key=_size)
        for group in _groups(list(same), pictures_at_once(size, device))
    ]
    with (
        progress_bar(total=len(pictures), desc="VAE", unit="picture") as bar,
        Writer(cache) as writer,
        ThreadPoolExecutor(READERS) as pool,
    ):
        # the next group is opened while this one is encoded
        ahead = [pool.submit(load, entry) for entry in groups[0]]
        for number, group in enumerate(groups):
            pixels = np.stack([future.result() for future in ahead])
            ahead = [pool.submit(load, entry) for entry in (groups[number + 1] if number + 1 < len(groups) else ())]
            moments = encoder(Tensor(_filled(pixels, pictures_at_once(_size(group[0]), device)))).asnumpy()
            for (example, flip), of_one in zip(group, moments[: len(group)], strict=True):
                writer.submit(_picture_arrays, example, flip, np.ascontiguousarray(of_one))
            bar.update(len(group))


def _picture_arrays(cache: Cache, example: Example, flip: bool, moments: np.ndarray) -> None:
    arrays = {"moments": moments}
    if example.mask:
        latent = moments.shape[1:]
        arrays["mask"] = mask_at(example.mask, example.picture.size, example.size, example.crop, flip, latent)
    cache.write(cache.picture_file(example, flip), arrays)


def pictures_at_once(size: Size, device: str) -> int:
    """So many fit into memory; always the same, so that a picture's numbers do not depend on which others there are."""
    return max(1, min(MOST_PICTURES_AT_ONCE, PIXELS_AT_ONCE[device] // (size.height * size.width)))


def _size(entry: tuple[Example, bool]) -> Size:
    return entry[0].size


def _groups(items: Sequence[T], count: int) -> list[Sequence[T]]:
    return [items[start : start + count] for start in range(0, len(items), count)]


def _filled(rows: np.ndarray, count: int) -> np.ndarray:
    """The last group filled up with its last row: one shape is one graph, and one way to compute."""
    return np.concatenate([rows, np.repeat(rows[-1:], count - len(rows), axis=0)])


class Writer:
    """Writes cache files in threads while the encoder goes on; a failure ends the work at the next write."""

    MOST_WAITING = 64

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._pool = ThreadPoolExecutor(READERS)
        self._waiting: deque[Future] = deque()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            while self._waiting:
                self._waiting.popleft().result()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def write(self, path: Path, arrays: Arrays) -> None:
        self.submit(lambda cache: cache.write(path, arrays))

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        while len(self._waiting) >= self.MOST_WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(work, self.cache, *arguments))
