"""Where a run starts, what it sets aside and what it refuses; no model is loaded here."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from program import command, run, trainer
from safetensors.numpy import save
from world import metrics

from flux_db import releases
from flux_db.data.dataset import read_dataset
from flux_db.demo.pictures import write_demo_pictures
from flux_db.errors import UserError
from flux_db.model.model_folder import fingerprint
from flux_db.report import model_card
from flux_db.run import checkpoint, sample_files
from flux_db.run.checkpoint import DamagedCheckpoint
from flux_db.run.saved_state import lora_steps
from flux_db.run.status import write_status
from flux_db.settings.command_line import to_yaml
from flux_db.settings.resume_rules import FREE
from flux_db.settings.schema import to_flat_dict
from flux_db.stream import Purpose, generator
from flux_db.training.prepare import Alone
from flux_db.training.resume import find_start, take_over
from flux_db.weight_file import to_bytes

LAYER = "single_transformer_blocks.0.attn.to_q"
LORA = "pytorch_lora_weights.safetensors"
BEST = "best_lora.safetensors"


# --- a run that somebody left ------------------------------------------------------------------------------------


class Left:
    """An output folder as a run of the tiny model leaves it, written by hand."""

    def __init__(self, world, output: Path, **changes):
        settings = {"lora_layers": LAYER, "max_train_steps": 8, "checkpointing_steps": 2, "validation_steps": 4}
        settings |= {"validation_prompt": ["a sks dog"], "num_validation_images": 2, "keep_best": True}
        settings |= {"center_crop": True}  # otherwise the crops change with the seed
        settings |= {"validation_data_dir": str(world.folder / "held_out"), "encode_cache_dir": str(output / "cache")}
        self.world, self.output, self.settings = world, output, settings | changes
        self.versions: dict[str, str] = {}
        self.config = world.config(output, **self.settings)
        write_demo_pictures(world.folder / "held_out", count=1, size=48)
        self.dataset, _ = read_dataset(self.config)
        text_parts = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2")
        model = "".join(fingerprint(world.model, p) for p in (("transformer", "vae", "scheduler"), text_parts))
        self.fingerprints = {"model_fingerprint": model, "data_fingerprint": self.dataset.fingerprint()}

    def state(self, step: int, best: int | None = None) -> dict:
        found = None if best is None else {"step": best, "validation_loss": 1 / best, "pictures": "p"}
        return {
            "step": step, "skipped": 0, "skipped_in_row": 0, "loss_scale": None, "world_size": 1, "best": found,
            "config": to_flat_dict(self.config), "fingerprints": self.fingerprints, "versions": self.versions,
        }  # fmt: skip

    def files(self, step: int, best: int | None = None) -> dict[str, bytes]:
        """Of a sound checkpoint; with the best LoRA of a step in it."""
        vector = np.full(4 * 32 * 2, step, np.float32)
        scalars = dict.fromkeys(("updates", "bias_correction1", "bias_correction2"), np.float32(0.5))
        moments = {"exp_avg": vector, "exp_avg_sq": vector, **{n: np.array(v) for n, v in scalars.items()}}
        files = {LORA: lora(step), "optimizer.safetensors": save(moments)}
        files["state.json"] = json.dumps(self.state(step, best)).encode()
        return files if best is None else files | {BEST: lora(best)}

    def write(self, steps: int = 8, *, checkpoints=(2, 4, 6, 8), rounds=(0, 4, 8), ended=True) -> "Left":
        for step in checkpoints:
            checkpoint.save(self.output, step, self.files(step, 4 if step > 4 else None))
        rows = [row for step in range(steps + 1) for row in self.rows(step, step in rounds)]
        self.output.mkdir(exist_ok=True)
        (self.output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step in rounds:
            draw_round(self.output, step)
        (self.output / "samples" / "grid.png").write_bytes(b"all rounds")
        (self.output / BEST).write_bytes(lora(max(rounds)))
        (self.output / "config.yaml").write_text(to_yaml(self.config))
        write_status(self.output, "finished" if ended else "running", step=steps, last_good_checkpoint=None)
        (self.output / "report.html").write_text("report")
        (self.output / "report").mkdir()
        (self.output / "report" / "training_pictures.json").write_text("{}")
        for name in ("cache/latent", "logs/events", "contact_sheet.png", "pictures.csv", "notes.txt"):
            (self.output / name).parent.mkdir(exist_ok=True)
            (self.output / name).write_text(name)
        if ended:
            (self.output / LORA).write_bytes(lora(steps))
            (self.output / "README.md").write_text(f"{model_card.MARK}\nThe LoRA of step {steps}")
        return self

    def rows(self, step: int, has_round: bool) -> list[dict]:
        rows = [{"step": step, "loss": 1.0, "lr": 1e-4}] if step else []
        line = {"step": step, "event": "validation", "validation_loss": 1 / (step or 1), "best": step > 0}
        return [*rows, {**line, "pictures": "p", "samples": 2}] if has_round else rows

    def start(self, resume=None, devices=1, **changes):
        self.config = self.world.config(self.output, **self.settings, resume_from_checkpoint=resume, **changes)
        return find_start(self.config, self.dataset, self.fingerprints, devices)

    def go_on(self, resume=None, *, round_due=False, **changes):
        self.output.mkdir(exist_ok=True)
        start = self.start(resume, **changes)
        return take_over(self.config, start, round_due=round_due)


def lora(steps: int) -> bytes:
    tensors = {"lora_A": np.full((4, 32), steps, np.float32), "lora_B": np.zeros((32, 4), np.float32)}
    return to_bytes({f"transformer.{LAYER}.{n}.weight": v for n, v in tensors.items()}, {"steps": str(steps)})


def draw_round(output: Path, step: int, count: int = 2) -> None:
    folder = sample_files.round_folder(output, step)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture = Image.new("RGB", (16, 16), (step, number, 0))
        sample_files.write(folder / f"{number:02d}.png", picture, prompt="a dog", number=number, seed=1)


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps_of(output: Path) -> list[int]:
    return [row["step"] for row in metrics(output) if "loss" in row]


def numbers(output: Path) -> list[int]:
    return [step for step, _ in checkpoint.numbered(output)]


@pytest.fixture
def left(world, tmp_path):
    return Left(world, tmp_path / "out")


STAYS = ("cache/", "logs/", "contact_sheet.png", "pictures.csv", "notes.txt")


# --- a fresh run -------------------------------------------------------------------------------------------------


def test_a_fresh_run_sets_the_whole_earlier_run_aside_and_deletes_nothing(left, capfd):
    before = tree(left.write().output)
    assert left.go_on().checkpoint is None
    after = tree(left.output)
    for name, content in before.items():
        assert after[name if name.startswith(STAYS) else f"earlier-1/{name}"] == content, name
    assert after.keys() - before.keys() == {f"earlier-1/{n}" for n in before if not n.startswith(STAYS)}
    assert (after["metrics.jsonl"], numbers(left.output)) == (b"", [])
    assert f"Set aside: an earlier run is now in {left.output / 'earlier-1'}" in capfd.readouterr().err
    left.go_on()
    assert not (left.output / "earlier-2").exists(), "a folder that was only begun is no run"
    left.write(checkpoints=(2,), rounds=(0,), ended=False)
    left.go_on()
    assert numbers(left.output / "earlier-2") == [2]


@pytest.mark.parametrize("name", ["metrics.jsonl", BEST, LORA, "samples/step-00000/00.png"])
def test_an_earlier_run_without_checkpoints_is_set_aside_too(left, name):
    (left.output / name).parent.mkdir(parents=True)
    (left.output / name).write_bytes(b"one of them")
    (left.output / "config.yaml").write_text("rank: 3")
    left.go_on()
    assert tree(left.output / "earlier-1") == {name: b"one of them", "config.yaml": b"rank: 3"}


def test_what_is_not_the_runs_own_stays(left):
    left.output.mkdir(exist_ok=True)
    others = {"README.md": "my own words", "config.yaml": "rank: 3", "checkpoint-7/optimizer.bin": "of another program"}
    others |= {"samples/mine.png": "a picture", "report/mine.txt": "a report"}
    for name, text in others.items():
        (left.output / name).parent.mkdir(exist_ok=True)
        (left.output / name).write_text(text)
    left.go_on()
    assert not (left.output / "earlier-1").exists()
    (left.output / "metrics.jsonl").write_text('{"step": 1}\n')
    left.go_on()
    assert tree(left.output).keys() == {*others, "metrics.jsonl", "earlier-1/metrics.jsonl", "earlier-1/config.yaml"}
    assert (left.output / "README.md").read_text() == "my own words"


# --- a branch ----------------------------------------------------------------------------------------------------


def test_a_branch_from_an_older_checkpoint_leaves_the_old_one_whole_and_out_of_the_way(left, capfd):
    before = tree(left.write().output)
    ground = left.go_on(str(left.output / "checkpoint-4"))
    assert ground.checkpoint == left.output / "checkpoint-4"
    assert numbers(left.output) == [2, 4] and checkpoint.find_latest(left.output)[0].step == 4
    assert steps_of(left.output) == [1, 2, 3, 4] and ground.round["step"] == 4, "its round is complete"
    assert [r.step for r in sample_files.read_rounds(left.output)] == [0, 4]
    with Image.open(left.output / "samples" / "grid.png") as grid:
        assert grid.size[1] > 40, "drawn again from the rounds that are left"
    assert not (left.output / LORA).exists() and not (left.output / "README.md").exists()
    aside = tree(left.output / "earlier-1")
    moved = [n for n in before if n.startswith(("checkpoint-6", "checkpoint-8", "samples/step-00008", LORA, BEST))]
    for name in [*moved, "metrics.jsonl", "config.yaml", "README.md", "report.html"]:
        assert aside[name] == before[name], name
    text = capfd.readouterr().err
    assert f"Set aside: what lay beyond step 4 is now in {left.output / 'earlier-1'}" in text
    # pruning counts the new branch alone
    checkpoint.save(left.output, 6, left.files(6))
    assert checkpoint.prune(left.output, 2) == [left.output / "checkpoint-2"]


@pytest.mark.parametrize("version", ["2.6.0", releases.installed(), None])
def test_a_checkpoint_of_another_mindspore_goes_on_with_a_note_that_names_both(left, version, capfd):
    left.versions = {"mindspore": version} if version else {}
    left.write().go_on("latest")
    note = f"note: checkpoint-8 was saved with MindSpore {version}, and goes on with {releases.installed()}"
    assert (note in capfd.readouterr().err) == (version == "2.6.0")


def test_the_best_of_a_branch_is_the_one_its_checkpoint_knew(left):
    left.write(steps=9, rounds=(0, 4, 8))
    assert lora_steps(left.output / BEST) == 8
    left.go_on(str(left.output / "checkpoint-6"))
    assert lora_steps(left.output / BEST) == 4
    assert lora_steps(left.output / "earlier-1" / BEST) == 8
    left.go_on(str(left.output / "checkpoint-2"))
    assert not (left.output / BEST).exists(), "at step 2 there was none yet"


def test_a_damaged_checkpoint_beyond_the_start_is_set_aside(left, capfd):
    left.write(ended=False)
    (left.output / "checkpoint-8" / "manifest.json").write_text("{")
    (left.output / "checkpoint-6" / LORA).write_bytes(b"")
    left.go_on("latest")
    text = capfd.readouterr().err
    assert "skipped checkpoint-8" in text and "skipped checkpoint-6" in text and "Going on from" in text
    assert numbers(left.output) == [2, 4] and numbers(left.output / "earlier-1") == [6, 8]


def test_the_end_of_a_killed_run_is_made_again_and_not_set_aside(left):
    left.write(checkpoints=(2, 4, 6), ended=False)
    left.go_on("latest")
    assert steps_of(left.output) == [1, 2, 3, 4, 5, 6] and not (left.output / "earlier-1").exists()
    assert [r.step for r in sample_files.read_rounds(left.output)] == [0, 4]
    assert lora_steps(left.output / BEST) == 4, "the one of step 8 will come again"


@pytest.mark.parametrize("change", [{"learning_rate": 1.0, "allow_changed": "learning_rate"}, {"validation_seed": 7}])
def test_with_other_settings_it_would_not_come_again_and_is_set_aside(left, change):
    left.write(checkpoints=(2, 4, 6), ended=False)
    whole = (left.output / "metrics.jsonl").read_bytes()
    left.go_on("latest", **change)
    aside = tree(left.output / "earlier-1")
    assert aside["metrics.jsonl"] == whole and "samples/step-00008/01.png" in aside and BEST in aside
    assert steps_of(left.output) == [1, 2, 3, 4, 5, 6]


def test_killed_before_the_first_checkpoint(left, capfd):
    left.write(steps=1, checkpoints=(), rounds=(0,), ended=False)
    assert left.go_on("latest", round_due=True).round["step"] == 0, "the first round need not be drawn again"
    assert "No checkpoint" in capfd.readouterr().err
    assert not (left.output / "earlier-1").exists() and steps_of(left.output) == []
    (left.output / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    left.go_on("latest", seed=7)
    assert steps_of(left.output / "earlier-1") == [1], "another seed would not make it again"


def test_latest_refuses_if_no_checkpoint_is_sound(left):
    left.write(checkpoints=(2, 4))
    for step in (2, 4):
        (left.output / f"checkpoint-{step}" / "state.json").unlink()
    before = tree(left.output)
    with pytest.raises(UserError, match=r"no checkpoint in .* is sound") as caught:
        left.go_on("latest")
    assert "checkpoint-2/state.json: is missing" in str(caught.value)
    assert tree(left.output) == before


# --- a checkpoint from elsewhere ---------------------------------------------------------------------------------


def test_back_to_a_branch_that_was_set_aside(left):
    left.write()
    left.go_on(str(left.output / "checkpoint-4"))
    # the new branch goes on to a step 6 of its own
    checkpoint.save(left.output, 6, left.files(6) | {LORA: lora(66)})
    ground = left.go_on(str(left.output / "earlier-1" / "checkpoint-8"))
    assert ground.checkpoint == left.output / "checkpoint-8"
    assert numbers(left.output) == [8] and numbers(left.output / "earlier-2") == [2, 4, 6]
    assert checkpoint.load(left.output / "checkpoint-8").files[LORA] == lora(8)
    assert steps_of(left.output) == list(range(1, 9)), "its own past came with it"
    assert lora_steps(left.output / "earlier-2" / "checkpoint-6" / LORA) == 66
    left.go_on("latest")
    assert numbers(left.output) == [8], "latest speaks of it from now on"


def test_from_another_folder_into_a_new_one(left, world, tmp_path):
    left.write(ended=False)
    other = Left(world, tmp_path / "other", encode_cache_dir=left.settings["encode_cache_dir"])
    before = tree(left.output)
    moved = shutil.copytree(left.output / "checkpoint-6", tmp_path / "the good one")
    ground = other.go_on(str(moved))
    assert ground.checkpoint == other.output / "checkpoint-6" and numbers(other.output) == [6]
    assert steps_of(other.output) == [] and lora_steps(other.output / BEST) == 4
    other.go_on(str(left.output / "checkpoint-6"))
    assert not (other.output / "earlier-1").exists(), "it is the same checkpoint"
    assert tree(left.output) == before


# --- the validation round of the start step ----------------------------------------------------------------------


def cut_line(output):
    path = output / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])


def old_version(output):
    path = output / "metrics.jsonl"
    path.write_text(path.read_text().replace(', "samples": 2', ""))


@pytest.mark.parametrize(
    ("harm", "complete"),
    [
        (lambda output: None, True),
        (old_version, True),
        (lambda output: (output / "samples/step-00004/01.png").unlink(), False),
        (lambda output: (old_version(output), (output / "samples/step-00004/01.png").unlink()), False),
        (lambda output: shutil.rmtree(output / "samples"), False),
        (cut_line, False),
    ],
    ids=["complete", "of an older version", "a picture less", "older, a picture less", "no pictures", "no line"],
)
def test_a_round_counts_if_its_last_line_and_all_its_pictures_are_there(left, harm, complete):
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4), ended=False)
    harm(left.output)
    ground = left.go_on("latest", round_due=True)
    assert (ground.round is not None) == complete
    assert (metrics(left.output)[-1].get("event") == "validation") == complete
    assert (left.output / "samples/step-00004").exists() == complete
    assert steps_of(left.output) == [1, 2, 3, 4]


def test_without_a_round_due_nothing_of_it_is_removed(left):
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4), ended=False)
    (left.output / "samples/step-00004/01.png").unlink()
    left.go_on("latest", round_due=False)
    assert (left.output / "samples/step-00004/00.png").exists()
    assert metrics(left.output)[-1]["event"] == "validation"


def test_unfinished_files_of_a_dead_run_are_cleared_below_the_folder_too(left):
    left.write(ended=False)
    for name in ("samples", "samples/step-00004", "report"):
        (left.output / name / ".tmp-flux_db-new-1-aa").write_text("half")
    left.go_on("latest")
    assert not list(left.output.rglob(".tmp-*"))


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"learning_rate": 0.5}, ["learning_rate: 0.001 in the checkpoint, 0.5 now", "--allow_changed learning_rate"]),
        ({"rank": 8, "seed": 7}, ["--rank: the weights in", "of rank 4", "--allow_changed seed"]),
        ({"rank": 8, "allow_changed": "rank"}, ["--rank: the weights in", "do not fit"]),
        ({"lora_layers": "attn.to_k", "allow_changed": "lora_layers"}, ["--lora_layers: ", f"weights for {LAYER} too"]),
        ({"lora_layers": f"{LAYER},attn.to_k", "allow_changed": "lora_layers"}, ["has no weights for attn.to_k"]),
        ({"max_train_steps": 3, "allow_changed": "max_train_steps"}, ["is at step 4, beyond this run's 3 steps"]),
    ],
    ids=str,
)
def test_a_refused_resume_changes_and_encodes_nothing(left, change, messages):
    """Through the stage that prepares, which the launcher of several devices runs first; it needs no MindSpore."""
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4), ended=False)
    before = tree(left.output)
    settings = left.world.settings(left.output, **left.settings | {"resume_from_checkpoint": "latest"} | change)
    done = run(command("prepare", *trainer(settings)[2:]))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    for message in messages:
        assert message in done.stderr, done.stderr
    if "rank" in change or "lora_layers" in change:
        assert "--allow_changed rank" not in done.stderr
    after = tree(left.output)
    assert after.pop(".lock") == b"" and after == before
    checked = run(command("check", *trainer(settings)[2:]))
    assert checked.returncode == 2 and "can start" not in checked.stdout, checked.stdout
    assert checked.stderr == done.stderr


def test_check_lets_a_resume_that_fits_pass(left):
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4), ended=False)
    settings = left.world.settings(left.output, **left.settings | {"resume_from_checkpoint": "latest"})
    checked = run(command("check", *trainer(settings)[2:]))
    assert (checked.returncode, checked.stderr) == (0, "") and "the run can start" in checked.stdout, checked.stderr


def test_the_trainer_refuses_before_it_writes_and_encodes(left):
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4), ended=False)
    before = tree(left.output)
    changed = {"resume_from_checkpoint": "latest", "instance_prompt": "another"}
    done = run(trainer(left.world.settings(left.output, **left.settings | changed)))
    assert done.returncode == 2 and "instance_prompt: 'a photo of sks dog' in the checkpoint" in done.stderr
    assert "Encoding" not in done.stderr and "Loading" not in done.stderr and "Traceback" not in done.stderr
    after = tree(left.output)
    assert after.pop(".lock") == b"" and after == before


def test_the_number_of_cards_counts_as_far_as_it_is_known(left, monkeypatch):
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4))
    assert left.start("latest", devices=Alone().devices).repeats
    monkeypatch.setenv("MS_WORKER_NUM", "2")  # as the launcher does
    with pytest.raises(UserError, match="these change the result"):
        left.start("latest", devices=Alone().devices)


def test_data_is_compared_once_it_is_complete(left):
    """Class pictures that are still to be drawn come into the fingerprint later."""
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4))
    left.fingerprints = {"model_fingerprint": left.fingerprints["model_fingerprint"]}
    assert left.start("latest").saved.progress.step == 4
    left.fingerprints |= {"data_fingerprint": "other pictures"}
    with pytest.raises(UserError, match="instance_data_dir"):
        left.start("latest")


def test_every_setting_that_binds_is_compared_on_resume(left):
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4))
    assert "adam_beta1" not in FREE
    with pytest.raises(UserError, match="adam_beta1"):
        left.start("latest", adam_beta1=0.5)


# --- sealed, and yet nothing to train on -------------------------------------------------------------------------


def state(**changes):
    return lambda left: {"state.json": json.dumps(left.state(4) | changes).encode()}


def without(name):
    return lambda left: {"state.json": json.dumps({k: v for k, v in left.state(4).items() if k != name}).encode()}


def settings(**changes):
    return lambda left: state(config=left.state(4)["config"] | changes)(left)


def optimizer(**tensors):
    return lambda left: {"optimizer.safetensors": save(tensors)}


def with_lora(value, dtype=np.float32):
    return lambda left: {LORA: to_bytes({f"transformer.{LAYER}.lora_A.weight": np.full((4, 32), value, dtype)}, {})}


def raw(name, data):
    return lambda left: {name: data}


HOSTILE = {
    "no JSON": (raw("state.json", b"\xff\xfe{"), "state.json: is not JSON"),
    "deep JSON": (raw("state.json", b"[" * 10**6), "state.json: is not JSON"),
    "deep settings": (settings(rank=json.loads("[" * 900 + "]" * 900)), "state.json: config has a value"),
    "a list": (raw("state.json", b"[1]"), "state.json: holds no JSON object"),
    "no step": (without("step"), "state.json: step is missing"),
    "no config": (without("config"), "state.json: config is missing"),
    "no fingerprints": (without("fingerprints"), "state.json: fingerprints is missing"),
    "a step of text": (state(step="4"), "state.json: step has a value"),
    "a step below zero": (state(step=-4), "state.json: step has a value"),
    "another step": (state(step=10**30), "state.json: step has a value"),
    "a step that is true": (state(skipped=True), "state.json: skipped has a value"),
    "more skipped than done": (state(skipped=5), "state.json: skipped has a value"),
    "settings as a list": (state(config=[1]), "state.json: config has a value"),
    "concepts of no sense": (settings(concepts=[{"dir": {"a": 1}}]), "state.json: config has a value"),
    "concepts with another key": (settings(concepts=[{"other": 1}]), "state.json: config has a value"),
    "a batch of text": (settings(train_batch_size="x"), "state.json: config has a value"),
    "no batch": (settings(gradient_accumulation_steps=None), "state.json: config has a value"),
    "fingerprints as numbers": (state(fingerprints={"data_fingerprint": 3}), "state.json: fingerprints has a value"),
    "no devices": (state(world_size=0), "state.json: world_size has a value"),
    "countless devices": (state(world_size=10**4000), "state.json: world_size has a value"),
    "a scale without a counter": (state(loss_scale={"value": 2.0}), "state.json: loss_scale has a value"),
    "an endless scale": (state(loss_scale={"value": 1e999, "counter": 0}), "state.json: loss_scale has a value"),
    "a best without a loss": (state(best={"step": 4}), "state.json: best has a value"),
    "a best LoRA of another step": (raw(BEST, lora(3)), f"{BEST}: "),
    "no weights": (raw(LORA, b""), f"{LORA}: is not a safetensors file"),
    "a deep header": (raw(LORA, (10**5).to_bytes(8, "little") + b"[" * 10**5), f"{LORA}: is not a safetensors file"),
    "NaN weights": (with_lora(np.nan), f"{LORA}: transformer.{LAYER}.lora_A.weight holds values that are not finite"),
    "weights of another type": (with_lora(1, np.float64), "lora_A.weight is of type float64, not float32"),
    "weights of no known type": (raw(LORA, save({"x": np.zeros(2, np.float16)}).replace(b"F16", b"F12")), LORA),
    "Inf moments": (optimizer(exp_avg=np.array([np.inf], np.float32)), "optimizer.safetensors: exp_avg holds values"),
    "negative squares": (optimizer(exp_avg_sq=np.array([-1], np.float32)), "exp_avg_sq holds values below zero"),
    "moments as numbers": (optimizer(exp_avg=np.zeros(3, np.int64)), "optimizer.safetensors: exp_avg is of type int64"),
}  # fmt: skip


@pytest.mark.parametrize(("hostile", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_sealed_checkpoint_without_sense_is_refused_by_file_and_latest_passes_over_it(left, hostile, message, capfd):
    for step in (2, 4):
        checkpoint.save(left.output, step, left.files(step))
    checkpoint.save(left.output, 4, left.files(4) | hostile(left))
    assert checkpoint.load(left.output / "checkpoint-4").step == 4, "its seal is right"
    with pytest.raises(DamagedCheckpoint) as caught:
        left.start(str(left.output / "checkpoint-4"))
    assert str(caught.value).startswith(str(left.output / "checkpoint-4")) and message in str(caught.value)
    assert left.start("latest").saved.progress.step == 2
    said = capfd.readouterr().err
    assert "warning: skipped checkpoint-4: " in said and message in said


@pytest.mark.parametrize("name", [LORA, "optimizer.safetensors", "state.json"])
def test_a_sealed_checkpoint_must_hold_all_of_a_run(left, name):
    checkpoint.save(left.output, 4, {n: data for n, data in left.files(4).items() if n != name})
    with pytest.raises(DamagedCheckpoint, match=f"{name}: is missing"):
        left.start(str(left.output / "checkpoint-4"))


MANIFESTS = {
    "a path": {"files": {"../x": {"size": 0, "sha256": ""}}},
    "an absolute path": {"files": {"/etc/passwd": {"size": 0, "sha256": ""}}},
    "a giant file": {"files": {"x": {"size": 10**15, "sha256": ""}}},
    "a size below zero": {"files": {"x": {"size": -1, "sha256": ""}}},
    "a size of text": {"files": {"x": {"size": "1", "sha256": ""}}},
    "a digest that is none": {"files": {"x": {"size": 1, "sha256": []}}},
    "a step below zero": {"step": -1},
    "a step that is true": {"step": True},
    "a deep tool": {"tool": json.loads("[" * 500 + "]" * 500)},
    "something more": {"more": 1},
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_sealed_manifest_without_sense_is_refused(left, change):
    path = checkpoint.save(left.output, 4, left.files(4)).rename(left.output / "mine") / "manifest.json"
    path.write_bytes(checkpoint._seal(json.loads(path.read_bytes()) | change))
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json: its content is not what was written"):
        left.start(str(left.output / "mine"))


@pytest.mark.parametrize("name", ["manifest.json", "state.json", LORA])
def test_a_pipe_or_a_device_in_a_checkpoint_is_refused_at_once(left, name):
    folder = checkpoint.save(left.output, 4, left.files(4))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(DamagedCheckpoint, match=f"{name}: cannot be read: is a pipe, not a file"):
        left.start(str(folder))
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(DamagedCheckpoint, match=f"{name}: cannot be read: is a device, not a file"):
        left.start(str(folder))


def test_hostile_checkpoints_end_the_program_in_one_line(left):
    left.write(steps=4, checkpoints=(2,), rounds=(0,), ended=False)
    checkpoint.save(left.output, 4, left.files(4) | state(step=-4, config={"rank": "\x1b[2J"})(left))
    os.mkfifo(checkpoint.save(left.output, 6, left.files(6)) / "pipe")
    for step, message in ((4, "state.json: step has a value that no run writes"), (6, "is at step 6, beyond")):
        path = str(left.output / f"checkpoint-{step}")
        changed = {"resume_from_checkpoint": path, "max_train_steps": 5}
        flags = trainer(left.world.settings(left.output, **left.settings | changed))[2:]
        done = run(command("prepare", *flags), timeout=60)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert message in done.stderr


@pytest.mark.parametrize(
    "line", ["[" * 10**5, '{"step": "x"}', "[1]", '{"step": 1e999}', "\\ud800", '{"step": 4, "event": "valid', "null"]
)
def test_lines_of_the_metrics_that_make_no_sense_are_left_out(left, line):
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4), ended=False)
    with (left.output / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    left.go_on("latest")
    assert steps_of(left.output) == [1, 2, 3, 4]


def test_metrics_that_are_a_pipe_are_refused(left):
    left.write(steps=4, checkpoints=(2, 4), rounds=(0, 4), ended=False)
    (left.output / "metrics.jsonl").unlink()
    os.mkfifo(left.output / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be read: is a pipe, not a file"):
        left.go_on("latest")


# --- noise -------------------------------------------------------------------------------------------------------


def test_class_pictures_have_noise_of_their_own_and_samples_keep_theirs():
    sample, classes = (generator(42, 0, p).standard_normal(4) for p in (Purpose.SAMPLE, Purpose.CLASS_PICTURE))
    assert not np.isclose(sample, classes).any()
    # as of the first version: `generate` draws the samples of old runs again
    np.testing.assert_allclose(sample, [0.87685057, 0.72871792, 1.312357, 0.51246206], rtol=1e-6)
