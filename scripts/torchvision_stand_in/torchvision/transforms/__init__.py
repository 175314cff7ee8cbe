"""Resize, crop, flip, and pictures as tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from .functional import crop


class InterpolationMode:
    BILINEAR = Image.Resampling.BILINEAR


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, picture: Any) -> Any:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class Resize:
    """The shorter side becomes `size`."""

    def __init__(self, size: int, interpolation: Image.Resampling = Image.Resampling.BILINEAR) -> None:
        self.size, self.interpolation = size, interpolation

    def __call__(self, picture: Image.Image) -> Image.Image:
        short = min(picture.size)
        size = tuple(int(self.size * side / short) for side in picture.size)
        return picture.resize(size, self.interpolation)


class CenterCrop:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, picture: Image.Image) -> Image.Image:
        left, top = ((side - self.size) // 2 for side in picture.size)
        return crop(picture, top, left, self.size, self.size)


class RandomCrop:
    def __init__(self, size: int) -> None:
        self.size = size

    @staticmethod
    def get_params(picture: Image.Image, size: tuple[int, int]) -> tuple[int, int, int, int]:
        height, width = size
        top, left = random.randint(0, picture.height - height), random.randint(0, picture.width - width)
        return top, left, height, width

    def __call__(self, picture: Image.Image) -> Image.Image:
        return crop(picture, *self.get_params(picture, (self.size, self.size)))


class RandomHorizontalFlip:
    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, picture: Image.Image) -> Image.Image:
        return ImageOps.mirror(picture) if random.random() < self.p else picture


class ToTensor:
    def __call__(self, picture: Image.Image) -> Tensor:
        # [H, W, C] of bytes -> [C, H, W] in 0..1
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean[:, None, None]) / self.std[:, None, None]
