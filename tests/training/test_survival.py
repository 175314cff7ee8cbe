"""Runs that meet trouble: bad gradients, damaged checkpoints, a disk that refuses, a signal in a validation round."""

import dataclasses
import errno
import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, save
from world import lora_bytes, metrics, train, without_time

from flux_db.data.dataset import read_dataset
from flux_db.data.encode_cache import open_cache
from flux_db.demo.pictures import write_demo_pictures
from flux_db.errors import UserError
from flux_db.interrupt import StopRequest
from flux_db.model.runtime import Runtime
from flux_db.run import checkpoint
from flux_db.training.checkpoints import Checkpoints
from flux_db.training.loop import Loop

# LoRA in one layer only: the step compiles in seconds
QUICK = {"lora_layers": "single_transformer_blocks.0.attn.to_q", "max_train_steps": 6, "checkpointing_steps": 2}


def run_state(output):
    return json.loads((output / "train_state.json").read_text())


def spoil(world, config, count, held_out=False):
    """Put NaN into the stored latents of the first pictures: bad data, not a mocked step."""
    cache = open_cache(config, world.model)
    dataset, _ = read_dataset(config)
    for sample in (dataset.held_out if held_out else dataset.examples)[:count]:
        path = cache.picture_file(sample, False)
        moments = cache.read(path)["moments"].copy()
        moments[0, 0, 0] = np.nan
        cache.write(path, {"moments": moments})


@pytest.fixture
def spoiled(cpu, world, tmp_path):
    """A config with a cache of its own, filled."""
    return with_own_cache(cpu, world, tmp_path, max_skipped_steps=3)


def with_own_cache(cpu, world, tmp_path, **changes):
    from flux_db.training.prepare import prepare

    shutil.copytree(world.folder / "cache", tmp_path / "cache", dirs_exist_ok=True)
    config = world.config(tmp_path / "out", encode_cache_dir=str(tmp_path / "cache"), **QUICK | changes)
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


def test_a_run_that_learned_nothing_is_a_failure_and_claims_no_lora(calm, cpu, world, held_out, tmp_path, capfd):
    """Fewer steps than --max_skipped_steps, all of them skipped; the untrained LoRA has a fine validation loss."""
    watched = {"validation_data_dir": held_out, "keep_best": True, "validation_steps": 2}
    config = with_own_cache(cpu, world, tmp_path, max_train_steps=3, **watched)
    spoil(world, config, count=3)
    assert train(config) == 1
    printed = capfd.readouterr()
    assert "all 3 steps had gradients that are not finite" in printed.err and "Done." not in printed.err
    assert "Traceback" not in printed.err and printed.out == ""
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert run_state(tmp_path / "out")["status"] == "failed"
    losses = [row for row in metrics(tmp_path / "out") if row.get("event") == "validation"]
    assert len(losses) == 3 and all(row["validation_loss"] > 0 and not row["best"] for row in losses)


def test_a_run_without_any_gradient_is_a_failure_and_stops_soon(cpu, world, tmp_path, capfd):
    """All masks are black, and what they cover counts nothing."""
    (tmp_path / "masks").mkdir()
    for picture in world.pictures.glob("*.png"):
        Image.new("L", (64, 64)).save(tmp_path / "masks" / picture.name)
    masks = {"mask_dir": str(tmp_path / "masks"), "unmasked_weight": 0.0}
    config = with_own_cache(cpu, world, tmp_path, **masks, max_train_steps=400, max_skipped_steps=3)
    assert train(config) == 1
    printed = capfd.readouterr()
    assert "all 3 steps had gradients that are exactly zero, so nothing was learned" in printed.err
    assert "masks that are black everywhere" in printed.err and "Done." not in printed.err
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert run_state(tmp_path / "out")["status"] == "failed"


@pytest.fixture(scope="module")
def held_out(world):
    write_demo_pictures(world.folder / "held_out", count=1, size=48)
    return str(world.folder / "held_out")


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


def test_ranks_that_differ_at_the_start_end_the_run(calm, world, tmp_path, capfd, monkeypatch):
    """The comparison over real ranks is in test_launch.py."""
    real = Checkpoints.demand_equal_ranks

    def of_two(self, when):
        self.runtime, one = dataclasses.replace(self.runtime, world_size=2), self.runtime
        try:
            real(self, when)
        finally:
            self.runtime = one

    monkeypatch.setattr(Checkpoints, "demand_equal_ranks", of_two)
    monkeypatch.setattr(Runtime, "differing", lambda *_: ["LoRA weights (rank 1)"])
    assert train(world.config(tmp_path / "out", **QUICK)) == 1
    assert "at the start the devices differ from rank 0 in: LoRA weights (rank 1)" in capfd.readouterr().err
    assert not metrics(tmp_path / "out") and not list((tmp_path / "out").glob("checkpoint-*"))


# --- other settings than the checkpoint's ------------------------------------------------------------------------


def test_another_optimizer_starts_on_the_old_weights(calm, cpu, world, held_out, tmp_path, capfd):
    """And the best LoRA is not named if there is none: the held-out picture's loss is not finite."""
    watched = {"validation_data_dir": held_out, "keep_best": True, "validation_steps": 6}
    changed = {"optimizer": "prodigy", "learning_rate": 1.0, "resume_from_checkpoint": str(calm / "checkpoint-4")}
    with pytest.raises(UserError, match="--allow_changed learning_rate,optimizer"):
        with_own_cache(cpu, world, tmp_path, **watched, **changed)
    changed["allow_changed"] = "optimizer,learning_rate"
    config = with_own_cache(cpu, world, tmp_path, **watched, **changed)
    spoil(world, config, count=1, held_out=True)
    assert train(config) == 0
    printed = capfd.readouterr()
    assert "made with adamw: prodigy starts without its moments, on the weights of step 4" in printed.err
    assert "no validation loss was finite, so there is no best LoRA" in printed.err and "best:" not in printed.out
    assert f"LoRA:       {tmp_path / 'out' / 'pytorch_lora_weights.safetensors'}\n" in printed.out
    assert [row["step"] for row in metrics(tmp_path / "out") if "loss" in row] == [1, 2, 3, 4, 5, 6]
    files = checkpoint.load(tmp_path / "out" / "checkpoint-6").files
    moments = load(files["optimizer.safetensors"])
    before = load(checkpoint.load(calm / "checkpoint-4").files["pytorch_lora_weights.safetensors"])
    assert moments["updates"] == 2
    start = np.concatenate([before[name].reshape(-1) for name in sorted(before)])
    np.testing.assert_array_equal(moments["start"], start)


def reseal(calm, output, **files):
    """A checkpoint with some of its files replaced, and a right seal."""
    sound = checkpoint.load(calm / "checkpoint-4").files
    return str(checkpoint.save(output, 4, sound | {name.replace("__", "."): data for name, data in files.items()}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("optimizer", lambda t: t.pop("exp_avg"), "optimizer.safetensors: is not the state of adamw: exp_avg"),
        ("optimizer", lambda t: t.update(more=t["exp_avg"]), "optimizer.safetensors: is not the state of adamw: more"),
        ("optimizer", lambda t: t.update(exp_avg=t["exp_avg"][1:]), r"optimizer.safetensors: exp_avg is \(255,\), not"),
        (
            "pytorch_lora_weights",
            lambda t: t.pop("transformer.single_transformer_blocks.0.attn.to_q.lora_B.weight"),
            r"missing \['transformer.single_transformer_blocks.0.attn.to_q.lora_B.weight'\]",
        ),
        (
            "pytorch_lora_weights",
            lambda t: t.update({name: value[..., :-1].copy() for name, value in t.items() if "lora_A" in name}),
            "pytorch_lora_weights.safetensors: the LoRA weights do not fit: .* is",
        ),
    ],
)
def test_a_sealed_checkpoint_that_does_not_fit_the_model_is_refused(calm, world, tmp_path, name, change, message):
    tensors = load(checkpoint.load(calm / "checkpoint-4").files[f"{name}.safetensors"])
    change(tensors)
    path = reseal(calm, tmp_path / "from", **{f"{name}__safetensors": save(tensors)})
    output = tmp_path / "out"
    output.mkdir()
    (output / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=message):
        train(world.config(output, resume_from_checkpoint=path, **QUICK))
    assert [p.name for p in output.iterdir()] == ["metrics.jsonl"], "nothing is written or moved"


# --- a signal on the step of a validation round ------------------------------------------------------------------


# samples take long to compile: scripts/crash_test.py has them
WATCHED = {
    "validation_steps": 3, "keep_best": True, "report_to": ["tensorboard"], "checkpoints_total_limit": 1,
    "resume_from_checkpoint": "latest",
}  # fmt: skip


def test_a_stop_on_a_validation_step_loses_no_round(calm, world, held_out, tmp_path, monkeypatch):
    """Stopped at step 3 and at the last one, 6; every file must be that of a run that nobody stopped."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    from crash_test import compare

    def trained(place, stop_after=None):
        (tmp_path / place).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / place)  # the same settings in both
        stop, right = StopRequest(), finish

        def stopping(self, pending):
            right(self, pending)
            if pending.step == stop_after:
                stop.signal = signal.SIGTERM

        monkeypatch.setattr(Loop, "_finish", stopping)
        return train(world.config(Path("out"), validation_data_dir=held_out, **QUICK | WATCHED), stop)

    finish = Loop._finish
    assert trained("calm") == 0
    output = tmp_path / "stopped" / "out"
    assert trained("stopped", stop_after=2) == 128 + signal.SIGTERM
    assert run_state(output)["step"] == 3 and [row["step"] for row in metrics(output)] == [0, 1, 2, 3]
    assert trained("stopped", stop_after=5) == 128 + signal.SIGTERM
    assert run_state(output)["step"] == 6 and not (output / "pytorch_lora_weights.safetensors").exists()
    assert trained("stopped") == 0
    rounds = [row["step"] for row in metrics(output) if row.get("event") == "validation"]
    assert rounds == [0, 3, 6] and (output / "best_lora.safetensors").exists()
    assert compare(tmp_path / "calm" / "out", output) == []
