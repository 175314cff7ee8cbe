"""The encode cache: prompt embeddings and latent moments on disk, stored by content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flux_db.atomic import write_file
from flux_db.data.dataset import Example
from flux_db.data.pixels import WHITE
from flux_db.model.model_folder import fingerprint
from flux_db.settings.derived import background, cache_path
from flux_db.settings.schema import Config

Arrays = dict[str, np.ndarray]

SCHEMA = 1


@dataclass(frozen=True)
class Cache:
    """Encoded prompts and pictures of one model, on disk."""

    folder: Path
    text_model: str
    """Fingerprint of tokenizers and text encoders."""
    vae: str
    """Fingerprint of the VAE."""
    text_precision: str
    max_sequence_length: int
    background: tuple[int, int, int] = WHITE

    def prompt_file(self, prompt: str) -> Path:
        return self._file("prompt", [self.text_model, self.text_precision, self.max_sequence_length, prompt])

    def picture_file(self, example: Example, flip: bool) -> Path:
        """Moments of the example's crop, and its mask."""
        height, width = example.size
        size = height if height == width else [height, width]
        content = [self.vae, size, example.picture.digest, list(example.crop), flip, *_mask_key(example)]
        # white is what there was before there was a choice: its files keep their names
        return self._file("latent", content if self.background == WHITE else [*content, self.background])

    def _file(self, kind: str, content: list) -> Path:
        key = hashlib.sha256(json.dumps([SCHEMA, kind, *content]).encode()).hexdigest()
        return self.folder / f"{kind}-{key[:40]}.safetensors"


def _mask_key(example: Example) -> list:
    return [] if example.mask is None else [example.mask.digest, example.mask.is_alpha]


def text_precision(config: Config) -> str:
    """fp16 overflows in T5, so the encoders run in bf16 or in float32 (and the VAE always in float32)."""
    return "bf16" if config.runtime.mixed_precision == "bf16" else "no"


def open_cache(config: Config, model: Path) -> Cache:
    text_parts, variant = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2"), config.model.variant
    return Cache(
        folder=cache_path(config),
        text_model=fingerprint(model, text_parts, variant),
        vae=fingerprint(model, ("vae",), variant),
        text_precision=text_precision(config),
        max_sequence_length=config.data.max_sequence_length,
        background=background(config),
    )


def read(path: Path) -> Arrays | None:
    """The arrays of a cache file; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
        checksum, body = data[:64].decode(), data[64:]
        return load(body) if hashlib.sha256(body).hexdigest() == checksum else None
    except (OSError, UnicodeDecodeError, SafetensorError):
        return None


def write(path: Path, arrays: Arrays) -> None:
    body = save(arrays)
    write_file(path, hashlib.sha256(body).hexdigest().encode() + body)
