"""Where a command line of diffusers' or mindone's script means nothing or something else here: a line for each."""

import program
import pytest

from flux_db.check.peer_notes import notes
from flux_db.data.dataset import Dataset, Example
from flux_db.settings.command_line import read_config
from flux_db.size import Size

NEEDED = ["--pretrained_model_name_or_path", "m", "--instance_data_dir", "p", "--instance_prompt", "a dog"]
THEIRS = ["--rank", "4", "--lora_alpha", "4", "--guidance_scale", "3.5", "--train_batch_size", "4"]
PRIOR = ["--with_prior_preservation", "--class_data_dir", "c", "--class_prompt", "a dog"]
THERE = "in diffusers' and mindone's scripts"


def lines(*flags, pictures=5, devices=1):
    example = Example(picture=None, prompt="a dog", crop=(0.5, 0.5), size=Size.square(512))
    return notes(read_config([*NEEDED, *flags]), Dataset(examples=(example,) * pictures), devices)


def test_every_default_that_differs_is_named():
    assert lines() == [
        f"--rank is 16 unless it is given, 4 {THERE}",
        f"--guidance_scale is 1 unless it is given, 3.5 {THERE}",
        f"--train_batch_size is 1 unless it is given, 4 {THERE}",
        "--lora_alpha is --rank unless it is given, 4 in diffusers' script",
    ]


def test_what_is_given_needs_no_note():
    assert lines(*THEIRS) == []
    assert lines(*THEIRS[:2], *THEIRS[4:]) == [], "alpha is the rank, which is 4 too"
    assert lines("--lora_rank", "4", *THEIRS[4:]) == [], "mindone's name"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--lr_scheduler", "cosine"], f"--lr_warmup_steps is 0 unless it is given, 500 {THERE}"),
        (["--optimizer", "prodigy"], "--learning_rate is 1 for Prodigy unless it is given, 0.0001 in diff"),
        ([*PRIOR], "--num_train_epochs 1: 2 steps here, 25 in diffusers' script, which makes an epoch of as many"),
        (
            [*PRIOR, "--max_train_steps", "9", "--validation_epochs", "3"],
            "--validation_epochs 3: 4 steps here, 75 in diffusers' script, which makes an epoch of as many pictures",
        ),
        (
            ["--num_train_epochs", "10", "--gradient_accumulation_steps", "4"],
            "--num_train_epochs 10: 4 steps here, 10 in diffusers' script, which ends each epoch with a step;"
            " --max_train_steps 10 gives as many",
        ),
    ],
)  # fmt: skip
def test_a_flag_that_means_something_else_is_named(flags, text):
    (line,) = lines(*THEIRS, *flags)
    assert line.startswith(text) and "\n" not in line and len(line) < 200


@pytest.mark.parametrize(
    "flags",
    [
        ["--lr_scheduler", "cosine", "--lr_warmup_steps", "5"],
        ["--optimizer", "prodigy", "--learning_rate", "1"],
        [*PRIOR, "--max_train_steps", "9"],
        [*PRIOR, "--max_train_steps", "9", "--validation_epochs", "3", "--validation_steps", "2"],
    ],
)
def test_where_it_means_the_same_there_is_no_note(flags):
    assert lines(*THEIRS, *flags) == []


def test_epochs_of_as_many_steps_need_no_note():
    epochs = ["--num_train_epochs", "10", "--validation_epochs", "3"]
    assert lines(*THEIRS, *epochs, pictures=8) == []
    assert lines(*THEIRS, *epochs, "--gradient_accumulation_steps", "2", pictures=16, devices=2) == []
    assert len(lines(*THEIRS, *epochs, "--gradient_accumulation_steps", "2", pictures=8, devices=2)) == 2


def test_a_yaml_file_is_no_command_line_of_theirs(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    assert lines("--config", str(tmp_path / "run.yaml")) == []
    (line,) = lines("--config", str(tmp_path / "run.yaml"), *PRIOR)
    assert "makes an epoch of as many" in line


# As the pages of diffusers' and mindone's scripts show them, with folders of this machine and smaller numbers.
DIFFUSERS = """
--mixed_precision=no --resolution=64 --train_batch_size=1 --guidance_scale=1 --gradient_accumulation_steps=4
--gradient_checkpointing --optimizer=adamw --use_8bit_adam --cache_latents --learning_rate=1e-4 --seed=0
--lr_scheduler=constant --lr_warmup_steps=200 --max_train_steps=100 --allow_tf32 --local_rank=-1
--prior_generation_precision=fp32"""
MINDONE = """
--mixed_precision=no --resolution=64 --train_batch_size=1 --guidance_scale=1 --optimizer=AdamW --lora_rank=4
--learning_rate=1e-4 --lr_scheduler=constant --lr_warmup_steps=0 --max_train_steps=100 --validation_epochs=25 --seed=0
--enable_mindspore_data_sink --mindspore_mode=0 --zero_stage=0 --jit_level=O1 --prodigy_decouple=True"""


@pytest.mark.parametrize(
    ("pasted", "ignored"),
    [
        (DIFFUSERS, ["use_8bit_adam", "lr_warmup_steps 200", "allow_tf32", "local_rank", "prior_generation_precision"]),
        (MINDONE, ["enable_mindspore_data_sink", "mindspore_mode", "zero_stage", "prodigy_decouple"]),
    ],
    ids=["diffusers", "mindone"],
)
def test_a_pasted_command_line_runs_with_a_line_for_each_flag_that_changes_nothing(world, tmp_path, pasted, ignored):
    own = {"pretrained_model_name_or_path": world.model, "instance_data_dir": world.pictures}
    own |= {"instance_prompt": "a photo of sks dog", "output_dir": tmp_path / "out"}
    done = program.run(program.command("check", *program.flags(own), *pasted.split()))
    assert done.returncode == 0, done.stderr
    lines = [line.strip(" !") for line in done.stdout.splitlines() if " is ignored: " in line]
    assert {line.split(" is ignored: ")[0] for line in lines} == {f"--{name}" for name in ignored}
