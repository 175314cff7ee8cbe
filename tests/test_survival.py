"""Runs that meet trouble: bad gradients, damaged checkpoints, a disk that refuses."""

import errno
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load
from world import lora_bytes, metrics, train, without_time

from flux_db import checkpoint, encode
from flux_db.dataset import read_dataset
from flux_db.encode import open_cache
from flux_db.errors import UserError

# LoRA in the last block only: the step compiles in seconds
QUICK = {"lora_layers": "single_transformer_blocks.1.attn.to_q", "max_train_steps": 6, "checkpointing_steps": 2}


def run_state(output):
    return json.loads((output / "train_state.json").read_text())


def spoil(world, config, count):
    """Put NaN into the stored latents of the first pictures: bad data, not a mocked step."""
    cache = open_cache(config, world.model)
    for sample in read_dataset(config)[0].samples[:count]:
        path = cache.picture_file(sample, False)
        moments = encode.read(path)["moments"].copy()
        moments[0, 0, 0] = np.nan
        encode.write(path, {"moments": moments})


@pytest.fixture
def spoiled(cpu, world, tmp_path):
    """A config with a cache of its own, filled."""
    from flux_db.prepare import prepare

    shutil.copytree(world.folder / "cache", tmp_path / "cache", dirs_exist_ok=True)
    config = world.config(tmp_path / "out", encode_cache_dir=str(tmp_path / "cache"), max_skipped_steps=3, **QUICK)
    prepare(config, cpu)
    return config


def test_a_bad_picture_skips_its_steps_and_no_others(calm, world, spoiled, tmp_path):
    spoil(world, spoiled, count=1)
    assert train(spoiled) == 0
    rows = metrics(tmp_path / "out")
    assert [row["skipped"] for row in rows][-1] == 2  # 6 steps over 3 pictures: it is drawn twice
    assert [row["grad_norm"] is None for row in rows].count(True) == 2
    assert all(np.isfinite(v).all() for v in load(lora_bytes(tmp_path / "out")).values())


def test_nothing_but_bad_gradients_ends_the_run_with_the_causes(calm, world, spoiled, tmp_path, capfd):
    spoil(world, spoiled, count=3)
    assert train(spoiled) == 1
    text = capfd.readouterr().err
    assert "3 steps in a row" in text and "learning rate" in text and "checkpoint-2" in text
    assert "Traceback" not in text
    state = run_state(tmp_path / "out")
    assert state["status"] == "failed" and state["last_good_checkpoint"].endswith("checkpoint-2")


@pytest.fixture(scope="module")
def calm(cpu, world, tmp_path_factory):
    output = tmp_path_factory.mktemp("calm")
    assert train(world.config(output, **QUICK)) == 0
    return output


def test_latest_falls_back_to_the_newest_sound_checkpoint(calm, world, tmp_path, capfd):
    output = tmp_path / "out"
    shutil.copytree(calm, output)
    (output / "pytorch_lora_weights.safetensors").unlink()
    flipped = output / "checkpoint-6" / "optimizer.safetensors"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 4
    flipped.write_bytes(data)
    shutil.rmtree(output / "checkpoint-4")
    (output / "checkpoint-4").mkdir()
    assert train(world.config(output, resume_from_checkpoint="latest", **QUICK)) == 0
    text = capfd.readouterr().err
    assert "checkpoint-6" in text and "optimizer.safetensors" in text and "checkpoint-4" in text
    assert f"Going on from {output / 'checkpoint-2'}" in text
    assert lora_bytes(output) == lora_bytes(calm)
    assert without_time(metrics(output)) == without_time(metrics(calm))
    with pytest.raises(UserError, match="is at step 6, beyond"):
        train(world.config(output, resume_from_checkpoint="latest", **QUICK | {"max_train_steps": 5}))


def test_a_longer_run_goes_on_and_a_finished_one_only_writes_its_file(calm, world, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(calm, output)
    (output / "pytorch_lora_weights.safetensors").unlink()  # killed between the last checkpoint and the end
    path = str(calm / "checkpoint-6")
    assert train(world.config(output, resume_from_checkpoint=path, **QUICK)) == 0
    assert lora_bytes(output) == lora_bytes(calm)
    assert train(world.config(output, resume_from_checkpoint="latest", **QUICK | {"max_train_steps": 8})) == 0
    assert [row["step"] for row in metrics(output)] == list(range(1, 9))


def test_a_failed_save_is_loud_and_the_run_lives(calm, world, tmp_path, capfd, monkeypatch):
    real = checkpoint.save

    def full_at_4(output_dir, step, files):
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(output_dir, step, files)

    monkeypatch.setattr(checkpoint, "save", full_at_4)
    output = tmp_path / "out"
    # the LoRA file cannot be written either: a folder is in its place
    (output / "pytorch_lora_weights.safetensors" / "x").mkdir(parents=True)
    assert train(world.config(output, **QUICK)) == 1
    text = capfd.readouterr().err
    assert "WARNING: checkpoint 4 was not saved" in text and "No space left" in text
    assert "pytorch_lora_weights.safetensors could not be written" in text and "checkpoint-6" in text
    assert {p.name for p in output.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
    assert {"step": 4, "event": "save failed"}.items() <= metrics(output)[4].items()
    kept = checkpoint.load(output / "checkpoint-6").files["pytorch_lora_weights.safetensors"]
    assert load(kept).keys() == load(lora_bytes(calm)).keys()
    assert kept == lora_bytes(calm)


def test_old_checkpoints_go_once_the_new_one_is_safe(calm, world, tmp_path):
    output = tmp_path / "out"
    assert train(world.config(output, checkpoints_total_limit=2, **QUICK)) == 0
    assert {p.name for p in output.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    assert lora_bytes(output) == lora_bytes(calm)
