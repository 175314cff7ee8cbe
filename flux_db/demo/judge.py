"""A small network that says what a picture of the drawn world shows. It was trained on drawings alone.

Four convolutions of stride 2 and two linear layers, in numpy: a hundred pictures take a fraction of a second. The
weights are stored with the small model; `scripts/small_base/train_judge.py` trains them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from PIL import Image
from safetensors.numpy import load

from flux_db.demo.places import PLACES
from flux_db.demo.world import COLLARS, COLOURS, KINDS, SUBJECTS

SIZE = 64
NONE = "none"
HEADS: dict[str, tuple[str, ...]] = {
    "kind": tuple(KINDS),
    "colour": tuple(COLOURS),
    "place": tuple(PLACES),
    "collar": (NONE, *COLLARS),
    "subject": (NONE, *SUBJECTS),
}
"""The answers to each question, in the order of the outputs."""

CONVOLUTIONS = 4


@dataclass(frozen=True)
class Verdict:
    """What the judge says about N pictures."""

    probabilities: dict[str, np.ndarray]
    """Of each question: [N, answers]"""
    features: np.ndarray
    """[N, D], each of length 1: pictures that show the same have a large scalar product."""

    def best(self, question: str) -> list[str]:
        """The likeliest answer for each picture."""
        return [HEADS[question][i] for i in self.probabilities[question].argmax(axis=1)]

    def probability(self, question: str, answer: str) -> np.ndarray:
        """[N]"""
        return self.probabilities[question][:, HEADS[question].index(answer)]


def judge(pictures: Sequence[Image.Image]) -> Verdict:
    """Look at pictures; any size will do."""
    x = np.stack([pixels(picture) for picture in pictures])
    hidden = np.concatenate([_hidden(x[i : i + 64]) for i in range(0, len(x), 64)])
    weights = _weights()
    probabilities = {
        question: _softmax(hidden @ weights[f"{question}.weight"].T + weights[f"{question}.bias"]) for question in HEADS
    }
    length = np.linalg.norm(hidden, axis=1, keepdims=True)
    return Verdict(probabilities, hidden / np.maximum(length, 1e-6))


def pixels(picture: Image.Image) -> np.ndarray:
    """[3, 64, 64] in -1..1"""
    if picture.size != (SIZE, SIZE):
        picture = picture.resize((SIZE, SIZE), Image.Resampling.BOX)
    return np.asarray(picture.convert("RGB"), np.float32).transpose(2, 0, 1) / 127.5 - 1.0


def _hidden(x: np.ndarray) -> np.ndarray:
    """[N, 3, 64, 64] -> [N, D]"""
    weights = _weights()
    for i in range(CONVOLUTIONS):
        x = _convolution(x, weights[f"convolution.{i}.weight"], weights[f"convolution.{i}.bias"])
        x = np.maximum(x, 0.0)
    # [N, C, 4, 4] -> [N, 16C]
    flat = x.reshape(len(x), -1)
    return np.maximum(flat @ weights["hidden.weight"].T + weights["hidden.bias"], 0.0)


def _convolution(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Stride 2, kernel 3 or 5, padded so that the side halves."""
    kernel = weight.shape[-1]
    edge = kernel // 2
    padded = np.pad(x, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
    # [N, C, H, W, k, k]
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(2, 3))[:, :, ::2, ::2]
    # -> [N, H, W, C'] -> [N, C', H, W]
    product = np.tensordot(windows, weight, axes=((1, 4, 5), (1, 2, 3)))
    return (product + bias).transpose(0, 3, 1, 2)


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@cache
def identity() -> str:
    """Of the weights: verdicts of different ones cannot be compared."""
    return hashlib.sha256(_file()).hexdigest()[:12]


@cache
def _weights() -> dict[str, np.ndarray]:
    return {name: tensor.astype(np.float32) for name, tensor in load(_file()).items()}


def _file() -> bytes:
    return files("flux_db.demo").joinpath("small", "judge.safetensors").read_bytes()
