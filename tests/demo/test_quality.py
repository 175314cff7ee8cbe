"""The small model learns the dog, as a user trains it: quality as a number, through the command line.

The judge scores the same prompts and noise before and after. The limits are well below what `scripts/bench_quality.py`
measures over three seeds (docs/evidence.md).
"""

import pytest
from program import command, run, trainer

from flux_db.score.runs import Given, ScoredRound, score_run
from flux_db.score.scorer import Folders

PROMPTS = [
    *("a photo of sks dog on the beach", "a photo of sks dog in the snow", "a photo of sks dog in the desert"),
    *("a photo of a dog on the beach", "a photo of a brown dog in the snow"),
]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory) -> list[ScoredRound]:
    """Scores before and after a hundred steps with prior preservation."""
    folder = tmp_path_factory.mktemp("quality")
    for name, *words in (("tiny-model", "--size", "small", folder / "model"), ("demo-pictures", folder / "pictures")):
        assert run(command(name, *words)).returncode == 0
    settings = {
        "config": "configs/demo_cpu.yaml",
        "pretrained_model_name_or_path": folder / "model",
        "instance_data_dir": folder / "pictures",
        "output_dir": folder / "run",
        "max_train_steps": 100,
        "validation_prompt": PROMPTS,
        "num_validation_images": 4,
        "with_prior_preservation": True,
        "class_prompt": "a photo of a dog",
        "class_data_dir": folder / "class",
        "num_class_images": 16,
    }
    result = run(trainer(settings))
    assert result.returncode == 0, result.stderr
    return score_run(folder / "run", Given(), Folders())


def test_a_hundred_steps_teach_the_dog(rounds):
    before, after = rounds[0].scores, rounds[-1].scores
    assert before.subject < 0.2  # without training it is some dog
    assert after.subject > 0.7
    assert after.prompt > 0.8  # in the places that the prompts name
    assert after.copies == 0.0


def test_other_dogs_stay_other_dogs(rounds):
    before, after = rounds[0].scores, rounds[-1].scores
    assert before.class_prompt > 0.8  # the stored model follows its prompts
    assert after.class_prompt > before.class_prompt - 0.15
    assert after.class_subject < 0.2
