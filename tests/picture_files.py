"""Picture files of every kind, made by hand, for the tests of pictures."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from PIL import Image

RED, GREEN, BLUE, YELLOW = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)

GREY = (128, 128, 128)


def save(path, size=(8, 8), colour=GREY, mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)
    return path


def noise(path, size=(64, 64), **options):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def png(width, height, depth=8, data=b""):
    """An RGB PNG by hand: of any size it cares to claim, and of 16 bits, which PIL cannot write."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def cut(data):
    return data[: len(data) // 2]


def palette(path, **options):
    image = Image.new("P", (8, 8), 1)
    image.putpalette([*BLUE, *RED])
    image.paste(0, (0, 0, 4, 8))
    image.save(path, **options)


def array(path, values, **options):
    Image.fromarray(values).save(path, **options)


def two_frames(path):
    first, second = (Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE))
    options = {"lossless": True} if path.suffix == ".webp" else {}
    first.save(path, save_all=True, append_images=[second], duration=100, **options)


def halves(dark, bright, dtype):
    """8 x 8, left half dark."""
    values = np.full((8, 8), bright, dtype=dtype)
    values[:, :4] = dark
    return values


ROWS_16_BIT = (b"\0" + struct.pack(">3H", 0x40FF, 0x80FF, 0xC0FF) * 8) * 8

# name, how it is made, the colours of its left and right half
MODES = [
    ("palette.png", palette, BLUE, RED),
    ("palette_transparent.png", lambda p: palette(p, transparency=0), (255, 255, 255), RED),
    ("palette_half_transparent.png", lambda p: palette(p, transparency=bytes([128, 255])), (127, 127, 255), RED),
    ("palette.bmp", palette, BLUE, RED),
    ("bilevel.png", lambda p: array(p, halves(False, True, bool)), (0, 0, 0), (255, 255, 255)),
    ("bilevel_fax.tif", lambda p: array(p, halves(False, True, bool), compression="group4"), (0, 0, 0), (255,) * 3),
    ("grey.jpg", lambda p: save(p, colour=100, mode="L"), (100,) * 3, (100,) * 3),
    ("grey_transparent.png", lambda p: array(p, halves(0, 90, np.uint8), transparency=0), (255,) * 3, (90,) * 3),
    ("grey_alpha.png", lambda p: save(p, colour=(100, 0), mode="LA"), (255,) * 3, (255,) * 3),
    ("grey_16.png", lambda p: array(p, halves(257 * 10, 257 * 200, np.uint16)), (10,) * 3, (200,) * 3),
    ("grey_16.tif", lambda p: array(p, halves(257 * 10, 257 * 200, np.uint16)), (10,) * 3, (200,) * 3),
    ("grey_16_dark.png", lambda p: array(p, halves(0, 257, np.uint16)), (0,) * 3, (1,) * 3),
    ("grey_32.tif", lambda p: array(p, halves(0, 65535, np.int32)), (0,) * 3, (255,) * 3),
    ("grey_32_wide.tif", lambda p: array(p, halves(-1_000_000, 1_000_000, np.int32)), (0,) * 3, (255,) * 3),
    ("float_unit.tif", lambda p: array(p, halves(0.2, 0.8, np.float32)), (51,) * 3, (204,) * 3),
    ("float_255.tif", lambda p: array(p, halves(51, 204, np.float32)), (51,) * 3, (204,) * 3),
    ("float_wide.tif", lambda p: array(p, halves(-1e9, 1e9, np.float32)), (0,) * 3, (255,) * 3),
    ("float_nan.tif", lambda p: array(p, halves(np.nan, 1, np.float32)), (0,) * 3, (255,) * 3),
    ("float_inf.tif", lambda p: array(p, halves(np.inf, 1, np.float32)), (0,) * 3, (255,) * 3),
    ("float_black.tif", lambda p: array(p, halves(0, 0, np.float32)), (0,) * 3, (0,) * 3),
    ("cmyk.jpg", lambda p: save(p, colour=(0, 255, 255, 0), mode="CMYK", quality=100), RED, RED),
    ("cmyk.tif", lambda p: save(p, colour=(255, 0, 255, 0), mode="CMYK"), GREEN, GREEN),
    ("ycbcr.jpg", lambda p: save(p, colour=(76, 85, 255), mode="YCbCr", quality=100), RED, RED),
    ("lab.tif", lambda p: save(p, colour=(0, 128, 128), mode="LAB"), (0,) * 3, (0,) * 3),
    ("rgb_16.png", lambda p: p.write_bytes(png(8, 8, 16, ROWS_16_BIT)), (64, 128, 192), (64, 128, 192)),
    ("rgba_clear.png", lambda p: save(p, colour=(*BLUE, 0), mode="RGBA"), (255,) * 3, (255,) * 3),
    ("rgba_half.png", lambda p: save(p, colour=(0, 0, 0, 128), mode="RGBA"), (127,) * 3, (127,) * 3),
    ("rgba_solid.webp", lambda p: save(p, colour=(*RED, 255), mode="RGBA", lossless=True), RED, RED),
    ("rgba.tif", lambda p: save(p, colour=(*RED, 0), mode="RGBA"), (255,) * 3, (255,) * 3),
    ("rgb_key.png", lambda p: save(p, colour=BLUE, transparency=BLUE), (255,) * 3, (255,) * 3),
    ("lossy.webp", lambda p: save(p, colour=GREY), GREY, GREY),
    ("animated.webp", two_frames, RED, RED),
    ("animated.png", two_frames, RED, RED),
    ("pages.tif", two_frames, RED, RED),
    ("progressive.jpg", lambda p: save(p, colour=GREY, progressive=True), GREY, GREY),
    ("profile.jpg", lambda p: save(p, colour=GREY, icc_profile=b"not a profile at all"), GREY, GREY),
    ("profile.png", lambda p: save(p, colour=GREY, icc_profile=b"\0" * 300), GREY, GREY),
    ("really_a_jpeg.png", lambda p: save(p, colour=GREY, format="JPEG"), GREY, GREY),
]
