"""DINOv2 and CLIP on the device: pictures and texts to features."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from PIL import Image

from flux_db.data.encode import token_ids
from flux_db.model import loading, picture_processor
from flux_db.score.measures import unit_rows
from flux_db.score.samples import Pictures, Texts

# A fixed number: one shape is one graph.
AT_ONCE = 8


class _Dinov2(nn.Cell):
    """The class token after the last norm: [B, 3, H, W] -> [B, D]"""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.embeddings, self.layers = network.embeddings, network.encoder.layer
        self.norm = network.layernorm

    def construct(self, pixels):
        x = self.embeddings(pixels)
        for layer in self.layers:
            x = layer(x)[0]
        return self.norm(x)[:, 0]


class _ClipPictures(nn.Cell):
    """[B, 3, H, W] -> [B, D]"""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, pixels):
        return self.network.get_image_features(pixels)


class _ClipTexts(nn.Cell):
    """[B, L] -> [B, D]"""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, ids):
        return self.network.get_text_features(ids)


def dinov2(folder: Path) -> Pictures:
    """Features of pictures by the DINOv2 of a folder."""
    cell = _Dinov2(loading.load_dinov2(folder, ms.float32)).set_train(False)
    return _of_pictures(cell, picture_processor.read(folder, "dinov2"))


def clip(folder: Path) -> tuple[Pictures, Texts]:
    """Features of pictures and of texts by the CLIP of a folder, in one space."""
    network = loading.load_whole_clip(folder, ms.float32)
    tokenizer = loading.load_clip_tokenizer(folder)
    length = network.config.text_config.max_position_embeddings
    texts = _ClipTexts(network).set_train(False)

    def of_texts(prompts: Sequence[str]) -> np.ndarray:
        return _in_groups(lambda group: texts(Tensor(token_ids(tokenizer, group, length, "CLIP"))), list(prompts))

    pictures = _ClipPictures(network).set_train(False)
    return _of_pictures(pictures, picture_processor.read(folder, "clip")), of_texts


def _of_pictures(cell: nn.Cell, processing: picture_processor.Processing) -> Pictures:
    """Each picture once: a run compares every round with the first and with the training pictures."""
    known: dict[bytes, np.ndarray] = {}

    def encode(group: Sequence[Image.Image]) -> Tensor:
        return cell(Tensor(np.stack([picture_processor.prepare(picture, processing) for picture in group])))

    def features(pictures: Sequence[Image.Image]) -> np.ndarray:
        keys = [hashlib.sha256(repr(p.size).encode() + p.convert("RGB").tobytes()).digest() for p in pictures]
        new = {key: picture for key, picture in zip(keys, pictures, strict=True) if key not in known}
        if new:
            known.update(zip(new, _in_groups(encode, list(new.values())), strict=True))
        return np.stack([known[key] for key in keys])

    return features


def _in_groups(encode: Callable[[Sequence], Tensor], items: list) -> np.ndarray:
    """Rows of length 1 for all items; the last group is filled up with its last item."""
    rows = []
    for start in range(0, len(items), AT_ONCE):
        group = items[start : start + AT_ONCE]
        filled = [*group, *[group[-1]] * (AT_ONCE - len(group))]
        rows.append(encode(filled).asnumpy()[: len(group)])
    return unit_rows(np.concatenate(rows))
