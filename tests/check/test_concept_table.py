"""What `check` prints of several concepts, and that contradictions end the trainer before a model is loaded."""

import csv

import program
import pytest
import yaml

from flux_db.check import dry_run, plan
from flux_db.check.everything import find_problems
from flux_db.data.dataset import read_dataset
from flux_db.demo.pictures import write_demo_pictures
from flux_db.errors import UserError
from flux_db.settings.command_line import read_config


@pytest.fixture(scope="module")
def robots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("second") / "robot"
    write_demo_pictures(folder, count=2, size=64, subject="robot")
    return folder


@pytest.fixture
def given(world, robots, tmp_path):
    def make(changes=None, **flags):
        entries = [
            {"dir": str(world.pictures), "prompt": "a photo of sks dog", "repeats": 2},
            {
                "dir": str(robots),
                "prompt": "a {trigger} robot",
                "trigger": "ohwx",
                "weight": 0.5,
                "resolutions": [32, 48],
            },
        ]
        entries[1] |= changes or {}
        file = tmp_path / "concepts.yaml"
        file.write_text(yaml.safe_dump(entries))
        settings = {k: v for k, v in world.settings(tmp_path / "out").items() if not k.startswith("instance_")}
        return read_config(program.flags({**settings, "concepts": str(file), **flags}))

    return make


def test_the_table_has_a_row_for_each_concept_and_the_graphs_are_counted(given, tmp_path, capsys):
    assert dry_run.run(given(max_train_steps=20)) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ") and line.split()}
    head = "concept pictures repeats examples share seen weight sides prompt"
    assert " ".join(rows["concept"].split()) == head
    assert rows["pictures"].split()[1:5] == ["3", "2", "6", "60"] and "a photo of sks dog" in rows["pictures"]
    assert rows["robot"].split()[1:5] == ["2", "1", "4", "40"] and "0.5" in rows["robot"] and "32,48" in rows["robot"]
    assert "a ohwx robot" in rows["robot"]
    assert "graphs             2 to compile: 32 x 32 (pictures: 5), 48 x 48 (pictures: 2)" in out
    assert "examples per epoch 10: 5 pictures with their repeats and sizes" in out
    with open(tmp_path / "out" / "pictures.csv", newline="") as file:
        names = [row["file_name"] for row in csv.DictReader(file)]
    assert len(names) == 7 and names.count("robot/robot_00.png") == 2


def test_how_often_each_is_seen_is_what_the_order_does(given):
    config = given(max_train_steps=7, train_batch_size=2).config
    dataset, _ = read_dataset(config)
    order = dataset.draw_order(config.output.seed, 2)
    drawn = [dataset.examples[order.item(k)] for k in range(14)]
    for number, own in enumerate(plan.make(config, dataset).concepts):
        paths = {example.picture.path for example in dataset.examples if example.concept == number}
        counts = [sum(example.picture.path == path for example in drawn) for path in paths]
        assert own.seen == (min(counts), max(counts)) and own.pictures == len(paths)


@pytest.mark.parametrize(
    ("changes", "flags", "part"),
    [
        ({"trigger": None, "prompt": "a robot"}, {"validation_prompt": "{trigger}"}, "needs a trigger in --concepts"),
        ({"mask_dir": "nowhere"}, {}, "--concepts: mask_dir nowhere: no such folder"),
        ({"repeats": 10_000}, {"repeats": 10_000}, None),
        ({}, {"validation_share": 0.999999}, "holds out all"),
        ({}, {"preserve_class": "robot"}, "class robot: no word for the subject right before robot"),
    ],
)
def test_problems_with_the_pictures_of_concepts(given, changes, flags, part):
    problems, _ = find_problems(given(changes, **flags))
    assert (problems == []) if part is None else any(part in problem for problem in problems)


def test_a_caption_with_a_trigger_names_its_concept(given, robots):
    caption = robots / "robot_00.txt"
    caption.write_text("a [trigger] robot")
    try:
        with pytest.raises(UserError) as caught:
            dry_run.run(given({"trigger": None, "prompt": "a robot"}))
    finally:
        caption.unlink()
    assert any("--concepts: robot: trigger is missing" in problem for problem in caught.value.problems)


def test_contradictions_end_the_trainer_with_code_2_before_it_writes(world, robots, tmp_path):
    entries = [{"dir": str(robots), "prompt": "a"}, {"dir": str(robots), "prompt": "b", "resolution": 5}]
    (tmp_path / "list.yaml").write_text(yaml.safe_dump(entries))
    settings = world.settings(tmp_path / "out", concepts=str(tmp_path / "list.yaml"))
    result = program.run(program.trainer(settings))
    assert result.returncode == 2 and not (tmp_path / "out").exists()
    for part in (
        "is the same folder as",
        "resolution: no such key; did you mean resolutions?",
        "not together with --concepts",
    ):
        assert part in result.stderr
    assert "Loading" not in result.stderr and "Traceback" not in result.stderr
