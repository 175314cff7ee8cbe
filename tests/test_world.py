"""The drawn world: repeatable, its captions are true, and its subjects are kept from the model that learns it."""

import random

import numpy as np
import pytest
from PIL import Image

from flux_db.demo.judge import HEADS, judge
from flux_db.demo.pictures import PLACES as PHOTOGRAPHED
from flux_db.demo.pictures import draw_picture, write_demo_pictures
from flux_db.demo.places import PLACES
from flux_db.demo.tiny_model import t5_tokenizer_object, words_of
from flux_db.demo.world import KINDS, SUBJECTS, caption, draw, prompt_of, random_scene, subject_scene
from flux_db.errors import UserError
from flux_db.score.judged import Sample, Subject, score
from flux_db.score.prompts import wanted

SCENES = [random_scene(7, i) for i in range(400)]


# ---- Scenes and captions ----


def test_the_same_seed_draws_the_same_picture():
    for scene in SCENES[:20]:
        assert draw(scene).tobytes() == draw(scene).tobytes()
    assert len({draw(scene).tobytes() for scene in SCENES[:50]}) == 50


def test_every_kind_and_place_is_there_and_no_subject():
    assert {scene.kind for scene in SCENES} == set(KINDS)
    assert {scene.place for scene in SCENES} == set(PLACES)
    assert {scene.subject for scene in SCENES} == {""}


def test_captions_say_nothing_that_is_not_in_the_picture():
    for i, scene in enumerate(SCENES):
        for answer in (wanted(caption(scene, random.Random(i))), wanted(prompt_of(scene))):
            assert not answer.unknown
            assert answer.answers.items() <= vars(scene).items()
        assert {"kind", "colour", "place"} <= wanted(prompt_of(scene)).answers.keys()


def test_captions_are_short_and_have_no_unknown_words_for_the_tokenizer():
    tokenizer = t5_tokenizer_object(words_of("small"))
    for i, scene in enumerate(SCENES):
        text = caption(scene, random.Random(i), ["vintage"])
        ids = tokenizer.encode(text).ids
        assert len(ids) <= 20, text
        assert len(ids) <= len(text.replace(",", " ,").split()) + 1, f"a word is spelled in letters: {text}"


def test_the_dog_is_photographed_in_half_of_the_places():
    assert set(PHOTOGRAPHED) < set(PLACES)
    assert {subject_scene("dog", 0, i, place=PHOTOGRAPHED[i % 4]).place for i in range(8)} == set(PHOTOGRAPHED)


def test_a_style_has_captions_and_a_subject_has_none(tmp_path):
    write_demo_pictures(tmp_path / "ink", count=2, size=64, subject="ink")
    write_demo_pictures(tmp_path / "robot", count=2, size=64, subject="robot")
    assert sorted(p.name for p in (tmp_path / "ink").iterdir()) == [
        "ink_00.png",
        "ink_00.txt",
        "ink_01.png",
        "ink_01.txt",
    ]
    assert sorted(p.name for p in (tmp_path / "robot").iterdir()) == ["robot_00.png", "robot_01.png"]
    with pytest.raises(UserError, match="dog, robot, ink"):
        write_demo_pictures(tmp_path / "cow", subject="cow")


# ---- The judge ----


def test_the_judge_is_right_about_new_drawings():
    """Drawings of another seed than those it was trained on."""
    scenes = [random_scene(11, i) for i in range(300)]
    verdict = judge([draw(scene) for scene in scenes])
    for question in ("kind", "colour", "place"):
        right = np.mean([a == getattr(s, question) for a, s in zip(verdict.best(question), scenes, strict=True)])
        assert right >= 0.98, question
    assert np.mean([a == "none" for a in verdict.best("subject")]) >= 0.98


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_judge_knows_the_subjects(subject):
    verdict = judge([draw(subject_scene(subject, 12, i)) for i in range(60)])
    assert np.mean([answer == subject for answer in verdict.best("subject")]) >= 0.95
    assert verdict.probabilities["subject"].shape == (60, len(HEADS["subject"]))


# ---- Scores ----


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


def test_pictures_that_are_not_of_the_world_are_refused():
    noise = np.random.default_rng(0).integers(0, 255, (3, 64, 64, 3), np.uint8)
    with pytest.raises(UserError, match="drawn world"):
        Subject("a photo of sks dog", [Image.fromarray(picture) for picture in noise])
    with pytest.raises(UserError, match="no word in it names a subject"):
        Subject("a photo of a dog", [draw_picture(64, 0, 0)])
