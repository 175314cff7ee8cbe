"""How several concepts are dealt: by repeats, exactly, in any layout; at which sizes; what a row has of its concept."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from world import fill_cache

from flux_db.data import encode_cache
from flux_db.data.batches import BatchSource
from flux_db.data.dataset import read_dataset, total_steps
from flux_db.data.selection import held_out_place
from flux_db.problem import Kind
from flux_db.size import Size
from flux_db.stream import BatchLayout


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two dogs, three robots and one of ink, of different sizes; a robot is small. The dogs have masks."""
    root = tmp_path_factory.mktemp("concepts")
    sides = {"dog": (64, 96), "robot": (64, 40, 24), "ink": (128,)}
    for name, own in sides.items():
        for number, side in enumerate(own):
            (root / name).mkdir(exist_ok=True)
            Image.new("RGB", (side, side), (60 * number, 90, len(name) * 30)).save(root / name / f"{number}.png")
    for number in (0, 1):
        (root / "masks").mkdir(exist_ok=True)
        Image.new("L", (32, 32), 0).save(root / "masks" / f"{number}.png")
    return root


@pytest.fixture
def config(world, folders, tmp_path):
    def make(changes=None, **flags):
        changes = changes or {}
        entries = [
            {"dir": str(folders / "dog"), "prompt": "a photo of sks dog", "repeats": 3},
            {"dir": str(folders / "robot"), "prompt": "a photo of ohwx robot", "weight": 0.5, "repeats": 2},
            {"dir": str(folders / "ink"), "prompt": "in ink style"},
        ]
        entries = [entry | changes.get(Path(entry["dir"]).name, {}) for entry in entries]
        settings = {"concepts": entries, "instance_data_dir": None, "instance_prompt": None}
        return world.config(tmp_path / "run", **settings, encode_cache_dir=str(tmp_path / "cache"), **flags)

    return make


def drawn(dataset, order, positions):
    return [dataset.examples[order.item(k)] for k in positions]


@pytest.mark.parametrize("batch", [1, 4, 13])
def test_every_epoch_deals_each_picture_its_repeats(config, batch):
    dataset, _ = read_dataset(config())
    assert Counter(example.concept for example in dataset.examples) == {0: 6, 1: 6, 2: 1}
    order = dataset.draw_order(42, batch)
    for epoch in range(5):
        found = Counter(e.picture.path for e in drawn(dataset, order, range(13 * epoch, 13 * (epoch + 1))))
        assert sorted(found.values()) == [1, 2, 2, 2, 3, 3]


def test_with_several_sizes_the_counts_stay_by_repeats(config):
    """A size may take its share early, so that a picture was seen once or twice more."""
    settings = config({"robot": {"resolutions": [32, 48]}})
    dataset, _ = read_dataset(settings)
    order = dataset.draw_order(42, 2)
    for epochs in (1, 3, 10):
        counts = order.counts(order.steps(epochs))
        wanted = Counter((e.picture.path, e.size) for e in dataset.examples)
        found = Counter()
        for example, count in zip(dataset.examples, counts, strict=True):
            found[example.picture.path, example.size] += int(count)
        assert all(epochs * wanted[key] <= found[key] <= epochs * wanted[key] + 2 for key in wanted)
        assert sum(found.values()) - epochs * len(dataset.examples) <= len(dataset.sizes)


def test_a_picture_is_shown_at_every_size_to_which_it_is_not_scaled_up(config):
    settings = config({"robot": {"resolutions": [48, 32]}, "ink": {"resolutions": [32, 64, 160]}})
    dataset, warnings = read_dataset(settings)
    sizes = {}
    for example in dataset.examples:
        sizes.setdefault(f"{example.picture.path.parent.name}/{example.picture.path.stem}", set()).add(
            example.size.height
        )
    assert sizes == {
        "dog/0": {32},
        "dog/1": {32},
        "robot/0": {32, 48},
        "robot/1": {32},
        "robot/2": {32},
        "ink/0": {32, 64},
    }
    small = [warning for warning in warnings if warning.kind is Kind.SMALL]
    assert [warning.path.name for warning in small] == [
        "2.png"
    ] and "24 x 24 is smaller than the smallest size" in small[0]
    assert len(dataset.sizes) == 3, "the graphs; 160 is none"


def test_buckets_of_each_resolution_are_shared_by_the_concepts(config):
    both = {"dog": {"resolutions": [32, 48]}, "robot": {"resolutions": [32, 48]}}
    dataset, _ = read_dataset(config(both, aspect_ratio_buckets="auto"))
    assert dataset.sizes == (Size(32, 32), Size(48, 48))


def test_the_fingerprint_knows_pictures_prompts_and_sizes_and_no_places(config):
    plain = read_dataset(config())[0].fingerprint()
    assert read_dataset(config({"dog": {"prompt": "a photo of sks cat"}}))[0].fingerprint() != plain
    assert read_dataset(config({"dog": {"resolutions": [48, 32]}}))[0].fingerprint() != plain
    assert read_dataset(config({"dog": {"mask_dir": "nowhere"}}))[0].fingerprint() == plain


def test_a_list_of_one_has_the_data_of_one_folder(world, folders, tmp_path):
    dog = str(folders / "dog")
    flags = world.config(
        tmp_path, instance_data_dir=dog, instance_prompt="sks dog", repeats=2, mask_dir=str(folders / "masks")
    )
    entry = {"dir": dog, "prompt": "sks dog", "repeats": 2, "mask_dir": str(folders / "masks"), "resolutions": [32]}
    listed = world.config(tmp_path, instance_data_dir=None, instance_prompt=None, concepts=[entry])
    assert read_dataset(flags) == read_dataset(listed)


def test_held_out_pictures_keep_their_concept(config):
    digests = [example.picture for example in read_dataset(config())[0].examples if example.concept < 2]
    dataset, _ = read_dataset(config(validation_share=min(map(held_out_place, digests)) + 1e-6))
    assert dataset.held_out
    names = {0: "dog", 1: "robot", 2: "ink"}
    assert all(e.picture.path.parent.name == names[e.concept] for e in (*dataset.held_out, *dataset.examples))


# --- rows ------------------------------------------------------------------------------------------------------------


def batches(settings, count=None, start=0, **layout):
    fill_cache(settings)
    dataset, _ = read_dataset(settings)
    cache = encode_cache.open_cache(settings, Path(settings.model.pretrained_model_name_or_path))
    source = BatchSource(
        config=settings, dataset=dataset, cache=cache, layout=BatchLayout(**layout), latent_shape=(16, 4, 4),
        learning_rates=np.zeros(12, np.float32), sigmas=np.linspace(1.0, 0.001, 1000), start=start,
    )  # fmt: skip
    return source, [source[i] for i in range(count or len(source))]


def test_a_row_has_weight_concept_mask_and_caption_dropout_of_its_own(config, folders, world):
    settings = config(
        {"dog": {"mask_dir": str(folders / "masks")}, "robot": {"caption_dropout": 1.0}},
        with_prior_preservation=True, class_data_dir=str(world.pictures), class_prompt="a thing", num_class_images=3,
        unmasked_weight=0.25,
    )  # fmt: skip
    source, found = batches(settings, batch=2)
    cache = source.cache
    prompts = {0: "a photo of sks dog", 1: "", 2: "in ink style"}
    weights = {0: 0.25, 1: 0.5, 2: 1.0}
    seen = Counter()
    for i, batch in enumerate(found):
        assert batch.concept.shape == (4, 3) and not batch.concept[2:].any(), "class pictures are of no concept"
        assert (batch.mask[2:] == 1).all()
        for row in range(2):
            (concept,) = np.flatnonzero(batch.concept[row])
            seen[int(concept)] += 1
            assert (batch.mask[row] == np.float32(weights[concept])).all()
            embeds = cache.read(cache.prompt_file(prompts[int(concept)]))["prompt_embeds"]
            np.testing.assert_array_equal(batch.prompt_embeds[row], embeds)
        assert source.concept_counts(i + 1).tolist() == batch.concept.sum(0).tolist()
    assert set(seen) == {0, 1, 2}


def test_batches_are_the_same_however_they_are_dealt_and_resumed(config):
    settings = config({"robot": {"resolutions": [32, 48]}})
    _, whole = batches(settings, batch=4)
    parts = [batches(settings, batch=1, accumulation=2, world_size=2, rank=rank)[1] for rank in (0, 1)]
    for step, batch in enumerate(whole):
        rows = [parts[rank][2 * step + part] for part in (0, 1) for rank in (0, 1)]
        for name in ("pictures", "noise", "index", "mask", "concept", "prompt_embeds"):
            np.testing.assert_array_equal(getattr(batch, name), np.concatenate([getattr(row, name) for row in rows]))
    _, later = batches(settings, batch=4, start=7)
    for again, batch in zip(later, whole[7:], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(again.given, batch.given, strict=True))


def test_each_row_is_held_to_the_class_of_its_concept(config):
    classes = {"dog": {"class": "dog"}, "robot": {"class": "robot"}, "ink": {"class": ""}}
    source, found = batches(config(classes), batch=2)
    wanted = {0: "a photo of dog", 1: "a photo of robot", 2: ""}
    for batch in found:
        for row in range(2):
            concept = int(np.flatnonzero(batch.concept[row])[0])
            embeds = source.cache.read(source.cache.prompt_file(wanted[concept]))["prompt_embeds"]
            np.testing.assert_array_equal(batch.prompt_embeds[2 + row], embeds)


def test_one_concept_has_no_more_inputs_than_one_folder(world, folders, tmp_path):
    entry = {"dir": str(folders / "dog"), "prompt": "sks dog"}
    settings = world.config(
        tmp_path,
        instance_data_dir=None,
        instance_prompt=None,
        concepts=[entry],
        encode_cache_dir=str(tmp_path / "cache"),
    )
    _, (first, *_) = batches(settings, batch=1)
    assert first.mask is None and first.concept is None
    optim = replace(settings.optim, max_train_steps=None, num_train_epochs=3)
    assert total_steps(replace(settings, optim=optim), read_dataset(settings)[0], 1) == 6
