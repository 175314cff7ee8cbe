"""Height and width, in this order in flags and in the code, as in diffusers; PIL and all text have width first."""

from __future__ import annotations

import re
from typing import NamedTuple

from PIL import Image

# FLUX.1's VAE shrinks by 8, and the transformer takes 2 x 2 latents as one token.
PIXELS_PER_TOKEN = 16

# Of a picture that the model sees or draws. FLUX.1 is made for about 1024.
LARGEST_SIDE = 4096

# Pixels drawn at a time: as many pictures as together are one of this size, and at most so many.
DRAWN_PIXELS, DRAWN_PICTURES = 1024 * 1024, 4


class Size(NamedTuple):
    """In pixels, or of a latent."""

    height: int
    width: int

    def __str__(self) -> str:
        """Width first, as every viewer of pictures shows it."""
        return f"{self.width} x {self.height}"

    @classmethod
    def of(cls, image: Image.Image) -> Size:
        return cls(image.height, image.width)

    @classmethod
    def square(cls, side: int) -> Size:
        return cls(side, side)

    @property
    def for_pil(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height


def parse_size(text: str) -> Size | None:
    """The size of a text such as 768x512; None for any other."""
    match = re.fullmatch(r"(\d{1,9})[xX](\d{1,9})", text)
    return Size(int(match[1]), int(match[2])) if match else None


def drawn_at_once(size: Size, count: int) -> int:
    """How many of `count` pictures to draw at a time: small ones together, for which a device is half idle alone."""
    return max(1, min(DRAWN_PIXELS // (size.height * size.width), DRAWN_PICTURES, count))
