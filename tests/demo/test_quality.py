"""The small model learns the dog, as a user trains it: quality as a number, through the command line.

The judge scores the same prompts and noise before and after. The limits are below what the demo reaches
(docs/evidence.md).
"""

import pytest
from program import command, run, trainer

from flux_db.score.runs import Given, ScoredRound, score_run
from flux_db.score.scorer import Folders


@pytest.fixture(scope="module")
def rounds(tmp_path_factory) -> list[ScoredRound]:
    """Scores before, in between and after the demo's training."""
    folder = tmp_path_factory.mktemp("quality")
    for name, *words in (("tiny-model", "--size", "small", folder / "model"), ("demo-pictures", folder / "pictures")):
        assert run(command(name, *words)).returncode == 0
    settings = {
        "config": "configs/demo_cpu.yaml",
        "pretrained_model_name_or_path": folder / "model",
        "instance_data_dir": folder / "pictures",
        "output_dir": folder / "run",
        "report_to": "none",
    }
    result = run(trainer(settings), timeout=900)
    assert result.returncode == 0, result.stderr
    return score_run(folder / "run", Given(), Folders())


def test_two_hundred_steps_teach_the_dog(rounds):
    before, after = rounds[0].scores, rounds[-1].scores
    assert before.subject < 0.1  # without training it is some dog
    assert after.subject > 0.55
    assert after.likeness > before.likeness + 0.2
    assert after.prompt >= 0.9  # in the places that the prompts name, where it was not photographed
    assert after.copies == 0.0


def test_other_dogs_stay_other_dogs(rounds):
    assert rounds[-1].scores.class_subject < 0.4


def test_the_stored_model_follows_its_prompts(rounds):
    assert rounds[0].scores.class_prompt >= 0.9
    assert rounds[0].scores.prompt >= 0.9
