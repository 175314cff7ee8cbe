"""What is drawn: buckets, cached crops, dropped captions and masks, in whole runs and batch by batch."""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from world import lora_bytes, metrics, train, without_time

from flux_db.data import encode, encode_cache
from flux_db.data.batches import BatchSource, prefetch
from flux_db.data.dataset import read_dataset
from flux_db.data.masks import loss_weights, mask_at
from flux_db.data.pixels import load_rgb, resize_and_crop
from flux_db.errors import UserError
from flux_db.model import model_folder
from flux_db.settings.schema import from_flat_dict, to_flat_dict
from flux_db.stream import BatchLayout
from flux_db.training import build

LAYER = "single_transformer_blocks.0.attn.to_q"


def encoded(config):
    """Model, cache and data of a run, the pictures encoded in this process; each prompt gets numbers of its own."""
    model = model_folder.locate(config.model)
    cache = encode_cache.open_cache(config, model)
    dataset, _ = read_dataset(config)
    work = encode.missing(config, cache, dataset)
    cache.folder.mkdir(exist_ok=True)
    for prompt in work.prompts:
        rng = np.random.default_rng(list(prompt.encode()))
        embeds = {"prompt_embeds": (16, 48), "pooled_prompt_embeds": (32,)}
        arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in embeds.items()}
        cache.write(cache.prompt_file(prompt), arrays)
    if work.pictures:
        encode.encode(config, model, cache, encode.Work((), work.pictures))
    return model, cache, dataset


def source(config, steps=12, **layout):
    model, cache, dataset = encoded(config)
    return BatchSource(
        config=config, dataset=dataset, cache=cache, layout=BatchLayout(**layout),
        latent_shape=build.latent_shape(config, model), learning_rates=np.linspace(0, 1, steps, dtype=np.float32),
        sigmas=np.linspace(1.0, 0.001, 1000),
    )  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Three wide pictures and two square ones, two of them with masks; a caption each."""
    folder = tmp_path_factory.mktemp("shapes")
    for number, size in enumerate([(160, 48), (128, 36), (200, 60), (64, 72), (90, 80)]):
        picture = Image.new("RGB", size, (40 * number, 90, 160))
        ImageDraw.Draw(picture).ellipse((4, 4, size[0] // 2, size[1] - 4), fill=(250, 30 * number, 60))
        picture.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    for number in (1, 3):
        with Image.open(folder / f"{number}.png") as picture:
            mask = Image.new("L", picture.size)
        ImageDraw.Draw(mask).ellipse((4, 4, mask.width // 2, mask.height - 4), fill=255)
        mask.save(folder / f"{number}.mask.png")
    return folder


@pytest.fixture(scope="module")
def everything(cpu, world, shapes, tmp_path_factory):
    """A run with all there is: buckets, masks, crops, flips, dropped captions, class pictures, dropout, two workers."""
    settings = {
        "instance_data_dir": str(shapes), "aspect_ratio_buckets": "auto", "random_flip": True, "cache_crops": 2,
        "caption_dropout": 0.4, "with_prior_preservation": True, "class_data_dir": str(world.pictures),
        "class_prompt": "a photo of a dog", "num_class_images": 3, "lora_layers": LAYER, "lora_dropout": 0.1,
        "train_batch_size": 2, "max_train_steps": 7, "checkpointing_steps": 4, "dataloader_num_workers": 2,
        "encode_cache_dir": str(tmp_path_factory.mktemp("cache")),
    }  # fmt: skip
    config = world.config(tmp_path_factory.mktemp("everything"), **settings)
    encoded(config)
    return config


@pytest.fixture(scope="module")
def run(everything):
    assert train(everything) == 0
    return everything


def test_a_bucketed_run_is_resumed_to_the_same_bytes(run, tmp_path, capfd):
    """The resumed run compiles its graphs anew, so that it also shows that in the first both graphs shared weights."""
    sizes = [source(run, batch=2).size(i) for i in range(7)]
    assert set(sizes[:4]) == set(sizes[4:]) == {(16, 64), (32, 32)}, "both sizes before and after the checkpoint"
    assert sizes[3] != sizes[4] and sizes[2:4] != [sizes[4]] * 2, "the graph of step 5 must see other graphs' steps"
    output = Path(run.output.output_dir)
    path = str(output / "checkpoint-4")
    shutil.copy(output / "metrics.jsonl", tmp_path)
    again = to_flat_dict(run) | {"output_dir": str(tmp_path), "resume_from_checkpoint": path}
    capfd.readouterr()
    assert train(from_flat_dict(again), compile_anew=True) == 0
    told = capfd.readouterr().err
    assert told.count("Compiling the training step for") == 2
    assert "Compiling the training step for 64 x 16" in told and "64 x 16: 3, 32 x 32: 2" in told
    assert "Masks for 2 of 5 pictures" in told
    assert lora_bytes(tmp_path) == lora_bytes(output)
    assert without_time(metrics(tmp_path)) == without_time(metrics(output))


def test_batches_are_of_one_size_however_they_are_dealt_and_fetched(cpu, everything):
    whole = source(everything, batch=4)
    devices = [source(everything, batch=1, accumulation=2, world_size=2, rank=rank) for rank in range(2)]
    seen = set()
    for i in range(len(whole)):
        pieces = [devices[rank][2 * i + part] for part in range(2) for rank in range(2)]
        seen.add(whole.size(i))
        assert {devices[rank].size(2 * i + part) for part in range(2) for rank in range(2)} == {whole.size(i)}
        for column in (0, 1, 2, 3, 4, 5, 6, 9):
            instance, classes = (np.concatenate([piece[column][n : n + 1] for piece in pieces]) for n in range(2))
            assert np.array_equal(np.concatenate([instance, classes]), whole[i][column])
        height, width = (side // 8 for side in whole.size(i))
        assert whole[i][0].shape == (8, 32, height, width) and whole[i][2].shape == (8, 16, height, width)
        assert whole[i][9].shape == (8, 1, height, width) and (whole[i][9][4:] == 1).all()
    assert seen == {(16, 64), (32, 32)}
    for one, two in zip(prefetch(whole, 3), whole, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def found(arrays, choices):
    """Which of the choices each row is."""
    return [[name for name, value in choices.items() if np.array_equal(row, value)] for row in arrays]


@pytest.fixture(scope="module")
def drawn(everything):
    """Of 90 batches each row's sample, number of crop and flip, told by its latents; and the row's loss weights."""
    batches = source(everything, steps=90, batch=2)
    choices = {
        (sample, number, flip): batches.cache.read(batches.cache.picture_file(version, flip))["moments"]
        for sample in batches.dataset.examples
        for number, version in enumerate(sample.versions)
        for flip in (False, True)
    }
    rows = [(names, weights) for b in batches for names, weights in zip(found(b[0][:2], choices), b[9], strict=False)]
    assert all(len(names) == 1 for names, _ in rows)
    return [(*names[0], weights) for names, weights in rows]


def test_flips_and_crops_are_chosen_anew_for_every_draw(drawn):
    assert len({(sample, number, flip) for sample, number, flip, _ in drawn}) == 5 * 2 * 2
    assert sum(number for _, number, _, _ in drawn) / 180 == pytest.approx(0.5, abs=0.11)
    assert sum(flip for _, _, flip, _ in drawn) / 180 == pytest.approx(0.5, abs=0.11)


def expected_weights(sample, crop, flip):
    latent = tuple(side // 8 for side in sample.size)
    if sample.mask is None:
        return np.ones((1, *latent), np.float32)
    return loss_weights(mask_at(sample.mask, sample.picture.size, sample.size, crop, flip, latent), 0.1)[None]


def test_a_row_has_the_mask_of_its_own_picture_crop_and_flip(drawn, everything):
    for sample, number, flip, weights in drawn:
        assert np.array_equal(weights, expected_weights(sample, sample.versions[number].crop, flip))
        assert (weights.min() < 0.5) == (sample.mask is not None)


def test_masks_without_cached_latents(everything):
    changes = {"cache_crops": 1, "center_crop": True, "cache_latents": False}
    batches = source(from_flat_dict(to_flat_dict(everything) | changes), steps=20, batch=2)
    pixels = {
        (sample, flip): resize_and_crop(load_rgb(sample.picture.path), sample.size, (0.5, 0.5), flip)
        for sample in batches.dataset.examples
        for flip in (False, True)
    }
    for batch in batches:
        for ((sample, flip),), weights in zip(found(batch[0][:2], pixels), batch[9], strict=False):
            assert np.array_equal(weights, expected_weights(sample, (0.5, 0.5), flip))


def test_a_picture_that_changes_during_training_ends_it(everything, tmp_path):
    """With latents in the cache it is not opened again; without them it is, at every step."""
    folder = shutil.copytree(everything.data.instance_data_dir, tmp_path / "pictures")
    changes = {"cache_crops": 1, "cache_latents": False, "instance_data_dir": str(folder)}
    batches = source(from_flat_dict(to_flat_dict(everything) | changes), steps=5, batch=2)
    assert len(list(batches)) == 5
    path = batches.dataset.examples[batches.draw_order.item(0)].picture.path
    Image.open(path).point(lambda value: 255 - value).save(path)
    with pytest.raises(UserError, match=f"{path}: has changed since the run looked at it; start again"):
        batches[0]


def test_captions_are_dropped_in_the_share_asked_for_and_never_the_class_prompt(cpu, everything):
    batches = source(everything, steps=150, batch=2)
    prompts = {
        p: batches.cache.read(batches.cache.prompt_file(p))["prompt_embeds"] for p in (*batches.dataset.prompts, "")
    }
    instance, classes = Counter(), Counter()
    for batch in batches:
        names = [match[0] for match in found(batch[4], prompts)]
        instance.update(names[:2])
        classes.update(names[2:])
    assert instance[""] / 300 == pytest.approx(0.4, abs=0.08)
    assert set(instance) == {"", *(f"picture {n}" for n in range(5))} and set(classes) == {"a photo of a dog"}
    changed = from_flat_dict(to_flat_dict(everything) | {"caption_dropout": 0.0})
    kept = source(changed, steps=20, batch=2)
    assert all(found(kept[i][4], {"": prompts[""]}) == [[]] * 4 for i in range(20))


def test_squares_keep_their_files_and_their_fingerprint(world, tmp_path):
    """What was encoded or saved before there were buckets, masks and several crops is still found and accepted."""
    dataset, _ = read_dataset(world.config(tmp_path))
    cache = encode_cache.Cache(tmp_path, "text", "vae", "no", 16)
    lines = ""
    for sample in dataset.examples:
        content = [1, "latent", "vae", 32, sample.picture.digest, list(sample.crop), True]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:40]
        assert cache.picture_file(sample, True).name == f"latent-{key}.safetensors"
        lines += f"{sample.picture.digest} {sample.prompt!r} {sample.crop}\n"
    assert dataset.fingerprint() == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize("change", [{"unmasked_weight": 1.0}, {"cache_crops": 1}, {"aspect_ratio_buckets": None}])
def test_the_fingerprint_tells_masks_crops_and_shapes(cpu, everything, change):
    dataset, _ = read_dataset(everything)
    other, _ = read_dataset(from_flat_dict(to_flat_dict(everything) | change))
    assert other.fingerprint() != dataset.fingerprint()
    assert other.masked == ("unmasked_weight" not in change)


def test_a_mask_of_ones_gives_the_bytes_of_a_run_without_masks(everything, world, tmp_path):
    masks = tmp_path / "masks"
    masks.mkdir()
    for picture in world.pictures.glob("*.png"):
        Image.new("L", (32, 32), 255).save(masks / picture.name)
    results = []
    for name, extra in (("plain", {}), ("ones", {"mask_dir": str(masks)})):
        config = world.config(
            tmp_path / name, lora_layers=LAYER, max_train_steps=3, random_flip=True,
            encode_cache_dir=everything.data.encode_cache_dir, **extra,
        )  # fmt: skip
        _, _, dataset = encoded(config)
        assert dataset.masked == bool(extra)
        assert train(config) == 0
        results.append((lora_bytes(tmp_path / name), without_time(metrics(tmp_path / name))))
    assert results[0] == results[1]
