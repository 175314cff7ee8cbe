"""CLIP's text model while its LoRA is trained: the vectors that it gives now."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn

from flux_db.model import adapter


class Pooled(nn.Cell):
    """Token ids [B, 77] -> CLIP's vectors [B, D'], compiled by itself."""

    def __init__(self, text_encoder: nn.Cell) -> None:
        # CLIP's parameters keep their names
        super().__init__(auto_prefix=False)
        self.text_encoder = text_encoder

    def construct(self, ids: Tensor) -> Tensor:
        return self.text_encoder(ids, return_dict=False)[1]

    def of(self, ids: np.ndarray) -> np.ndarray:
        """[77] -> [D'] in float32, without dropout; row by row, so that there is one compiled shape."""
        adapter.set_dropout(self.text_encoder, False)
        try:
            return self(Tensor(np.ascontiguousarray(ids[None], np.int32))).float().asnumpy()[0]
        finally:
            adapter.set_dropout(self.text_encoder, True)


def set_training(text_encoder: nn.Cell) -> None:
    """For CLIP inside a training step, after that was set to training: only the LoRA's dropout is on."""
    text_encoder.set_train(False)
    adapter.set_dropout(text_encoder, True)
