"""Masks: found, checked, and brought the same way as their pictures."""

import hashlib

import numpy as np
import pytest
from PIL import Image

from flux_db.data.masks import Mask, find_masks, loss_weights, mask_at
from flux_db.data.pictures import find_pictures, inspect_pictures
from flux_db.data.pixels import load_rgb, resize_and_crop
from flux_db.size import Size


@pytest.fixture
def folder(tmp_path):
    """Three pictures, one in a sub-folder."""
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    for name in ("a.jpg", "b.png", "more/c.png"):
        Image.new("RGB", (60, 40), "red").save(tmp_path / "pictures" / name)
    return tmp_path / "pictures"


def white(path, size=(60, 40), value=255, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path, **options)


def mask_of(path, **options):
    return Mask(path, hashlib.sha256(path.read_bytes()).hexdigest(), **options)


def masks_of(folder, mask_dir=None, alpha=False):
    pictures = inspect_pictures(find_pictures(folder), 16).pictures
    found = find_masks(pictures, folder, mask_dir, alpha)
    return {path.name: mask.path.name for path, mask in found.by_picture.items()}, found


def test_sidecars_are_masks_and_no_pictures(folder):
    white(folder / "a.mask.png")
    white(folder / "more" / "c.MASK.PNG")
    white(folder / "gone.mask.png")
    masks, found = masks_of(folder)
    assert masks == {"a.jpg": "a.mask.png", "c.png": "c.MASK.PNG"}
    assert found.problems == ()
    assert [w.split("/")[-1] for w in found.warnings] == [
        "b.png: has no mask; all of it counts fully",
        "gone.mask.png: a mask without a picture",
    ]


def test_without_masks_there_is_nothing_to_say(folder):
    assert masks_of(folder)[1] == ({}, (), ())


def test_a_folder_of_masks_mirrors_that_of_the_pictures_and_goes_before_sidecars(folder, tmp_path):
    mask_dir = tmp_path / "masks"
    white(mask_dir / "a.png")
    white(mask_dir / "b.mask.jpg")
    white(mask_dir / "more" / "c.webp")
    white(folder / "a.mask.png", value=7)
    masks, found = masks_of(folder, mask_dir)
    assert masks == {"a.jpg": "a.png", "b.png": "b.mask.jpg", "c.png": "c.webp"} and not found.problems
    assert [w.split("/")[-1] for w in found.warnings] == ["a.mask.png: a mask without a picture"]


def test_the_alpha_channel_serves_where_there_is_no_other_mask(folder):
    Image.new("RGBA", (60, 40), (9, 9, 9, 255)).save(folder / "a.png")
    Image.new("RGBA", (60, 40), (9, 9, 9, 255)).save(folder / "b.png")
    white(folder / "b.mask.png")
    masks, found = masks_of(folder, alpha=True)
    assert masks["b.png"] == "b.mask.png" and masks["a.png"] == "a.png" and "a.jpg" not in masks
    assert {m.path.name for m in found.by_picture.values() if m.is_alpha} == {"a.png"}


def test_every_problem_is_named(folder, tmp_path):
    white(folder / "a.mask.png", (60, 60))
    white(folder / "b.mask.png", (20, 30))
    (folder / "more" / "c.mask.png").write_bytes(b"nothing of the kind")
    problems = masks_of(folder)[1].problems
    assert problems[0].endswith(
        "a.mask.png: 60 x 60 is not the shape of its picture a.jpg, 60 x 40; make it of the same shape"
    )
    assert problems[1].endswith("turn it as the picture is seen, upright")
    assert "c.mask.png: not a JPEG" in problems[2] and len(problems) == 3


@pytest.mark.parametrize(
    ("names", "alpha", "part"),
    [
        (["z.png"], False, "no mask has the name of a picture"),
        (["a.png", "a.jpg"], False, "are masks of the same picture; keep one"),
        ([], True, "--alpha_mask: no picture without another mask has an alpha channel"),
    ],
)
def test_masks_that_cannot_be_meant(folder, tmp_path, names, alpha, part):
    for name in names:
        white(tmp_path / "masks" / name)
    (problem,) = masks_of(folder, tmp_path / "masks" if names else None, alpha)[1].problems
    assert part in problem


def test_a_mask_without_white_is_warned_of(folder):
    white(folder / "a.mask.png", value=1)
    assert "nothing in this mask is white" in masks_of(folder)[1].warnings[0]


# --- the picture's way -----------------------------------------------------------------------------------------------


def blob(width, height):
    """A picture whose red channel is white in a part that is off the middle, so that every turn and crop shows."""
    values = np.zeros((height, width, 3), np.uint8)
    values[height // 8 : height // 2, width // 3 : int(width * 0.9)] = 255
    return Image.fromarray(values)


@pytest.mark.parametrize("scale", [1, 2, 0.5])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("size", "crop"), [((64, 64), (0.2, 0.9)), ((32, 128), (0.5, 0.1)), ((128, 32), (1.0, 0.5))])
def test_a_mask_has_the_pictures_crop_flip_and_size(tmp_path, size, crop, flip, scale):
    """The mask is the picture itself: after all steps both must still agree, block by block."""
    picture = blob(160, 120)
    picture.save(tmp_path / "p.png")
    picture.resize((int(160 * scale), int(120 * scale))).save(tmp_path / "m.png")
    latent = (size[0] // 8, size[1] // 8)
    mask = mask_at(mask_of(tmp_path / "m.png"), Size(120, 160), Size(*size), crop, flip, latent)
    pixels = (resize_and_crop(load_rgb(tmp_path / "p.png"), size, crop, flip)[0] + 1) / 2
    expected = pixels.reshape(latent[0], 8, latent[1], 8).mean((1, 3))
    assert mask.shape == latent and mask.dtype == np.float32
    assert np.abs(mask - expected).max() < 0.12 and np.abs(mask - expected).mean() < 0.02
    assert mask.min() >= 0 and mask.max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_alpha_and_mask_are_turned_by_the_exif_tag(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    grey = blob(160, 120).convert("L")
    rgba = Image.merge("RGBA", (grey, grey, grey, grey))
    rgba.save(tmp_path / "p.png", exif=exif)
    grey.save(tmp_path / "m.png", exif=exif)
    upright = load_rgb(tmp_path / "p.png", (0, 0, 0))
    pixels = (resize_and_crop(upright, (64, 64), (0.3, 0.7))[0] + 1) / 2
    for mask in (mask_of(tmp_path / "m.png"), mask_of(tmp_path / "p.png", is_alpha=True)):
        values = mask_at(mask, Size.of(upright), Size.square(64), (0.3, 0.7), False, (8, 8))
        assert np.abs(values - pixels.reshape(8, 8, 8, 8).mean((1, 3))).max() < 0.12


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.3, 0.7])
def test_weights_are_exactly_one_where_the_mask_is_white(tmp_path, weight):
    white(tmp_path / "m.png", (100, 77))
    mask = mask_at(mask_of(tmp_path / "m.png"), Size(770, 1000), Size(48, 80), (0.123, 0.9), True, (6, 10))
    assert (loss_weights(mask, weight) == 1).all()
    black = loss_weights(np.zeros((2, 2), np.float32), weight)
    assert black == pytest.approx(weight, abs=1e-7) and black.dtype == np.float32
    assert loss_weights(np.full((1, 1), 0.5, np.float32), weight) == pytest.approx((1 + weight) / 2)


def test_label_masks_with_transparency_are_black_outside(tmp_path):
    cut_out = Image.new("RGBA", (16, 16), (255, 255, 255, 0))
    cut_out.paste((255, 255, 255, 255), (0, 0, 8, 16))
    cut_out.save(tmp_path / "m.png")
    mask = mask_at(mask_of(tmp_path / "m.png"), Size(16, 16), Size(16, 16), (0, 0), False, (2, 2))
    assert mask.tolist() == [[1, 0]] * 2
