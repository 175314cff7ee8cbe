"""`score` of a run and of a folder, by features: table, scores.json, report, and mistakes."""

import json

import numpy as np
import program
import pytest
import yaml
from PIL import Image
from scoring_models import write_clip, write_dino

from flux_db.demo.pictures import write_demo_pictures
from flux_db.errors import UserError
from flux_db.report.run_page import render
from flux_db.run import sample_files
from flux_db.run.record import read_run
from flux_db.score.runs import Given, as_table, score_folder, score_run
from flux_db.score.scorer import Folders, locate

PROMPTS = ["a photo of sks dog on the beach", "a photo of a dog"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("networks")
    return Folders(dino=write_dino(place / "dino"), clip=write_clip(place / "clip"))


def write_round(folder, seed):
    for number in range(4):
        values = np.random.default_rng([seed, number]).integers(0, 256, (8, 8, 3), np.uint8)
        drawn = Image.fromarray(values).resize((64, 64), Image.Resampling.NEAREST)
        folder.mkdir(parents=True, exist_ok=True)
        sample_files.write(folder / f"{number:02d}.png", drawn, prompt=PROMPTS[number // 2], number=number % 2, seed=1)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    for step in (0, 10):
        write_round(sample_files.round_folder(folder, step), step)
    write_demo_pictures(tmp_path / "pictures", count=2, size=64)
    settings = {"instance_data_dir": str(tmp_path / "pictures"), "instance_prompt": "a photo of {trigger} dog"}
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "trigger_word": "sks"}))
    return folder


def test_a_run_is_scored_round_by_round_and_the_report_shows_it(cpu, run, folders):
    rounds = score_run(run, Given(), folders)
    assert [round_.step for round_ in rounds] == [0, 10]
    head, *lines = as_table(rounds).splitlines()
    columns = "step samples score DINO CLIP-I CLIP-T PRES DIV class change most alike copies nearest"
    assert head.split() == columns.split() and len(lines) == 2
    stored = json.loads((run / "scores.json").read_text())
    assert stored["by"] == "dinov2+clip" and stored["rounds"][1]["dino"] == rounds[1].scores.dino
    assert rounds[0].scores.class_change == pytest.approx(0, abs=1e-12) and rounds[1].scores.class_change > 0.01
    page = render(read_run(run))
    assert "<th>DINO</th>" in page and "<th>Subject</th>" not in page and f"{rounds[1].scores.clip_t:.3f}" in page
    assert "Score of the samples" in page and "the DreamBooth paper takes LPIPS" in page


def test_a_folder_of_pictures_is_scored(cpu, tmp_path, run, folders):
    drawn = tmp_path / "drawn"
    write_round(drawn, 10)
    found = score_folder(drawn, Given(pictures=tmp_path / "pictures"), folders)
    assert found.step is None and found.samples == 4
    of_run = score_run(run, Given(), folders)[1].scores
    assert (found.scores.dino, found.scores.clip_t) == pytest.approx((of_run.dino, of_run.clip_t), abs=1e-9)


def test_mistakes_are_one_line_each(tmp_path, run, folders):
    for given, problem in (
        (Given(prompt="a photo of a dog", trigger_word="cat"), "no sample is of the subject"),
        (Given(pictures=tmp_path / "nowhere"), "its training pictures are gone"),
    ):
        with pytest.raises(UserError, match=problem):
            score_run(run, given, folders)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no PNG file in it"):
        score_folder(tmp_path / "empty", Given(pictures=tmp_path), folders)
    with pytest.raises(UserError, match="for a folder of pictures give --instance_data_dir"):
        score_folder(tmp_path / "empty", Given(), folders)
    with pytest.raises(UserError, match=r"--score_dino .*clip: its config.json is of a 'clip'"):
        locate(str(folders.clip), None, prefix="score_")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--dino", "nowhere"], "--dino nowhere: neither a folder nor a name on the hub"),
        (["--clip", "owner/none"], "--clip owner/none: is not a folder here, and cannot be fetched from the hub"),
        ([], "no sample is of the subject"),
    ],
)
def test_the_command_ends_with_code_2(run, flags, problem):
    env = program.environment(HF_HUB_OFFLINE="1")
    done = program.run(
        program.command("score", run, "--trigger_word", "rex", "--instance_prompt", "a photo of rex", *flags), env=env
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert problem in done.stderr


def test_a_subject_that_the_judge_does_not_know_is_scored_as_far_as_it_can_be(run, tmp_path):
    for number in range(3):
        values = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(values).save(tmp_path / "pictures" / f"dog_{number:02d}.png")
    done = program.run(program.command("score", run))
    assert done.returncode == 0, done.stderr
    head, first, last = done.stdout.splitlines()
    assert "likeness" in head and first.split()[2:4] == last.split()[2:4] == ["-", "-"]
    assert "finds none of them in the training pictures; so subject and score are missing" in done.stderr
    assert "give --dino facebook/dinov2-base and --clip" in done.stderr
    rounds = json.loads((run / "scores.json").read_text())["rounds"]
    assert rounds[1]["score"] is None and all(rounds[1][key] is not None for key in ("likeness", "prompt", "diversity"))
    # large samples are no drawings of the small model: nothing that the judge says about them means anything
    for path in (run / "samples").rglob("*.png"):
        with Image.open(path) as picture:
            about = {key: picture.info[key] for key in ("prompt", "number")}
        sample_files.write(path, Image.new("RGB", (512, 512)), prompt=about["prompt"], number=about["number"], seed=1)
    done = program.run(program.command("score", run))
    assert done.returncode == 2 and "the samples are of 512 x 512: give --dino" in done.stderr


def test_scores_of_training_and_of_the_command_go_together(run):
    rows = [
        {"step": 0, "event": "validation", "score": 0.1, "score_dino": 0.2, "scored_by": "clip"},
        {"step": 10, "event": "validation", "score": 0.3, "score_dino": 0.4, "scored_by": "dinov2"},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["step"], row["dino"]) for row in read_run(run).scores] == [(10, 0.4)], "by the last network alone"
    stored = {"by": "dinov2", "rounds": [{"step": 0, "score": 0.5, "dino": 0.6}]}
    (run / "scores.json").write_text(json.dumps(stored))
    assert [(row["step"], row["dino"]) for row in read_run(run).scores] == [(0, 0.6), (10, 0.4)]
    (run / "scores.json").write_text(json.dumps(stored | {"by": "judge"}))
    assert [row["step"] for row in read_run(run).scores] == [0]
