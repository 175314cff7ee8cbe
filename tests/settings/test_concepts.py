"""--concepts: how the list is read, what is refused, and that a list of one is one folder with flags."""

import json

import pytest
import yaml

from flux_db.check.files import check_files
from flux_db.check.values import check_values
from flux_db.errors import UserError
from flux_db.lora.trained_file import settings_hash
from flux_db.problem import Problem
from flux_db.settings.command_line import parse_config, to_yaml
from flux_db.settings.concepts import concepts_of
from flux_db.settings.derived import validation_prompts
from flux_db.settings.preserved import preserved_prompt
from flux_db.settings.resume_rules import changed_settings
from flux_db.settings.schema import from_flat_dict, to_flat_dict, with_defaults

MODEL = ["--pretrained_model_name_or_path", "owner/model"]
DOG = {"dir": "pics/dog", "prompt": "a photo of {trigger} dog", "trigger": "sks", "repeats": 3, "weight": 0.5}
STYLE = {"dir": "pics/ink", "prompt": "in ink style", "caption_dropout": 0.2, "resolutions": [512, 768]}


@pytest.fixture
def write(tmp_path):
    def write(content, name="list.yaml"):
        file = tmp_path / name
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return str(file)

    return write


def parse(*flags):
    return parse_config([*MODEL, *flags], checks=(check_values,))


def problems(*flags):
    with pytest.raises(UserError) as caught:
        parse_config([*MODEL, *flags], checks=(check_values, check_files))
    return caught.value.problems


def test_the_list_is_the_same_in_its_file_under_its_key_and_in_the_config(write):
    alone = parse("--concepts", write([DOG, STYLE]))
    assert parse("--concepts", write({"concepts": [DOG, STYLE]}, "key.yaml")) == alone
    assert parse("--config", write({"concepts": [DOG, STYLE]}, "run.yaml")) == alone
    assert parse_config(["--config", write(to_yaml(alone), "again.yaml")], checks=(check_values,)) == alone
    assert from_flat_dict(json.loads(json.dumps(to_flat_dict(alone)))) == alone
    dog, style = concepts_of(alone)
    assert (dog.name, dog.prompt, dog.repeats, dog.weight) == ("dog", "a photo of sks dog", 3, 0.5)
    assert (style.repeats, style.weight, style.resolutions, style.trigger) == (1, 1.0, (512, 768), None)


def test_flags_are_the_defaults_of_the_entries(write):
    flags = ("--repeats", "7", "--caption_dropout", "0.1", "--resolution", "768")
    dog, style = concepts_of(parse("--concepts", write([DOG, STYLE]), *flags))
    assert (dog.repeats, dog.caption_dropout, dog.resolutions) == (3, 0.1, (768,))
    assert (style.repeats, style.caption_dropout, style.resolutions) == (7, 0.2, (512, 768))


def test_the_command_line_takes_the_place_of_the_other_source_in_the_config(write):
    one_folder = write(
        {"instance_data_dir": "a", "instance_prompt": "b", "trigger_word": "c", "mask_dir": "d"}, "a.yaml"
    )
    config = parse("--config", one_folder, "--concepts", write([DOG, STYLE]))
    assert config.data.instance_data_dir is config.data.instance_prompt is config.data.trigger_word is None
    listed = write({"concepts": [DOG, STYLE]}, "b.yaml")
    assert parse("--config", listed, "--instance_data_dir", "a", "--instance_prompt", "b").data.concepts == ()


def test_all_that_is_wrong_is_named_at_once(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("dog", "cat", "cat/kittens"):
        (tmp_path / name).mkdir(parents=True)
    entries = [
        {"dir": "nowhere", "prompt": "a {trigger}", "repeats": 0, "wieght": 2},
        {"dir": "dog", "prompt": "sks dog", "class": "dog", "weight": 0, "resolutions": [500, 512, 512]},
        {"dir": "dog", "prompt": "x", "class": "cat", "caption_dropout": 2, "mask_dir": "cat"},
        {"dir": "cat/kittens", "prompt": 5, "trigger": "[trigger]", "class": ""},
        {"dir": "cat", "prompt": "a cat", "class": "cat", "repeats": "many"},
        {"prompt": "no folder"},
        "dog",
    ]
    flags = {"instance_data_dir": "dog", "instance_prompt": "a", "trigger_word": "b", "mask_dir": "dog"}
    more = {
        "validation_data_dir": "cat",
        "score_steps": "3",
        "validation_prompt": "a",
        "aspect_ratio_buckets": "512,512",
    }
    words = [word for name, value in {**flags, **more}.items() for word in (f"--{name}", value)]
    found = problems("--concepts", write(entries), *words, "--with_prior_preservation")
    assert all(isinstance(problem, Problem) for problem in found)
    for part in [
        "entry 1: wieght: no such key; did you mean weight?",
        "entry 4: prompt: expects text, not 5",
        "entry 5: repeats: expects a whole number, not 'many'",
        "entry 6: dir is missing",
        "entry 7: expects lines of the form key: value",
        "--concepts: dir nowhere: no such folder",
        "nowhere: repeats 0: must be from 1 to 10000",
        "nowhere: prompt a {trigger}: needs the key trigger",
        "class is missing for nowhere",
        "dog: weight 0: must be above 0",
        "dog: resolutions 500: must be multiples of 16",
        "dog: resolutions 512: is given twice",
        "dog: class dog: --with_prior_preservation keeps the class too",
        "--concepts: dir dog: is the same folder as --concepts: dir dog",
        "dog 2: class cat: no word for the subject right before cat",
        "dog 2: caption_dropout 2: must be from 0 to 1",
        "--concepts: dir cat: contains --concepts: dir cat/kittens",
        "--concepts: mask_dir cat: is the same folder as --concepts: dir cat",
        "kittens: trigger [trigger]: must be a word of its own",
        "--instance_data_dir dog: not together with --concepts",
        "--instance_prompt a: not together with --concepts",
        "--trigger_word b: not together with --concepts",
        "--mask_dir dog: not together with --concepts",
        "--validation_data_dir cat: its pictures belong to none of the several --concepts; use --validation_share",
        "--score_steps 3: scores compare samples with the pictures of one subject",
        "resolutions 500, 512, 512: --aspect_ratio_buckets names sizes of --resolution 512 only",
    ]:
        assert any(part in problem for problem in found), (part, found)
    assert not any("is required" in p and "instance" in p for p in found)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("just: words", "expects a list with an entry for each concept"),
        ("- a: [", "not valid YAML"),
        ("- dir: a\n  dir: b", "dir is given twice"),
        ("- {prompt: a}", "entry 1: dir is missing"),
        ("", "expects a list"),
    ],
)
def test_a_file_that_is_no_list(write, content, part):
    (problem,) = problems("--concepts", write(content))
    assert problem.startswith("--concepts: ") and part in problem


def test_a_file_that_cannot_be_read(tmp_path):
    assert "cannot be read" in problems("--concepts", str(tmp_path / "none.yaml"))[0]
    assert "needs a value" in problems("--concepts")[0]


def test_one_of_three_sources_is_needed():
    assert any(p.startswith("--instance_prompt is required") for p in problems())
    assert any("--instance_data_dir or --dataset_name is required" in p for p in problems("--instance_prompt", "a"))


# --- a list of one ---------------------------------------------------------------------------------------------------

ONE = {
    "dir": "pics/dog",
    "prompt": "a photo of {trigger} dog",
    "trigger": "sks",
    "class": "dog",
    "repeats": 3,
    "mask_dir": "masks",
    "caption_dropout": 0.25,
    "resolutions": [512],
}
AS_FLAGS = [
    *("--instance_data_dir", "pics/dog", "--instance_prompt", "a photo of {trigger} dog", "--trigger_word", "sks"),
    *("--preserve_class", "dog", "--repeats", "3", "--mask_dir", "masks", "--caption_dropout", "0.25"),
]


def compared(old, new):
    return [c.name for c in changed_settings(to_flat_dict(old), to_flat_dict(new), world_size_old=1, world_size_new=1)]


def test_a_list_of_one_is_one_folder_with_flags(write):
    listed, flags = parse("--concepts", write([ONE])), parse(*AS_FLAGS)
    assert concepts_of(listed) == concepts_of(flags)
    assert settings_hash(listed, 1) == settings_hash(flags, 1)
    assert compared(listed, flags) == compared(flags, listed) == []


def test_what_of_a_list_binds_on_resume(write):
    old = parse("--concepts", write([DOG, STYLE]))
    moved = parse("--concepts", write([DOG | {"dir": "elsewhere"}, STYLE | {"mask_dir": "m"}]))
    assert compared(old, moved) == [] and settings_hash(old, 1) == settings_hash(moved, 1)
    heavier = parse("--concepts", write([DOG | {"weight": 0.6}, STYLE]))
    assert compared(old, heavier) == ["concepts"] and settings_hash(old, 1) != settings_hash(heavier, 1)
    assert compared(parse("--concepts", write([ONE])), parse("--concepts", write([ONE | {"weight": 2}])))


def test_a_checkpoint_from_before_there_were_concepts_can_be_resumed():
    config = parse("--instance_data_dir", "a", "--instance_prompt", "b")
    old = {name: value for name, value in to_flat_dict(config).items() if name != "concepts"}
    assert changed_settings(with_defaults(old), to_flat_dict(config), world_size_old=1, world_size_new=1) == []


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_with_a_trigger_is_drawn_for_each_concept(write):
    cat = {"dir": "pics/cat", "prompt": "a {trigger} cat", "trigger": "ohwx"}
    flags = ("--validation_prompt", "{trigger} on the moon", "--validation_prompt", "a tree")
    config = parse("--concepts", write([DOG, cat, STYLE]), *flags)
    assert validation_prompts(config) == ("sks on the moon", "ohwx on the moon", "a tree")
    listed = write([STYLE])
    assert any("needs a trigger in --concepts" in p for p in problems("--concepts", listed, *flags))


def test_each_concept_is_held_to_its_own_class(write):
    cat = {"dir": "pics/cat", "prompt": "a photo of ohwx cat", "class": "cat"}
    entries = [DOG | {"class": "dog"}, cat, STYLE | {"class": "", "caption_dropout": 0}]
    dog, ohwx, ink = concepts_of(parse("--concepts", write(entries)))
    assert preserved_prompt(dog.prompt, dog) == "a photo of dog"
    assert preserved_prompt(ohwx.prompt, ohwx) == "a photo of cat"
    assert preserved_prompt(ink.prompt, ink) == ""
