"""Whole runs with concepts: the bytes of a list of one, exact resume, any way to deal a batch, and the loss of each."""

import dataclasses

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load
from step_formula import ROWS, SIDE, call, inputs, loss_in_numpy, make, velocity
from world import fill_cache, lora_bytes, metrics, train, without_time

from flux_db.report import run_page
from flux_db.run.record import read_run
from flux_db.train_step import TrainStepForFluxDevDB

LAYER = "single_transformer_blocks.0.attn.to_q"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("concepts")
    for name, count in (("dog", 3), ("ink", 2)):
        (root / name).mkdir()
        for number in range(count):
            Image.new("RGB", (64, 64), (60 * number, 90, 30 * len(name) + count)).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def entries(folders):
    dog = {"dir": str(folders / "dog"), "prompt": "a photo of {trigger} dog", "trigger": "sks", "repeats": 2}
    return [dog, {"dir": str(folders / "ink"), "prompt": "in ink style", "weight": 0.25, "caption_dropout": 0.5}]


def config_of(world, output, entries, **flags):
    flags = {"instance_data_dir": None, "instance_prompt": None, "lora_layers": LAYER, "concepts": entries, **flags}
    config = world.config(output, encode_cache_dir=str(output.parent / "cache"), **flags)
    fill_cache(config)
    return config


def test_a_list_of_one_gives_the_bytes_of_one_folder_with_flags(cpu, world, entries, tmp_path):
    dog = entries[0] | {"caption_dropout": 0.5}
    flags = {
        "instance_data_dir": dog["dir"], "instance_prompt": dog["prompt"], "trigger_word": "sks", "repeats": 2,
        "caption_dropout": 0.5,
    }  # fmt: skip
    for name, settings in {"flags": {"concepts": []} | flags, "list": {"concepts": [dog]}}.items():
        config = config_of(world, tmp_path / name, settings.pop("concepts"), **settings)
        assert train(config, compile_anew=name == "list") == 0
    assert lora_bytes(tmp_path / "list") == lora_bytes(tmp_path / "flags")
    assert without_time(metrics(tmp_path / "list")) == without_time(metrics(tmp_path / "flags"))


def test_a_resume_of_several_concepts_and_sizes_is_exact(cpu, world, entries, tmp_path, capfd):
    """With class pictures, accumulation and Prodigy."""
    both = [entries[0], entries[1] | {"resolutions": [32, 48]}]
    config = config_of(
        world, tmp_path / "whole", both, with_prior_preservation=True, class_data_dir=str(world.pictures),
        class_prompt="a thing", num_class_images=2, gradient_accumulation_steps=2, optimizer="prodigy",
        learning_rate=1.0, max_train_steps=6, checkpointing_steps=3, lora_dropout=0.1,
    )  # fmt: skip
    assert train(config) == 0
    told = capfd.readouterr().err
    assert (
        "Concept dog: 6 of 10 draws in an epoch" in told
        and "Concept ink: 4 of 10 draws in an epoch, loss x 0.25" in told
    )
    assert "which is a graph of its own: 32 x 32: 8, 48 x 48: 2" in told
    start = str(tmp_path / "whole" / "checkpoint-3")
    changed = dataclasses.replace(config.output, output_dir=str(tmp_path / "again"), resume_from_checkpoint=start)
    assert train(dataclasses.replace(config, output=changed)) == 0
    assert lora_bytes(tmp_path / "again") == lora_bytes(tmp_path / "whole")
    rows = without_time(metrics(tmp_path / "whole"))
    assert without_time(metrics(tmp_path / "again"))[-3:] == rows[-3:]
    assert {name for row in rows for name in row["loss_by_concept"]} == {"dog", "ink"}


def test_neither_lora_nor_losses_depend_on_how_a_batch_is_dealt(cpu, world, entries, tmp_path):
    """The loss is the weighted mean of the concepts' losses."""
    found, rows = [], []
    for batch, accumulation in ((4, 1), (1, 4)):
        output = tmp_path / f"{batch}"
        config = config_of(
            world, output, entries, train_batch_size=batch, gradient_accumulation_steps=accumulation, max_train_steps=3
        )
        assert train(config) == 0
        found.append(load(lora_bytes(output)))
        rows.append(metrics(output))
    for name, value in found[0].items():
        np.testing.assert_allclose(value, found[1][name], atol=2e-6, err_msg=name)
    for one, other in zip(*rows, strict=True):
        assert one["loss_by_concept"] == pytest.approx(other["loss_by_concept"], rel=1e-5)
    mixed = [row for row in rows[0] if len(row["loss_by_concept"]) == 2]
    assert mixed, "no step has both concepts"
    for row in mixed:
        dog, ink = row["loss_by_concept"]["dog"], row["loss_by_concept"]["ink"]
        assert any(row["loss"] == pytest.approx(((4 - n) * dog + n * 0.25 * ink) / 4, rel=1e-5) for n in (1, 2, 3))


def test_the_sum_of_errors_of_each_concept_is_the_formula(cpu, world, tmp_path):
    transformer, settings, optimizer, _ = make(cpu, world, tmp_path, concepts=2, prior_loss_weight=None)
    values = inputs(48, 32)
    values["mask"] = np.random.default_rng(5).random((ROWS, 1, SIDE, SIDE)).astype(np.float32)
    answer = velocity(transformer, settings, values)
    of_row = []
    for row in range(ROWS):
        one = {name: value[row : row + 1] if value.ndim else value for name, value in values.items()}
        of_row.append(loss_in_numpy(settings, one, answer[row : row + 1], np.ones_like))
    values["concept"] = np.array([[0, 1], [1, 0]], np.float32)
    step = TrainStepForFluxDevDB(transformer, optimizer, settings).set_train(True)
    loss, _, applied, _, _, first, second = call(step, values)
    assert applied == 1 and loss == pytest.approx(np.mean(of_row), rel=1e-6)
    assert (first, second) == pytest.approx((of_row[1], of_row[0]), rel=1e-6)


def test_held_classes_clip_and_held_out_pictures_with_concepts(cpu, world, entries, tmp_path):
    """--train_text_encoder, the class of each concept, a validation loss of each, samples for each trigger."""
    both = [entries[0] | {"class": "dog"}, entries[1] | {"class": "", "caption_dropout": 0}]
    config = config_of(
        world, tmp_path / "run", both, train_text_encoder=True, max_train_steps=2, validation_share=0.34,
        validation_steps=2, ema_decay=0.9, train_batch_size=2,
    )  # fmt: skip
    assert train(config) == 0
    rows = metrics(tmp_path / "run")
    assert all(np.isfinite(value) for row in rows if "loss" in row for value in row["loss_by_concept"].values())
    last = rows[-1]
    assert set(last["validation_loss_by_concept"]) <= {"dog", "ink"} and last["validation_loss_by_concept"]
    page = run_page.render(read_run(tmp_path / "run"))
    assert "Loss by concept" in page and "Validation loss by concept" in page
    card = (tmp_path / "run" / "README.md").read_text()
    assert "# FLUX.1 LoRA: `sks`" in card and "trained on 2 concepts" in card and "`in ink style`" in card
    assert "`dog` x 2, loss x 1; `ink` x 1, loss x 0.25" in card and str(tmp_path) not in card
