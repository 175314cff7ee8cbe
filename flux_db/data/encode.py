"""Prompts to embeddings and pictures to latent moments: once, in a process of its own, kept on disk by content."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flux_db.console import say, stage
from flux_db.data.dataset import Dataset, Example
from flux_db.data.encode_cache import Cache, text_precision
from flux_db.data.masks import mask_at
from flux_db.data.pixels import load_unchanged, resize_and_crop, to_rgb
from flux_db.settings.derived import validation_prompts
from flux_db.settings.schema import Config

# Reading and hashing a file releases Python's lock.
READERS = min(8, os.cpu_count() or 1)

# --- what is missing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What the cache does not have yet."""

    prompts: tuple[str, ...]
    pictures: tuple[tuple[Example, bool], ...]

    def __bool__(self) -> bool:
        return bool(self.prompts or self.pictures)

    def describe(self) -> str:
        parts = [f"{len(self.prompts)} prompts"] if self.prompts else []
        parts += [f"{len(self.pictures)} pictures"] if self.pictures else []
        return " and ".join(parts)


def prompts_in_use(config: Config) -> tuple[str, ...]:
    """Prompts besides the captions: class, validation, and the empty one for --caption_dropout."""
    prompts = [config.data.class_prompt] if config.data.with_prior_preservation else []
    prompts += [""] if config.data.caption_dropout else []
    return tuple(dict.fromkeys([*prompts, *validation_prompts(config)]))


def missing(config: Config, cache: Cache, dataset: Dataset) -> Work:
    prompts = dict.fromkeys([*dataset.prompts, *prompts_in_use(config)])
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
        return Work(
            tuple(prompt for prompt, there in zip(prompts, has_prompt, strict=True) if not there),
            tuple(entry for entry, there in zip(pictures.values(), has_picture, strict=True) if not there),
        )


# --- encoding; in the process that `python -m flux_db encode` is --------------------------------------------------


def encode(config: Config, model: Path, cache: Cache, work: Work) -> None:
    """Fill the cache. Loads one encoder after the other and only what is needed."""
    from flux_db.model import runtime

    runtime.start(config.runtime, alone=True)
    cache.folder.mkdir(parents=True, exist_ok=True)
    if work.prompts:
        encode_prompts(config, model, cache, work.prompts)
    if work.pictures:
        _encode_pictures(config, model, cache, work.pictures)


def encode_prompts(config: Config, model: Path, cache: Cache, prompts: Sequence[str]) -> None:
    from mindspore import Tensor
    from tqdm import tqdm

    from flux_db.model import loading, runtime

    dtype = runtime.DTYPES[text_precision(config)]
    cache.folder.mkdir(parents=True, exist_ok=True)

    clip_tokenizer, t5_tokenizer = loading.load_tokenizers(model)
    pooled = {}
    with stage("Encoding prompts with CLIP"):
        clip = loading.load_clip(model, dtype, config.model.variant)
        for prompt in prompts:
            ids = token_ids(clip_tokenizer, prompt, min(clip_tokenizer.model_max_length, 77), "CLIP")
            pooled[prompt] = clip(Tensor(ids))[1].float().asnumpy()[0]
    del clip
    with stage("Loading T5"):
        t5 = loading.load_t5(model, dtype, config.model.variant)
    for prompt in tqdm(prompts, desc="T5", unit="prompt"):
        ids = token_ids(t5_tokenizer, prompt, config.data.max_sequence_length, "T5")
        embeds = t5(Tensor(ids), return_dict=False)[0].float().asnumpy()[0]
        cache.write(cache.prompt_file(prompt), {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled[prompt]})


def token_ids(tokenizer, prompt: str, length: int, encoder: str) -> np.ndarray:
    """[1, length] padded ids; says so when a prompt is cut."""
    ids = tokenizer(prompt, padding="max_length", max_length=length, truncation=True, return_tensors="np").input_ids
    whole = len(tokenizer(prompt).input_ids)
    if whole > length and encoder == "T5":
        say(f"warning: T5 sees only the first {length} of {whole} tokens of: {prompt}")
    return ids.astype(np.int32)


def _encode_pictures(config: Config, model: Path, cache: Cache, pictures: Sequence[tuple[Example, bool]]) -> None:
    from mindspore import Tensor, nn
    from tqdm import tqdm

    from flux_db.model import loading

    class Encoder(nn.Cell):
        def __init__(self, vae: nn.Cell) -> None:
            super().__init__()
            self.vae = vae

        def construct(self, pixels):
            return self.vae.encode(pixels)[0]

    with stage("Loading the VAE"):
        encoder = Encoder(loading.load_vae(model, loading.VAE_DTYPE, config.model.variant)).set_train(False)
    # size by size, because each is a graph of its own
    for example, flip in tqdm(sorted(pictures, key=lambda work: work[0].size), desc="VAE", unit="picture"):
        image = to_rgb(load_unchanged(example.picture.path, example.picture.digest), cache.background)
        arrays = {
            "moments": encoder(Tensor(resize_and_crop(image, example.size, example.crop, flip)[None])).asnumpy()[0]
        }
        if example.mask:
            latent = arrays["moments"].shape[1:]
            arrays["mask"] = mask_at(example.mask, example.picture.size, example.size, example.crop, flip, latent)
        cache.write(cache.picture_file(example, flip), arrays)
