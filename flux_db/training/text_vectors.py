"""CLIP's vectors of prompts for validation: as they are stored, or by the CLIP that is trained."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mindspore import nn

from flux_db.data.encode_cache import Cache
from flux_db.model.text_encoder import Pooled


class TextVectors:
    """`text_encoder`: CLIP with the LoRA that is trained; None if the stored vectors hold for the whole run."""

    def __init__(self, cache: Cache, text_encoder: nn.Cell | None) -> None:
        self.cache = cache
        self.text_encoder = text_encoder
        self.pooled = Pooled(text_encoder) if text_encoder is not None else None

    def of(self, prompts: Iterable[str]) -> dict[str, np.ndarray]:
        """Each prompt's vector [D'] as it is now."""
        return {prompt: self._one(prompt) for prompt in dict.fromkeys(prompts)}

    def _one(self, prompt: str) -> np.ndarray:
        if self.pooled is None:
            return self.cache.read(self.cache.prompt_file(prompt))["pooled_prompt_embeds"]
        return self.pooled.of(self.cache.read(self.cache.token_file(prompt))["ids"])
