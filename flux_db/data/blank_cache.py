"""In place of the encode cache where only shapes matter: zeros for every prompt and picture.

The training step can then be compiled while another process still encodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flux_db.data.dataset import Example
from flux_db.data.encode import CLIP_TOKENS
from flux_db.data.encode_cache import Arrays


class _Key(NamedTuple):
    """What the other cache has a file for."""

    name: str
    shape: tuple[int, ...]
    second: int = 0


@dataclass(frozen=True, kw_only=True)
class BlankCache:
    """With the part of Cache that micro-batches are made of."""

    latent_channels: int
    shrink: int
    """Pixels along a side of one latent."""
    prompt_shape: tuple[int, int]
    """[L, D] of T5"""
    pooled_length: int
    background: tuple[int, int, int]

    def picture_file(self, example: Example, flip: bool) -> _Key:
        height, width = example.size
        return _Key("moments", (2 * self.latent_channels, height // self.shrink, width // self.shrink))

    def prompt_file(self, prompt: str) -> _Key:
        return _Key("prompt_embeds", self.prompt_shape, self.pooled_length)

    def token_file(self, prompt: str) -> _Key:
        return _Key("ids", (CLIP_TOKENS,))

    def read(self, key: _Key) -> Arrays:
        arrays = {key.name: np.zeros(key.shape, np.int32 if key.name == "ids" else np.float32)}
        if key.second:
            arrays["pooled_prompt_embeds"] = np.zeros(key.second, np.float32)
        return arrays
