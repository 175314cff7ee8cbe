"""The prompts of --preserve_class: what the trigger is, and what takes its place."""

import pytest

from flux_db.check.pictures import check_pictures
from flux_db.check.values import check_values
from flux_db.demo.pictures import write_demo_pictures
from flux_db.settings.concepts import concepts_of
from flux_db.settings.preserved import preserved_prompt, subject_word
from flux_db.settings.schema import from_flat_dict


def config(**changes):
    base = {
        "pretrained_model_name_or_path": "o/m",
        "instance_data_dir": "pics",
        "instance_prompt": "a photo of sks dog",
    }
    return from_flat_dict(base | {"preserve_class": "dog"} | changes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "sks"),
        ({"instance_prompt": "Sks  dog, sitting"}, "Sks"),
        ({"instance_prompt": "a photo of ohwx-7 DOG"}, "ohwx-7"),
        ({"instance_prompt": "a photo of a dog"}, None),
        ({"instance_prompt": "a photo of sks"}, None),
        ({"instance_prompt": "a photo of sks dogs"}, None),
        ({"trigger_word": "olis"}, "olis"),
        ({"instance_prompt": "a {trigger} dog", "trigger_word": "olis"}, "olis"),
    ],
)
def test_the_trigger_is_given_or_the_word_before_the_class(changes, word):
    assert subject_word(concepts_of(config(**changes))[0]) == word


@pytest.mark.parametrize(
    ("prompt", "expected", "changes"),
    [
        ("a photo of sks dog", "a photo of dog", {}),
        ("a photo of sks", "a photo of dog", {}),
        ("SKS Dog and sks, asks sksy", "dog and dog, asks sksy", {}),
        ("a dog on grass", None, {}),
        ("photo of ohwx woman smiling", "photo of woman smiling", {"trigger_word": "ohwx", "preserve_class": "woman"}),
        ("ohwx woman, red", "woman, red", {"trigger_word": "ohwx woman", "preserve_class": "woman"}),
        ("a s.k.s toy", r"a \1 toy", {"trigger_word": "s.k.s", "preserve_class": r"\1"}),
        ("anything at all", "", {"preserve_class": ""}),
    ],
)
def test_the_class_takes_the_triggers_place(prompt, expected, changes):
    assert preserved_prompt(prompt, concepts_of(config(**changes))[0]) == expected


def test_the_empty_prompt_needs_no_trigger():
    assert check_values(config(preserve_class="", instance_prompt="a photo")) == []
    assert check_values(config()) == []


def test_captions_without_the_trigger_are_reported_at_once(tmp_path):
    pictures = tmp_path / "pictures"
    write_demo_pictures(pictures, count=3, size=64)
    names = sorted(path for path in pictures.iterdir() if path.suffix == ".png")
    for path, caption in zip(names, ("a sks dog", "a dog", "a toy"), strict=True):
        path.with_suffix(".txt").write_text(caption)
    places = {"instance_data_dir": str(pictures), "output_dir": str(tmp_path / "run")}
    (problem,) = check_pictures(config(**places))
    assert problem.flag == "preserve_class" and str(names[1]) in problem and str(names[2]) in problem
    assert "the trigger sks is not in the caption of" in problem and str(names[0]) not in problem
    assert check_pictures(config(**places, preserve_class="")) == []
    for path in names[1:]:
        path.with_suffix(".txt").unlink()
    assert check_pictures(config(**places)) == []
    (problem,) = check_pictures(config(**places, instance_prompt="a dog", trigger_word="sks"))
    assert str(names[1]) in problem and str(names[0]) not in problem
