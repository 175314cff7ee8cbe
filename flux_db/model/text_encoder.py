"""CLIP's text model while its LoRA is trained: the vectors that it gives now."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from flux_db.model import adapter

# In CLIP-L's config.json, where it is wrong: CLIP then reads its vector at the highest token id, which is the end's.
HISTORICAL_EOS = 2


@ops.constexpr
def _positions(length):
    return Tensor(np.arange(length)[None], ms.int32)


def clip_vectors(text_encoder: nn.Cell, ids: Tensor, eos_token_id: int) -> Tensor:
    """Token ids [B, L] -> CLIP's vectors [B, D']: its last layer at the end of the text.

    As a product, in which each sum has one term, and not by an index as in mindone: the gradient of that is a scatter,
    which Ascend has no aclnn kernel for.
    """
    hidden = text_encoder(ids, return_dict=False)[0]
    if eos_token_id == HISTORICAL_EOS:
        end = ops.Argmax(-1, ms.int32)(ids)
    else:
        end = ops.Argmax(-1, ms.int32)(ops.Cast()(ops.Equal()(ids, eos_token_id), ms.float32))
    rows, length = ids.shape
    chosen = ops.Cast()(ops.Equal()(_positions(length), ops.Reshape()(end, (rows, 1))), hidden.dtype)
    # [B, 1, L] x [B, L, D'] -> [B, D']
    return ops.Reshape()(ops.BatchMatMul()(ops.Reshape()(chosen, (rows, 1, length)), hidden), (rows, -1))


class Pooled(nn.Cell):
    """Token ids [B, 77] -> CLIP's vectors [B, D'], compiled by itself."""

    def __init__(self, text_encoder: nn.Cell) -> None:
        # CLIP's parameters keep their names
        super().__init__(auto_prefix=False)
        self.text_encoder = text_encoder
        self.eos_token_id = text_encoder.config.eos_token_id

    def construct(self, ids: Tensor) -> Tensor:
        return clip_vectors(self.text_encoder, ids, self.eos_token_id)

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
