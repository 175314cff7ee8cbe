"""Scores of samples by the judge: the subject itself scores best, and what is wrong shows."""

import numpy as np
import pytest
from PIL import Image

from flux_db.demo.pictures import draw_picture
from flux_db.demo.world import draw, random_scene, subject_scene
from flux_db.errors import UserError
from flux_db.score.judged import Sample, Subject, score

SCENES = [random_scene(7, i) for i in range(400)]


def samples(subject: str, prompt: str, count: int, place: str) -> list[Sample]:
    return [Sample(prompt, i, draw(subject_scene(subject, 13, i, place=place))) for i in range(count)]


@pytest.fixture(scope="module")
def dog() -> Subject:
    return Subject("a photo of sks dog", [draw_picture(64, i, 0) for i in range(5)])


def test_the_dog_itself_has_the_best_scores(dog):
    others = [Sample("a photo of a dog", i, draw(s)) for i, s in enumerate(s for s in SCENES if s.kind == "dog")]
    result = score(samples("dog", "a photo of sks dog on the beach", 12, "beach") + others, dog, others)
    assert dog.name == "dog"
    assert result.subject > 0.9
    assert result.prompt > 0.95
    assert result.class_subject < 0.1
    assert result.class_change == pytest.approx(0.0, abs=1e-6)
    assert result.copies == 0.0
    assert 0.0 < result.diversity < result.class_prompt


def test_what_is_wrong_with_samples_shows(dog):
    wrong_place = score(samples("dog", "a photo of sks dog at night", 8, "beach"), dog)
    assert wrong_place.prompt == pytest.approx(0.5, abs=0.1)  # the kind is right, the place is not
    others = [Sample("a photo of sks dog", i, draw(s)) for i, s in enumerate(s for s in SCENES if s.kind == "dog")]
    assert score(others, dog).subject < 0.1
    copied = [Sample("a photo of sks dog", i, draw_picture(64, i, 0)) for i in range(4)]
    assert score(copied, dog).copies == 1.0
    bled = samples("dog", "a photo of a dog", 8, "snow")
    assert score(bled, dog).class_subject > 0.9


def test_of_an_unknown_subject_all_but_the_subject_is_measured():
    noise = np.random.default_rng(0).integers(0, 255, (3, 64, 64, 3), np.uint8)
    unknown = Subject("a photo of sks dog", [Image.fromarray(picture) for picture in noise])
    others = [Sample("a photo of a cat", i, draw(s)) for i, s in enumerate(s for s in SCENES[:80] if s.kind == "cat")]
    drawn = [*samples("dog", "a photo of sks dog on the beach", 4, "beach"), *others]
    result = score(drawn, unknown, drawn).as_dict()
    assert {name for name, value in result.items() if value is None} == {"score", "subject", "class_subject"}
    assert result["prompt"] > 0.9 and result["class_prompt"] > 0.9 and 0 < result["likeness"] < 1


def test_a_prompt_without_a_subject_is_refused():
    with pytest.raises(UserError, match="no word in it names a subject"):
        Subject("a photo of a dog", [draw_picture(64, 0, 0)])
