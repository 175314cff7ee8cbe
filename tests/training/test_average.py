"""The running average of the LoRA: validation and best file are of it, both files are written, a resume is exact."""

import dataclasses
import shutil

import numpy as np
import pytest
from safetensors.numpy import load, load_file
from world import fill_cache, lora_bytes, metrics, train, without_time

from flux_db.errors import UserError
from flux_db.output_folder import BEST_LORA, EMA_LORA, LORA_FILE
from flux_db.weight_file import open_weights

RUN = {
    "ema_decay": 0.6,
    "lora_layers": "single_transformer_blocks.0.attn.to_q",
    "gradient_accumulation_steps": 2,
    "max_train_steps": 6,
    "checkpointing_steps": 1,
    "validation_steps": 3,
    "keep_best": True,
}


@pytest.fixture(scope="module")
def whole(cpu, world, tmp_path_factory):
    output = tmp_path_factory.mktemp("average") / "run"
    held_out = shutil.copytree(world.pictures, output.parent / "held out")
    places = {"encode_cache_dir": str(output.parent / "cache"), "validation_data_dir": str(held_out)}
    config = world.config(output, **RUN, **places)
    fill_cache(config)
    assert train(config) == 0
    return config, output


def moved(config, folder, **changes):
    """The same run elsewhere."""
    output = {"output_dir": str(folder)} | {k: changes.pop(k) for k in ("resume_from_checkpoint",) if k in changes}
    own = {section: changes[section] for section in changes}
    parts = {"output": output} | own
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in parts.items()}
    )


def test_the_average_is_that_of_the_steps(whole):
    """With a checkpoint of each step: shares 1, 9/11, 9/12, ... of the new weights, at least 1 - 0.6."""
    _, output = whole
    steps = [load_file(output / f"checkpoint-{step}" / LORA_FILE) for step in range(1, 7)]
    final = load_file(output / EMA_LORA)
    for name, value in final.items():
        average = steps[0][name].astype(np.float64)
        for updates, new in enumerate(steps[1:], start=2):
            average += max(0.4, 9 / (9 + updates)) * (new[name] - average)
        np.testing.assert_allclose(value, average, rtol=1e-5, atol=1e-9)
        assert not np.array_equal(value, steps[-1][name])
    assert load(lora_bytes(output)).keys() == final.keys()
    assert open_weights(output / EMA_LORA).metadata["ema_decay"] == "0.6"
    assert "ema_decay" not in open_weights(output / LORA_FILE).metadata


def test_the_best_lora_is_the_average(whole):
    _, output = whole
    best = [row["step"] for row in metrics(output) if row.get("best")][-1]
    kept = load_file(output / BEST_LORA)
    average = load_file(output / f"checkpoint-{best}" / EMA_LORA)
    assert all(np.array_equal(average[name], value) for name, value in kept.items())


def test_validation_sees_the_average_and_the_weights_train_on_as_without(whole, tmp_path):
    config, output = whole
    plain = moved(config, tmp_path / "plain", optim={"ema_decay": None})
    assert train(plain) == 0
    ours, others = load(lora_bytes(output)), load(lora_bytes(tmp_path / "plain"))
    assert all(np.array_equal(others[name], value) for name, value in ours.items())
    assert not (tmp_path / "plain" / EMA_LORA).exists()
    losses = [[row["validation_loss"] for row in metrics(folder) if "validation_loss" in row]
              for folder in (output, tmp_path / "plain")]  # fmt: skip
    assert losses[0][0] == losses[1][0] and losses[0][1:] != losses[1][1:]


def test_a_resume_is_exact(whole, tmp_path):
    config, output = whole
    assert train(moved(config, tmp_path / "run", resume_from_checkpoint=str(output / "checkpoint-2"))) == 0
    for name in (LORA_FILE, EMA_LORA, BEST_LORA, f"checkpoint-6/{EMA_LORA}", "checkpoint-6/optimizer.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (output / name).read_bytes(), name
    rows = [row for row in without_time(metrics(output)) if row["step"] > 3]
    assert [row for row in without_time(metrics(tmp_path / "run")) if row["step"] > 3] == rows


def test_the_average_as_the_lora_file(whole, tmp_path):
    """Decided at the end: from the last checkpoint, with --ema_export."""
    config, output = whole
    last = moved(config, tmp_path / "run", resume_from_checkpoint=str(output / "checkpoint-6"))
    last = dataclasses.replace(last, output=dataclasses.replace(last.output, ema_export=True))
    assert train(last) == 0
    exported, average = load(lora_bytes(tmp_path / "run")), load_file(output / EMA_LORA)
    assert all(np.array_equal(exported[name], value) for name, value in average.items())
    assert not (tmp_path / "run" / EMA_LORA).exists()
    assert "| Average (EMA) | decay 0.6, in `pytorch_lora_weights" in (tmp_path / "run" / "README.md").read_text()


def test_another_decay_and_a_lost_average_are_refused(whole, tmp_path):
    config, output = whole
    start = str(output / "checkpoint-5")
    other = moved(config, tmp_path / "run", optim={"ema_decay": 0.9}, resume_from_checkpoint=start)
    with pytest.raises(UserError, match=r"ema_decay: 0\.6 in the checkpoint, 0\.9 now"):
        train(other)
    (output / "checkpoint-5" / EMA_LORA).rename(tmp_path / "gone")
    try:
        with pytest.raises(UserError, match=EMA_LORA):
            train(moved(config, tmp_path / "run", resume_from_checkpoint=start))
    finally:
        (tmp_path / "gone").rename(output / "checkpoint-5" / EMA_LORA)
