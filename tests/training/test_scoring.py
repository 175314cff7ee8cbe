"""Samples scored while training: rows, best LoRA, resume, failures, ranks, and settings that are refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scoring_models import write_clip, write_dino
from world import lora_bytes, metrics, train, without_time

from flux_db.check.files import check_files
from flux_db.check.values import check_values
from flux_db.data.dataset import read_dataset
from flux_db.errors import UserError
from flux_db.output_folder import BEST_LORA
from flux_db.run.metrics_log import MetricsLog
from flux_db.run.saved_state import BestScore, Waiting, lora_steps, read
from flux_db.settings.command_line import parse_config
from flux_db.settings.schema import from_flat_dict, with_defaults
from flux_db.training.resume import Ground
from flux_db.training.sample_rounds import Rounds
from flux_db.training.scoring import Scoring, demand_scoring, open_scoring
from flux_db.training.validation import Validation
from flux_db.weight_file import open_weights

PROMPTS = ["a photo of sks dog on the beach", "a photo of a dog"]


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    place = tmp_path_factory.mktemp("networks")
    return {"score_dino": str(write_dino(place / "dino")), "score_clip": str(write_clip(place / "clip"))}


SCORED = {
    "validation_prompt": PROMPTS,
    "num_validation_images": 2,
    "validation_inference_steps": 2,
    "validation_steps": 3,
    "score_steps": 2,
    "keep_best": "score",
    "checkpointing_steps": 2,
    "learning_rate": 3e-2,
}


@pytest.fixture(scope="module")
def scored(cpu, world, networks, tmp_path_factory):
    config = world.config(tmp_path_factory.mktemp("run") / "out", **SCORED, **networks, report_to=["tensorboard"])
    assert train(config) == 0
    return config


def output_of(config):
    return Path(config.output.output_dir)


def rounds_of(output):
    return [row for row in metrics(output) if row.get("event") == "validation"]


def scalars(folder):
    """Names of TensorBoard's scalars, by the step: records of length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event  # before MindSpore it would break that

    (file,) = (folder / "logs").iterdir()
    data, place, found = file.read_bytes(), 0, set()
    while place < len(data):
        length = int.from_bytes(data[place : place + 8], "little")
        event = Event.FromString(data[place + 12 : place + 12 + length])
        found |= {(event.step, value.tag) for value in event.summary.value}
        place += length + 16
    return found


def test_rounds_are_scored_and_the_best_lora_is_kept(scored):
    output = output_of(scored)
    rows = rounds_of(output)
    assert [row["step"] for row in rows] == [0, 2, 3, 4], "samples also where only scores are due"
    assert [row["step"] for row in rows if "score" in row] == [0, 2, 4]
    by_step = {row["step"]: row for row in rows}
    for step in (0, 2, 4):
        row = by_step[step]
        assert row["scored_by"] == "dinov2+clip" and len(row["scored_with"]) == 12
        names = ("dino", "clip_i", "clip_t", "pres", "div", "class_change", "nearest_likeness", "nearest", "copies")
        assert all(isinstance(row[f"score_{name}"], float) for name in names)
    assert by_step[0]["score_class_change"] == pytest.approx(0, abs=1e-9)
    best = max((by_step[step] for step in (2, 4)), key=lambda row: row["score"])
    assert [step for step in (0, 2, 4) if by_step[step]["best_score"]] in ([2], [2, 4]), "not before training"
    assert lora_steps(output / BEST_LORA) == best["step"]
    assert open_weights(output / BEST_LORA).metadata["kept_for"] == "highest score of the samples"
    assert "kept_for" not in open_weights(output / "pytorch_lora_weights.safetensors").metadata
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "<th>CLIP-T</th>" in page and "Score of the samples" in page
    found = scalars(output)
    assert {(step, f"score/{name}") for step in (0, 2, 4) for name in ("score", "dino", "clip_t")} <= found
    saved = read(output / "checkpoint-4")
    assert saved.best is None and saved.best_score == BestScore(2, by_step[2]["score"], by_step[2]["scored_with"])


def test_a_resumed_run_has_the_same_scores_and_the_same_best(scored, tmp_path):
    output, again = output_of(scored), tmp_path / "again"
    shutil.copytree(output, again)
    shutil.rmtree(again / "checkpoint-4")
    (again / "pytorch_lora_weights.safetensors").unlink()
    settings = {name: value for part in vars(scored).values() for name, value in vars(part).items()}
    changed = {"output_dir": str(again), "resume_from_checkpoint": "latest", "report_to": ()}
    assert train(from_flat_dict(settings | changed)) == 0
    assert lora_bytes(again) == lora_bytes(output)
    assert (again / BEST_LORA).read_bytes() == (output / BEST_LORA).read_bytes()
    assert without_time(metrics(again)) == without_time(metrics(output))
    assert read(again / "checkpoint-4").best_score == read(output / "checkpoint-4").best_score


def test_a_failure_to_score_is_reported_and_ends_nothing(cpu, world, tmp_path, monkeypatch, capfd):
    """By the judge, whose world the pictures are of."""

    def fail(self, step):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Scoring, "measure", fail)
    settings = {name: value for name, value in SCORED.items() if name != "validation_steps"}
    assert train(world.config(tmp_path, **settings, max_train_steps=2)) == 0
    printed = capfd.readouterr()
    assert "no score at step 2: RuntimeError: out of memory; training goes on" in printed.err
    assert "no round of samples has a score, so there is no best LoRA" in printed.err and "best:" not in printed.out
    failed = [row for row in metrics(tmp_path) if row.get("event") == "scoring failed"]
    assert [row["step"] for row in failed] == [0, 2] and len(rounds_of(tmp_path)) == 2


# --- parts -------------------------------------------------------------------------------------------------------


def config(output, **changes):
    values = {"pretrained_model_name_or_path": "m", "instance_data_dir": "d", "instance_prompt": "a photo of sks dog"}
    return from_flat_dict(values | {"output_dir": str(output), "report_to": ["none"]} | changes)


class Scripted:
    """Scores by a list."""

    scored_with, scorer = "x", SimpleNamespace(by="judge")

    def __init__(self, *values):
        self.values = list(values)

    def measure(self, step):
        value = self.values.pop(0)
        return SimpleNamespace(score=value, as_dict=lambda: {"score": value})


def validation(tmp_path, scoring, *, is_main=True, keep="score"):
    settings = config(tmp_path, keep_best=keep)
    runtime = SimpleNamespace(is_main=is_main)

    def write_lora(name, kept_for):
        (tmp_path / name).write_text(kept_for)

    rounds = Rounds(every=None, score_every=2, total_steps=9)
    log = MetricsLog(settings, 9, 0, enabled=is_main)
    return Validation(settings, runtime, log, None, None, write_lora, rounds=rounds, scoring=scoring)


def test_the_highest_score_after_a_step_that_trained_is_the_best(tmp_path):
    made = validation(tmp_path, Scripted(0.9, 0.2, 0.5, None, 0.5, float("nan")))
    for step in (0, 2, 4, 6, 8, 9):
        made.run(step, is_trained=step > 0)
    assert made.best_score == BestScore(4, 0.5, "x")
    assert [row["step"] for row in rounds_of(tmp_path) if row["best_score"]] == [2, 4]
    assert (tmp_path / BEST_LORA).read_text() == "highest score of the samples"
    assert [step for step in range(10) if made.is_due(step)] == [0, 2, 4, 6, 8, 9]


def test_only_the_first_rank_scores_and_the_others_go_on(tmp_path):
    other = validation(tmp_path, None, is_main=False)
    other.run(2, is_trained=True)
    assert other.best_score is None and not (tmp_path / "metrics.jsonl").exists()


WAITED = {"waiting": Waiting(), "config": {"keep_best": "score"}}


def test_the_best_score_is_recalled_only_with_its_lora_and_the_same_measure(tmp_path, monkeypatch):
    monkeypatch.setattr("flux_db.training.validation.lora_steps", lambda path: 2 if path.exists() else None)

    def recalled(best, row=None, keep="score"):
        made = validation(tmp_path, Scripted(), keep=keep)
        made.recall_best(SimpleNamespace(best=None, knows_best=True, best_score=best, **WAITED), Ground(None, row))
        return made.best_score

    best = BestScore(2, 0.5, "x")
    assert recalled(best, keep="none") == best and recalled(best) is None, "its LoRA is to be kept, and gone"
    (tmp_path / BEST_LORA).write_text("")
    assert recalled(best) == best and recalled(BestScore(2, 0.5, "other")) is None and recalled(None) is None
    at_start = {"step": 2, "event": "validation", "score": 0.7, "best_score": True, "scored_with": "x"}
    assert recalled(BestScore(1, 0.5, "x"), at_start) == BestScore(2, 0.7, "x")
    assert (tmp_path / BEST_LORA).read_text() == "highest score of the samples", "written again"


def test_a_round_that_was_not_drawn_whole_is_not_scored(world, tmp_path):
    settings = world.config(tmp_path, validation_prompt=PROMPTS, score_steps=2)
    dataset, _ = read_dataset(settings)
    scoring = open_scoring(settings, dataset)
    assert scoring.scorer.by == "judge"
    with pytest.raises(Exception, match="only 0 of 8 samples were drawn"):
        scoring.measure(2)
    other = world.config(tmp_path, validation_prompt=PROMPTS, score_steps=2, validation_guidance=2.0)
    assert open_scoring(other, dataset).scored_with != scoring.scored_with
    assert open_scoring(world.config(tmp_path), dataset) is None


def test_the_judge_refuses_what_it_does_not_know_before_training(world, tmp_path):
    def problem(**changes):
        settings = world.config(tmp_path, **{"validation_prompt": PROMPTS, "score_steps": 2} | changes)
        with pytest.raises(UserError) as caught:
            demand_scoring(settings, read_dataset(settings)[0])
        return str(caught.value)

    assert "no --validation_prompt names the subject" in problem(validation_prompt=["a dog"])
    assert "no word in it names a subject" in problem(instance_prompt="a photo of a dog")
    folder = tmp_path / "noise"
    folder.mkdir()
    for number in range(2):
        noise = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    text = problem(instance_data_dir=str(folder))
    assert (
        "--score_steps: the judge knows subjects of the demo's drawn world alone" in text
        and "--score_dino and --score_clip" in text
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"keep_best": "score"}, "--keep_best score: needs --score_steps, which measures what is best"),
        ({"score_steps": 0, "validation_prompt": ["sks"]}, "--score_steps 0: must be from 1 to 1000000000"),
        (
            {"score_steps": 5},
            "--score_steps 5: needs --validation_prompt or --validation_prompts_file, whose samples are scored",
        ),
        ({"score_clip": "c"}, "--score_clip c: needs --score_steps; add that or leave --score_clip out"),
        (
            {"score_steps": 5, "validation_prompt": ["a"], "score_dino": "d", "instance_prompt": "a dog"},
            '--score_steps 5: --instance_prompt "a dog" has no rare word, such as sks, that distinguishes samples of'
            " the subject from others; name it with --trigger_word",
        ),
    ],
)
def test_settings_that_contradict_each_other(tmp_path, changes, problem):
    assert check_values(config(tmp_path, **changes)) == [problem]


def test_networks_and_prompts_are_checked_before_training(world, tmp_path, networks):
    def problems(**changes):
        return check_files(world.config(tmp_path, **{"score_steps": 2, "validation_prompt": PROMPTS} | changes))

    assert problems(**networks) == []
    assert problems(score_dino="facebook/dinov2-base") == [], "on the hub"
    (problem,) = problems(score_clip=networks["score_dino"])
    assert problem.flag == "score_clip" and "is of a 'dinov2', not of a CLIP" in problem
    (problem,) = problems(score_dino=str(tmp_path / "nowhere"))
    assert "nowhere: no such folder; check the path" in problem
    (problem,) = problems(**networks, validation_prompt=["a photo of a dog"])
    assert problem.startswith("--validation_prompt: none names the subject, sks, so no sample can be scored")


def test_keep_best_has_the_meaning_it_had():
    required = ["--pretrained_model_name_or_path", "m", "--instance_data_dir", "d", "--instance_prompt", "p"]

    def kept(*words):
        return parse_config([*required, *words]).validation.keep_best

    assert kept() == kept("--no-keep_best") == kept("--keep_best", "none") == "none"
    assert kept("--keep_best") == kept("--keep_best", "loss") == "loss" and kept("--keep_best", "score") == "score"
    with pytest.raises(UserError, match="expects one of none, loss, score, not first"):
        kept("--keep_best", "first")
    for old, new in ((True, "loss"), (False, "none")):
        values = {"pretrained_model_name_or_path": "m", "instance_prompt": "p", "keep_best": old}
        assert from_flat_dict(values).validation.keep_best == with_defaults(values)["keep_best"] == new
        assert with_defaults(json.loads(json.dumps(values)))["score_steps"] is None
