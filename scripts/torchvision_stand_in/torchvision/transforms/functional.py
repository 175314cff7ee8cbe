"""Cropping by coordinates."""

from PIL import Image


def crop(picture: Image.Image, top: int, left: int, height: int, width: int) -> Image.Image:
    return picture.crop((left, top, left + width, top + height))
