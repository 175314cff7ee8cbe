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
    """Scores before and after the demo's training, cut short."""
    folder = tmp_path_factory.mktemp("quality")
    for name, *words in (("tiny-model", "--size", "small", folder / "model"), ("demo-pictures", folder / "pictures")):
        assert run(command(name, *words)).returncode == 0
    settings = {
        "config": "configs/demo_cpu.yaml",
        "pretrained_model_name_or_path": folder / "model",
        "instance_data_dir": folder / "pictures",
        "output_dir": folder / "run",
        "max_train_steps": 200,
        "report_to": "none",
    }
    result = run(trainer(settings), timeout=900)
    assert result.returncode == 0, result.stderr
    return score_run(folder / "run", Given(), Folders())


def test_two_hundred_steps_bring_samples_nearer_to_the_dog(rounds):
    before, after = rounds[0].scores, rounds[-1].scores
    assert before.subject < 0.03  # without training it is some dog
    assert after.subject > before.subject
    assert after.likeness > before.likeness + 0.04
    assert after.prompt >= before.prompt - 0.1  # in the places that the prompts name
    assert after.copies == 0.0


def test_the_stored_model_follows_its_prompts(rounds):
    assert rounds[0].scores.class_prompt >= 0.6
