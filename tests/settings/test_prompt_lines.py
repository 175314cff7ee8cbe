"""Lines of prompts with options at their end."""

import pytest

from flux_db.check.files import check_files
from flux_db.check.values import check_values
from flux_db.errors import UserError
from flux_db.lora import generate_flags
from flux_db.settings.command_line import read_config
from flux_db.settings.derived import sample_prompts, validation_prompts
from flux_db.settings.prompt_lines import PromptLine, parse_line, read_prompts
from flux_db.settings.schema import from_flat_dict
from flux_db.size import Size

FULL = "a photo of sks dog --w 768 --h 512 --seed 3 --steps 20 --guidance 4 --lora 0.8"


def test_a_line_with_every_option():
    line = parse_line(FULL)
    expected = {"width": 768, "height": 512, "seed": 3, "steps": 20, "guidance": 4.0, "lora": 0.8}
    assert line == PromptLine(text="a photo of sks dog", **expected)
    assert f"{line.text} {line.options}" == FULL
    assert line.size(Size(64, 32)) == (512, 768), "--h is the height"


@pytest.mark.parametrize(
    ("text", "prompt", "options"),
    [
        ("a dog", "a dog", ""),
        ("a dog -- at sunset, 3-4 m tall", "a dog -- at sunset, 3-4 m tall", ""),
        ("sun--dog", "sun--dog", ""),
        ("  a dog   --h  48 ", "a dog", "--h 48"),
        ("a dog --seed 4294967295", "a dog", "--seed 4294967295"),
        ("a dog --lora -1.5 --guidance 0", "a dog", "--guidance 0 --lora -1.5"),
    ],
)
def test_options_are_only_what_looks_like_one(text, prompt, options):
    line = parse_line(text)
    assert (line.text, line.options) == (prompt, options)


def test_one_side_alone_leaves_the_other_as_usual():
    assert parse_line("a dog --w 48").size(Size(64, 32)) == (64, 48)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--w 512", "no prompt before the options"),
        ("a dog --w 500", "--w 500: must be a multiple of 16, up to 4096"),
        ("a dog --w", "--w: must be a multiple of 16"),
        ("a dog --h 0", "--h 0: must be a multiple of 16"),
        ("a dog --w 16 --w 32", "--w is given twice"),
        ("a dog --seed -1", "--seed -1: must be a whole number from 0 to 4294967295"),
        ("a dog --seed 4294967296", "--seed 4294967296: must be"),
        ("a dog --steps 1001", "--steps 1001: must be a whole number from 1 to 1000"),
        ("a dog --guidance nan", "--guidance nan: must be a number from 0 to 1000"),
        ("a dog --lora 11", "--lora 11: must be a number from -10 to 10"),
        ("a dog --step 3", "--step is no option: the prompt comes first"),
        ("a dog --w 32 in the park", "in is no option: the prompt comes first"),
    ],
)
def test_what_is_wrong_with_a_line(text, problem):
    with pytest.raises(ValueError) as caught:
        parse_line(text)
    assert str(caught.value).startswith(problem)


def settings(tmp_path, text, **changes):
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    values = {"pretrained_model_name_or_path": str(tmp_path), "instance_data_dir": str(tmp_path)}
    values |= {"instance_prompt": "a dog", "validation_prompts_file": str(file), "output_dir": str(tmp_path / "out")}
    return file, from_flat_dict(values | changes)


def test_errors_name_file_and_line_all_at_once(tmp_path):
    file, config = settings(tmp_path, "# prompts\na dog --w 7\n\na dog\na dog --sped 3\n")
    problems = [text for text in check_files(config) if "prompts_file" in text]
    assert [text.split(": ")[0] for text in problems] == [
        f"--validation_prompts_file {file}, line 2",
        f"--validation_prompts_file {file}, line 5",
    ]
    words = ["--model", str(tmp_path), "--prompts_file", str(file), "-o", str(tmp_path / "drawn")]
    with pytest.raises(UserError) as caught:
        generate_flags.read(words)
    assert f"--prompts_file {file}, line 2: --w 7: must be a multiple of 16, up to 4096" in caught.value.problems


def test_the_same_prompt_with_other_options_is_drawn_by_itself(tmp_path):
    _, config = settings(tmp_path, "a {trigger}\na {trigger} --seed 3\na sks --seed 3\n", trigger_word="sks")
    assert [(line.text, line.seed) for line in sample_prompts(config)] == [("a sks", None), ("a sks", 3)]
    assert validation_prompts(config) == ("a sks",), "encoded once"


def test_a_factor_on_loras_needs_one(tmp_path):
    file, _ = settings(tmp_path, "a dog --lora 0.5\n")
    with pytest.raises(UserError) as caught:
        generate_flags.read(["--model", str(tmp_path), "--prompts_file", str(file), "-o", str(tmp_path / "drawn")])
    assert any("a line has --lora, a factor on LoRAs; give a --lora FILE" in text for text in caught.value.problems)


def test_prompts_of_a_file_without_options_are_as_before(tmp_path):
    file, _ = settings(tmp_path, "a dog\na cat\n")
    assert read_prompts(file, "prompts_file") == [PromptLine(text="a dog"), PromptLine(text="a cat")]


def test_prompts_of_samples_follow_the_subject():
    values = {"pretrained_model_name_or_path": "m", "instance_data_dir": "p", "instance_prompt": "a photo of {trigger}"}
    lines = ["{instance_prompt} in a bucket", "{class_prompt} at night", "{trigger} alone", "a cat"]
    one = from_flat_dict(values | {"trigger_word": "sks", "class_prompt": "a bird", "validation_prompt": lines})
    assert validation_prompts(one) == ("a photo of sks in a bucket", "a bird at night", "sks alone", "a cat")
    concepts = [{"dir": "a", "prompt": "a {trigger} dog", "trigger": "sks"}, {"dir": "b", "prompt": "ukj style"}]
    several = from_flat_dict({"pretrained_model_name_or_path": "m", "concepts": concepts, "validation_prompt": lines})
    assert validation_prompts(several)[:3] == ("a sks dog in a bucket", "ukj style in a bucket", lines[1])


def test_a_class_prompt_that_is_not_given_has_no_place(tmp_path):
    (tmp_path / "prompts.txt").write_text("{class_prompt} at night")
    words = ["--pretrained_model_name_or_path=m", "--instance_data_dir=p", "--instance_prompt=a sks dog"]
    words += ["--validation_prompt={class_prompt}", f"--validation_prompts_file={tmp_path}/prompts.txt"]
    given = read_config(words)
    texts = [problem for problem in given.problems_by(check_values, check_files) if "{class_prompt}" in problem]
    assert len(texts) == 2 and all("needs --class_prompt, which takes the place of {class_prompt}" in t for t in texts)
