"""Large pictures decoded in overlapping tiles: the VAE's memory is then that of a tile.

A tile sees less than the whole picture, in the VAE's norms and its attention, so its brightness may differ a little
from its neighbour's. Where two overlap, one fades into the other, and no seam is seen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Latents along a side, of a tile and of what it shares with the next one; 512 and 128 px with FLUX.1's VAE.
TILE, OVERLAP = 64, 16

# Pictures with more pixels are decoded in tiles, unless a flag says otherwise.
LARGEST_WHOLE = 1024 * 1024


def is_tiled(choice: str, height: int, width: int) -> bool:
    """Whether a picture of so many pixels is; `choice` is that of --vae_tiling."""
    return choice == "on" or (choice == "auto" and height * width > LARGEST_WHOLE)


def tile_starts(length: int, tile: int, overlap: int) -> list[int]:
    """Where tiles begin so that they cover `length` evenly, each two sharing at least `overlap`."""
    if length <= tile:
        return [0]
    count = -(-(length - overlap) // (tile - overlap))
    return [round(start) for start in np.linspace(0, length - tile, count)]


def decode_in_tiles(
    decode: Callable[[np.ndarray], np.ndarray],
    latents: np.ndarray,
    factor: int,
    tile: int = TILE,
    overlap: int = OVERLAP,
) -> np.ndarray:
    """[C, h, w] latents to [3, H, W] pixels, `factor` pixels for each latent.

    `decode` does that for a tile. All tiles have one shape, so there is one graph for them.
    """
    h, w = latents.shape[1:]
    height, width = min(tile, h), min(tile, w)
    pixels = np.zeros((3, h * factor, w * factor), np.float32)
    weights = np.zeros((h * factor, w * factor), np.float32)
    for top in tile_starts(h, tile, overlap):
        for left in tile_starts(w, tile, overlap):
            part = decode(latents[:, top : top + height, left : left + width])
            fade = np.outer(
                _fade(height, top, h, overlap, factor),
                _fade(width, left, w, overlap, factor),
            )
            place = slice(top * factor, (top + height) * factor), slice(left * factor, (left + width) * factor)
            pixels[(slice(None), *place)] += part * fade
            weights[place] += fade
    return pixels / weights


def _fade(length: int, start: int, whole: int, overlap: int, factor: int) -> np.ndarray:
    """Weight of each pixel of a tile along a side: less towards an edge that another tile shares.

    The outermost quarter of what is shared counts nothing: there the VAE sees the edge of its tile.
    """
    weight = np.ones(length * factor, np.float32)
    place = (np.arange(overlap * factor, dtype=np.float32) + 0.5) / (overlap * factor)
    ramp = np.clip(2.0 * place - 0.5, 0.0, 1.0)
    if start > 0:
        weight[: len(ramp)] *= ramp
    if start + length < whole:
        weight[-len(ramp) :] *= ramp[::-1]
    return weight
