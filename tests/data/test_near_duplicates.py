"""Near duplicates: copies are found, and different pictures are not taken for copies."""

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from flux_db.data import near_duplicates
from flux_db.data.pictures import find_pictures, inspect_pictures
from flux_db.demo.pictures import draw_picture


def texture(seed, side=128):
    """Random, but with large and small parts as photos have them."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = 1
    layers = [np.fft.irfft2(np.fft.rfft2(rng.standard_normal((side, side))) / frequency**1.2) for _ in range(3)]
    scaled = [(layer - layer.min()) / (layer.max() - layer.min()) * 255 for layer in layers]
    return Image.fromarray(np.stack(scaled, axis=-1).astype(np.uint8))


def jpeg(image, quality=40):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


def cropped(image, share):
    edge = share / 2 * image.width
    return image.crop((edge, edge, image.width - edge, image.height - edge))


COPIES = {
    "JPEG": jpeg,
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS),
    "double the size": lambda image: image.resize((image.width * 2, image.height * 2)),
    "squeezed": lambda image: image.resize((image.width, image.height * 3 // 4)),
    "cropped by 3 %": lambda image: cropped(image, 0.03),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "all of it": lambda image: jpeg(cropped(image, 0.02).resize((image.width // 2, image.height // 2)), 60),
}


def look(image):
    return near_duplicates.perceptual_hash(near_duplicates.thumbnail(image))


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_found(copy):
    originals = [*(draw_picture(128, i, 0) for i in range(5)), *(texture(seed) for seed in range(15))]
    for image in originals:
        assert near_duplicates.first_alike([look(image), look(COPIES[copy](image))]) == [None, 0]


def test_different_pictures_are_not_taken_for_copies():
    pictures = [*(draw_picture(128, i, 0) for i in range(5)), *(texture(seed, 64) for seed in range(200))]
    assert near_duplicates.first_alike([look(image) for image in pictures]) == [None] * len(pictures)


def test_pictures_of_one_colour_look_like_none():
    flat = [look(Image.new("RGB", (64, 64), colour)) for colour in ("red", "red", "grey", "#808182")]
    assert flat == [b""] * 4
    assert near_duplicates.first_alike(flat) == [None] * 4


def test_the_first_of_several_is_named_also_across_blocks(monkeypatch):
    monkeypatch.setattr(near_duplicates, "_ROWS_AT_ONCE", 2)
    a, b = look(texture(1)), look(texture(2))
    assert near_duplicates.first_alike([b"", a, b, a, b"", b, a]) == [None, None, None, 1, None, 2, 1]
    assert near_duplicates.first_alike([]) == []


def test_turned_by_exif_is_still_the_same_picture(tmp_path):
    image = texture(3)
    image.save(tmp_path / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "b.jpg", exif=exif)
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "c.jpg")
    pictures = inspect_pictures(find_pictures(tmp_path), 16).pictures
    assert [picture.warnings for picture in pictures] == [(), (f"looks like {tmp_path / 'a.png'}",), ()]
