"""The encode cache: prompt embeddings and latent moments on disk, stored by content.

A cache file's name is a hash of everything that its content depends on, so nothing is ever stale; a checksum inside
reveals a damaged file, which is made again.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flux_db.atomic import write_file
from flux_db.data.dataset import Example
from flux_db.data.pixels import WHITE
from flux_db.file_memo import FileMemo, identity_of, open_memo
from flux_db.model.model_folder import fingerprint
from flux_db.output_folder import FILES_SEEN
from flux_db.settings.derived import background, cache_path
from flux_db.settings.schema import Config

Arrays = dict[str, np.ndarray]

SCHEMA = 1

# Some hundred prompts and pictures of FLUX.1-dev; of more, those are read again from disk that were used longest ago.
MEMORY_LIMIT = 2 * 2**30


class ArrayMemory:
    """Arrays by their file, in memory: at most so many bytes, and those used longest ago go first."""

    def __init__(self, limit: int = MEMORY_LIMIT) -> None:
        self.limit = limit
        self._arrays: OrderedDict[Path, Arrays] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, path: Path) -> Arrays | None:
        with self._lock:
            if path in self._arrays:
                self._arrays.move_to_end(path)
            return self._arrays.get(path)

    def put(self, path: Path, arrays: Arrays) -> None:
        for array in arrays.values():
            array.flags.writeable = False  # whoever gets it shares it
        with self._lock:
            self._forget(path)
            self._arrays[path] = arrays
            self._bytes += _size_of(arrays)
            while self._bytes > self.limit:
                self._forget(next(iter(self._arrays)))

    def forget(self, path: Path) -> None:
        with self._lock:
            self._forget(path)

    def _forget(self, path: Path) -> None:
        self._bytes -= _size_of(self._arrays.pop(path, {}))


def _size_of(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


@dataclass(frozen=True)
class Cache:
    """Encoded prompts and pictures of one model: on disk, and what was read of it in memory."""

    folder: Path
    text_model: str
    """Fingerprint of tokenizers and text encoders."""
    vae: str
    """Fingerprint of the VAE."""
    text_precision: str
    max_sequence_length: int
    background: tuple[int, int, int] = WHITE
    memory: ArrayMemory = field(default_factory=ArrayMemory, compare=False, repr=False)

    @property
    def files_seen(self) -> FileMemo:
        """The files that were found sound."""
        return open_memo(self.folder / FILES_SEEN)

    def prompt_file(self, prompt: str) -> Path:
        return self._file("prompt", [self.text_model, self.text_precision, self.max_sequence_length, prompt])

    def token_file(self, prompt: str) -> Path:
        """CLIP's token ids, for a run that trains CLIP."""
        return self._file("tokens", [self.text_model, prompt])

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

    def read(self, path: Path) -> Arrays | None:
        """The arrays of a cache file, not to be changed; None if it is missing or damaged."""
        arrays = self.memory.get(path)
        if arrays is None and (arrays := _read(path)) is not None:
            self.memory.put(path, arrays)
        return arrays

    def is_sound(self, path: Path) -> bool:
        """Whether a file is there and undamaged; read only if it has changed since it was found sound."""
        if self.files_seen.get(path) is not None:
            return True
        identity = identity_of(path)
        if _read(path) is None:
            return False
        self.files_seen.put(path, identity, 1)
        return True

    def write(self, path: Path, arrays: Arrays) -> None:
        body = save(arrays)
        # its checksum reveals what a power cut has damaged, and it can be made again
        write_file(path, hashlib.sha256(body).hexdigest().encode() + body, durable=False)
        self.memory.forget(path)


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


def _read(path: Path) -> Arrays | None:
    try:
        data = memoryview(path.read_bytes())
        checksum, body = bytes(data[:64]).decode(), data[64:]
        return load(bytes(body)) if hashlib.sha256(body).hexdigest() == checksum else None
    except (OSError, UnicodeDecodeError, SafetensorError):
        return None
