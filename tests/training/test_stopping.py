"""Runs that stop in time: when nothing gets better, and when the time is up."""

import json
import shutil
import signal
from pathlib import Path
from typing import ClassVar

import pytest
from world import lora_bytes, metrics, train, without_time

from flux_db.check.values import check_values
from flux_db.demo.pictures import write_demo_pictures
from flux_db.interrupt import StopRequest
from flux_db.output_folder import BEST_LORA, LORA_FILE
from flux_db.run.saved_state import Best, Waiting, lora_steps
from flux_db.settings.schema import from_flat_dict
from flux_db.training.early_stop import after_line, after_round
from flux_db.training.sample_rounds import Rounds
from flux_db.training.validation import Validation
from flux_db.training.validation_loss import HeldOut

# --- counting ----------------------------------------------------------------------------------------------------


def test_rounds_count_until_a_better_one():
    waiting = Waiting()
    for step, is_better in ((2, True), (4, False), (6, False), (8, True), (10, False)):
        waiting = after_round(waiting, step, is_better=is_better)
    assert waiting == Waiting(1, 10)


def test_the_line_of_a_round_counts_once_and_only_with_a_value():
    line = {"step": 6, "validation_loss": 0.5, "best": False, "score": 0.1, "best_score": True}
    assert after_line(Waiting(1, 4), line, "loss") == Waiting(2, 6)
    assert after_line(Waiting(1, 4), line, "score") == Waiting(0, 6)
    assert after_line(Waiting(2, 6), line, "loss") == Waiting(2, 6), "the checkpoint was saved after the round"
    assert after_line(Waiting(1, 4), {"step": 6, "validation_loss": None, "best": False}, "loss") == Waiting(1, 4)
    assert after_line(Waiting(1, 4), None, "loss") == Waiting(1, 4)


def settings(tmp_path, **changes):
    values = {"pretrained_model_name_or_path": "m", "instance_data_dir": "d", "instance_prompt": "dog"}
    return from_flat_dict(values | {"output_dir": str(tmp_path), "report_to": ["none"]} | changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"early_stop_patience": 2},
            "--early_stop_patience 2: needs --keep_best loss or --keep_best score, which says what is watched and"
            " keeps the best LoRA",
        ),
        (
            {"early_stop_patience": 0, "keep_best": "loss", "validation_share": 0.1},
            "--early_stop_patience 0: must be from 1 to 1000000000",
        ),
        ({"max_train_minutes": 0.0}, "--max_train_minutes 0.0: must be above 0, up to 1000000"),
    ],
)
def test_what_is_refused(tmp_path, changes, problem):
    assert check_values(settings(tmp_path, **changes)) == [problem]


class Log:
    """Takes everything."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Ranks:
    """Rank 0 or 1 of two; `others` is what the other one gives to the sum."""

    def __init__(self, rank, others=0.0):
        self.is_main, self.others = rank == 0, others

    def sum(self, values):
        return values + self.others


class Losses:
    """Validation losses as they are told."""

    fingerprint = "x"
    by_concept: ClassVar[dict[str, float]] = {}

    def __init__(self, *values):
        self.values = list(values)

    def measure(self):
        return self.values.pop(0)


def validation(tmp_path, runtime, losses, patience=2):
    config = settings(tmp_path, keep_best="loss", validation_share=0.1, early_stop_patience=patience)
    rounds = Rounds(every=2, score_every=None, total_steps=100)
    return Validation(config, runtime, Log(), None, losses, lambda *_: None, rounds=rounds)


def test_patience_ends_with_so_many_worse_rounds_and_failed_ones_do_not_count(tmp_path):
    made = validation(tmp_path, Ranks(0), Losses(0.1, 0.5, 0.6, float("nan"), 0.4, 0.4, 0.7))
    over = []
    for step in range(0, 14, 2):
        made.run(step, is_trained=step > 0)
        over.append(made.is_over)
    assert over == [False] * 6 + [True], "the untrained LoRA is no best one, an equal loss no better one"
    assert made.best == Best(8, 0.4, "x") and made.waiting == Waiting(2, 12)
    assert made.why_over() == (
        "no lower validation loss in 2 validation rounds (--early_stop_patience); the best LoRA is that of step 8"
    )


def test_the_other_ranks_learn_it_from_the_first(tmp_path):
    for others in (0.0, 1.0):
        made = validation(tmp_path, Ranks(1, others), Losses(0.5))
        made.run(2, is_trained=True)
        assert made.is_over == bool(others)


# --- whole runs --------------------------------------------------------------------------------------------------

LOSSES = {0: 0.9, 2: 0.5, 4: 0.4, 6: 0.6, 8: 0.7, 10: 0.3, 12: 0.2}


@pytest.fixture
def watched(world, tmp_path, monkeypatch):
    """Settings of a run whose validation losses are those above."""
    held_out = world.folder / "held_out"
    write_demo_pictures(held_out, count=1, size=48)
    steps = []
    right_run = Validation.run

    def run(self, step, *, is_trained):
        steps.append(step)
        right_run(self, step, is_trained=is_trained)

    monkeypatch.setattr(Validation, "run", run)
    monkeypatch.setattr(HeldOut, "measure", lambda self: LOSSES[steps[-1]])
    return {
        "validation_data_dir": str(held_out), "validation_steps": 2, "keep_best": "loss", "max_train_steps": 12,
        "checkpointing_steps": 5, "early_stop_patience": 2,
    }  # fmt: skip


def status(output):
    return json.loads((output / "train_state.json").read_text())


def rows(output):
    return without_time(metrics(output))


def test_a_run_stops_early_and_a_resume_goes_on_exactly(cpu, world, watched, tmp_path, capfd):
    output = tmp_path / "run"
    assert train(world.config(output, **watched)) == 0
    state = status(output)
    assert (state["status"], state["step"]) == ("finished", 8)
    assert Path(state["last_good_checkpoint"]).name == "checkpoint-8"
    text = "stopped early at step 8 of 12: no lower validation loss in 2 validation rounds (--early_stop_patience); "
    assert state["message"].startswith(text) and text in capfd.readouterr().err
    assert "stopped early at step 8" in (output / "report.html").read_text()
    assert lora_steps(output / BEST_LORA) == 4 and lora_steps(output / LORA_FILE) == 8

    # the same again: it has ended
    assert train(world.config(output, **watched, resume_from_checkpoint="latest")) == 0
    assert status(output)["step"] == 8 and status(output)["message"] == state["message"]

    # killed in between: from the checkpoint before the rounds that were counted
    again = tmp_path / "again"
    shutil.copytree(output, again)
    start = str(again / "checkpoint-5")
    assert train(world.config(again, **watched, resume_from_checkpoint=start)) == 0
    assert status(again)["step"] == 8 and rows(again) == rows(output) and lora_bytes(again) == lora_bytes(output)

    # with more patience it goes on as if it had had that from the start
    more = watched | {"early_stop_patience": 3}
    assert train(world.config(output, **more, resume_from_checkpoint="latest")) == 0
    assert train(world.config(tmp_path / "whole", **more)) == 0
    assert status(output)["step"] == 12 and status(output)["message"] is None
    assert lora_bytes(output) == lora_bytes(tmp_path / "whole") and rows(output) == rows(tmp_path / "whole")
    assert (output / BEST_LORA).read_bytes() == (tmp_path / "whole" / BEST_LORA).read_bytes()


def test_time_that_is_up_ends_with_a_checkpoint_and_a_resume_goes_on_exactly(cpu, world, tmp_path, capfd):
    plain = {"max_train_steps": 3, "gradient_accumulation_steps": 2}
    assert train(world.config(tmp_path / "whole", **plain)) == 0
    output, seen = tmp_path / "run", []
    for _ in range(4):
        config = world.config(output, **plain, max_train_minutes=1e-9, resume_from_checkpoint="latest")
        assert train(config) == 0
        seen.append((status(output)["status"], status(output)["step"], status(output)["message"]))
        if seen[-1][0] == "finished":
            break
        assert not (output / LORA_FILE).exists() and not (output / "README.md").exists(), "it is not complete"
    reason = "stopped by --max_train_minutes 1e-09 after step"
    assert seen == [
        ("interrupted", 1, f"{reason} 1"),
        ("interrupted", 2, f"{reason} 2"),
        ("finished", 3, None),
    ]
    text = capfd.readouterr().err
    assert "Stopped by --max_train_minutes 1e-09 after step 1; saved as" in text
    assert lora_bytes(output) == lora_bytes(tmp_path / "whole") and rows(output) == rows(tmp_path / "whole")


def test_a_signal_keeps_its_exit_code_when_the_time_is_up_too(cpu, world, tmp_path):
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    config = world.config(tmp_path / "run", max_train_steps=3, max_train_minutes=1e-9)
    assert train(config, stop) == 128 + signal.SIGTERM
    assert status(tmp_path / "run")["message"] is None
