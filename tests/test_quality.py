"""The program learns a subject: 100 steps from the stored base, judged by the network that was trained on drawings."""

from pathlib import Path

import pytest
from world import train

from flux_db.demo.pictures import write_demo_pictures
from flux_db.demo.tiny_model import write_tiny_model
from flux_db.score.runs import ScoredRound, score_run
from flux_db.settings.command_line import from_flat_dict

SUBJECT = ["a photo of sks dog on the beach", "a photo of sks dog in the snow"]
CLASS = ["a photo of a brown dog on the beach", "a photo of a dog in the snow"]


@pytest.fixture(scope="module")
def rounds(cpu, tmp_path_factory: pytest.TempPathFactory) -> list[ScoredRound]:
    """The samples before and after 100 steps, scored."""
    folder: Path = tmp_path_factory.mktemp("quality")
    write_tiny_model(folder / "model", "small")
    write_demo_pictures(folder / "pictures", size=64)
    settings = {
        "pretrained_model_name_or_path": str(folder / "model"),
        "instance_data_dir": str(folder / "pictures"),
        "output_dir": str(folder / "run"),
        "instance_prompt": "a photo of sks dog",
        "resolution": 64,
        "max_sequence_length": 20,
        "rank": 16,
        "max_train_steps": 100,
        "train_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler": "cosine",
        "validation_prompt": [*SUBJECT, *CLASS],
        "num_validation_images": 2,
        "validation_steps": 100,
        "validation_inference_steps": 8,
        "checkpointing_steps": 1000,
        "dataloader_num_workers": 0,
        "device": "CPU",
        "report_to": "none",
    }
    assert train(from_flat_dict(settings)) == 0
    return score_run(folder / "run")


def test_100_steps_teach_the_subject(rounds):
    before, after = rounds[0].scores, rounds[-1].scores
    assert (rounds[0].step, rounds[-1].step) == (0, 100)
    assert before.subject < 0.2
    assert after.subject > 0.7
    assert after.copies == 0.0


def test_the_subject_goes_to_new_places(rounds):
    assert rounds[-1].scores.prompt >= 0.7
