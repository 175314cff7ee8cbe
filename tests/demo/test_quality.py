"""The small model learns the dog, as a user trains it: quality as a number, through the command line.

The judge scores the same prompts and noise before and after. The limits are below what docs/evidence.md measures.
"""

import itertools

import pytest
from program import command, run, trainer

from flux_db.demo.world import draw, random_scene
from flux_db.score.runs import Given, ScoredRound, score_run
from flux_db.score.scorer import Folders

STEPS = 100
CLASS_PICTURES = 8


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality")
    for name, *words in (("tiny-model", "--size", "small", folder / "model"), ("demo-pictures", folder / "pictures")):
        assert run(command(name, *words)).returncode == 0
    return folder


def rounds_of(folder, name, **changes) -> list[ScoredRound]:
    """Scores before and after a short training with the demo's settings at a constant rate."""
    settings = {
        "config": "configs/demo_cpu.yaml",
        "pretrained_model_name_or_path": folder / "model",
        "instance_data_dir": folder / "pictures",
        "output_dir": folder / name,
        "encode_cache_dir": folder / "cache",
        "report_to": "none",
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "max_train_steps": STEPS,
        "validation_steps": STEPS,
    }
    result = run(trainer(settings | changes), timeout=900)
    assert result.returncode == 0, result.stderr
    return score_run(folder / name, Given(), Folders())


@pytest.fixture(scope="module")
def rounds(inputs) -> list[ScoredRound]:
    return rounds_of(inputs, "plain")


@pytest.fixture(scope="module")
def kept(inputs) -> list[ScoredRound]:
    """With prior preservation, on drawings of other dogs: that missing ones are drawn by the model, test_training.py
    has."""
    (inputs / "class").mkdir()
    dogs = (scene for number in itertools.count() if (scene := random_scene(1, number)).kind == "dog")
    for number, scene in enumerate(itertools.islice(dogs, CLASS_PICTURES)):
        draw(scene).save(inputs / "class" / f"{number}.png")
    prior = {"with_prior_preservation": True, "class_prompt": "a photo of a dog", "num_class_images": CLASS_PICTURES}
    return rounds_of(inputs, "kept", **prior, class_data_dir=inputs / "class")


def test_a_hundred_steps_teach_the_dog(rounds):
    before, after = rounds[0].scores, rounds[-1].scores
    assert before.subject < 0.1  # without training it is some dog
    assert after.subject > 0.7
    assert after.likeness > before.likeness + 0.2
    assert after.prompt >= 0.9  # in the places that the prompts name, where it was not photographed
    assert after.copies == 0.0


def test_prior_preservation_keeps_the_class(rounds, kept):
    assert kept[-1].scores.class_change < 0.75 * rounds[-1].scores.class_change
    assert kept[-1].scores.class_subject < 0.2


def test_the_stored_model_follows_its_prompts(rounds):
    assert rounds[0].scores.class_prompt >= 0.9
    assert rounds[0].scores.prompt >= 0.9
