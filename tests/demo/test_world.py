"""The drawn world: repeatable, its captions are true, and its subjects are kept from the model that learns it."""

import random

import numpy as np
import pytest

from flux_db.demo.judge import HEADS, judge
from flux_db.demo.pictures import PLACES as PHOTOGRAPHED
from flux_db.demo.pictures import write_demo_pictures
from flux_db.demo.places import PLACES
from flux_db.demo.tiny_model import t5_tokenizer_object, words_of
from flux_db.demo.world import KINDS, SUBJECTS, caption, draw, prompt_of, random_scene, subject_scene
from flux_db.errors import UserError
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
        text = caption(scene, random.Random(i))
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
