"""What a command prints about itself, and of a mistake in its flags."""

import program
import pytest


def lines_of(*words, **options):
    done = program.run(program.command(*words), **options)
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("name", "purpose"),
    [
        ("check", "Report what a run would do"),
        ("prepare", "Draw class pictures and encode everything"),
        ("encode", "Encode prompts and pictures into the cache"),
        ("class-images", "Draw the class pictures that prior preservation lacks"),
        ("device", "Print which device a run would use"),
        ("dry-run-ascend", "Compute a run's device memory on a machine with CANN"),
    ],
)
def test_a_command_with_the_flags_of_the_trainer_describes_itself(name, purpose):
    code, text, _ = lines_of(name, "--help")
    assert lines_of(name, "--help-all")[1].splitlines()[:4] == text.splitlines()[:4]
    assert code == 0 and text.startswith(f"usage: python -m flux_db {name} ") and "--instance_data_dir" in text
    assert purpose in " ".join(text.split()) and "Train a DreamBooth LoRA" not in text


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["info"], "error: the following arguments are required: lora; python -m flux_db info --help"),
        (["export", "x", "--format", "zip", "-o", "y"], "error: --format: invalid choice: 'zip'"),
        (["report", "x", "--foo"], "error: unrecognized arguments: --foo; python -m flux_db report --help"),
        (
            ["plan", "--card", "0"],
            "error: --card: must be a whole number from 1 to 1024; python -m flux_db plan --help",
        ),
        (["launch"], "error: the following arguments are required: --devices/--cards; python -m flux_db launch"),
        (["generate", "--size", "5", "--model", "m"], "error: --size: must be height x width in multiples of 16"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_in_the_flags_of_a_command_is_one_line(words, start):
    code, text, errors = lines_of(*words)
    assert (code, text, len(errors)) == (2, "", 1) and errors[0].startswith(start)


def test_generate_names_its_own_flag_for_a_model_that_cannot_be_fetched(tmp_path):
    offline = program.environment(HF_HUB_OFFLINE="1")
    code, _, errors = lines_of(
        "generate", "--model", "owner/model", "--prompt", "x", "-o", tmp_path / "out", env=offline
    )
    assert code == 2 and errors[-1].startswith("error: --model owner/model: is not a folder here")


def test_no_warnings_are_counted_above_warnings(world, tmp_path):
    settings = world.settings(tmp_path / "out", guidance_scale=2.0, trigger_word="sks")
    code, text, _ = lines_of("check", *program.flags(settings))
    assert code == 0 and "Warnings: in general " in text and "no caption and no prompt holds" in text


def test_one_is_not_written_as_several(world, tmp_path):
    settings = world.settings(tmp_path / "out", max_train_steps=3)
    code, text, _ = lines_of("check", *program.flags(settings))
    assert code == 0 and "is seen 1 time\n" in text
