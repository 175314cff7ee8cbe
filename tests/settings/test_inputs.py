"""What a user may give the program, as pipes, numbers and texts: used as it is meant, or refused in one clear line."""

import os
import shlex
import time

import pytest
import yaml
from program import command, flags, run, trainer
from safetensors.numpy import load_file

from flux_db.check.files import check_files
from flux_db.check.values import check_values, warnings
from flux_db.errors import UserError
from flux_db.settings.command_line import MOST_UNKNOWN, lasting_flags, parse_config, read_config, store_config

REQUIRED = ["--pretrained_model_name_or_path=a/b", "--instance_data_dir=pictures", "--instance_prompt=dog"]


def refused(*words: str) -> str:
    """The only problem."""
    with pytest.raises(UserError) as caught:
        parse_config([*REQUIRED, *words], checks=(check_values,))
    (problem,) = caught.value.problems
    return problem


# --- --config from a pipe ----------------------------------------------------------------------------------------


def shell(text: str, **options):
    return run(["bash", "-c", text], **options)


@pytest.mark.parametrize(
    "line",
    [
        "{program} --config <(echo {yaml})",
        "echo {yaml} | {program} --config /dev/stdin",
        "{program} --config /dev/stdin <<< {yaml}",
        "{program} --config=/dev/fd/5 5< <(sleep 0.3; echo {yaml})",
    ],
    ids=["process substitution", "pipeline", "here string", "late"],
)
@pytest.mark.parametrize("dry_run", [False, True], ids=["check", "dry run"])
def test_a_pipe_is_read_once_and_nothing_of_it_is_lost(world, tmp_path, line, dry_run):
    """With lr_warmup_steps from the pipe the run is refused; without it, it would be fine."""
    words = trainer(world.settings(tmp_path / "out", dry_run=True)) if dry_run else None
    words = words or command("check", *flags(world.settings(tmp_path / "out")))
    text = "{lr_scheduler: cosine, lr_warmup_steps: 77}"
    done = shell(line.format(program=shlex.join(words), yaml=shlex.quote(text)))
    assert done.returncode == 2, done.stdout
    assert "error: --lr_warmup_steps 77: longer than the run of --max_train_steps 4" in done.stderr


def test_rank_7_asked_rank_7_trained(world, tmp_path):
    output = tmp_path / "out"
    settings = world.settings(output, lora_layers="single_transformer_blocks.0.attn.to_q", optimizer="prodigy")
    del settings["rank"], settings["learning_rate"]
    words = shlex.join(trainer(settings))
    done = shell(f"{words} --config <(echo 'rank: 7'; echo 'max_train_steps: 2'; echo 'learning_rate: 1e-4')")
    assert done.returncode == 0, done.stderr[-2000:]
    tensors = load_file(output / "pytorch_lora_weights.safetensors")
    assert [tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name] == [7]
    assert yaml.safe_load((output / "config.yaml").read_text())["rank"] == 7
    assert "warning: --learning_rate 0.0001: Prodigy finds its step size itself" in done.stderr


def test_a_pipe_that_nobody_writes_to_does_not_hang(world, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    begin = time.monotonic()
    done = run(command("check", "--config", tmp_path / "pipe", *flags(world.settings(tmp_path / "out"))), timeout=30)
    assert done.returncode == 2 and time.monotonic() - begin < 20
    assert done.stderr == (
        f"error: --config {tmp_path / 'pipe'}: cannot be read: is a pipe that was not written within 10 seconds\n"
    )


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/"])
def test_a_config_is_a_file_or_a_pipe(name):
    assert refused("--config", name).startswith(f"--config {name}: cannot be read: is a ")


def test_flags_for_another_process_name_a_file_that_lasts(tmp_path):
    (tmp_path / "run.yaml").write_text("rank: 7")
    words = [*REQUIRED, "--config", str(tmp_path / "run.yaml"), "--seed=3"]
    config = read_config(words).config
    assert lasting_flags(words, lambda: store_config(config, tmp_path)) == words
    os.mkfifo(tmp_path / "pipe")
    for given in (["--config", str(tmp_path / "pipe")], ["--config=/dev/stdin"], ["--config", "/dev/fd/63"]):
        stored = lasting_flags([*REQUIRED, *given, "--seed=3"], lambda: store_config(config, tmp_path / "logs"))
        assert stored[:-1] == [*REQUIRED, "--seed=3", "--config"]
        assert parse_config(stored) == config and config.lora.rank == 7


def test_a_launch_from_a_pipe_gives_its_settings_to_its_processes(world, tmp_path):
    settings = world.settings(tmp_path / "out", dry_run=True)
    del settings["max_train_steps"]
    words = shlex.join(command("launch", "--cards", 2, "--", *flags(settings)))
    done = shell(f"{words} --config <(echo 'max_train_steps: 123')")
    assert done.returncode == 0, done.stderr
    assert "x 2 devices = 2" in done.stdout and "123 in all" in done.stdout


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *((name, 10**9) for name in ("repeats", "rank", "train_batch_size", "num_validation_images")),
        *((name, 10**9) for name in ("num_class_images", "gradient_accumulation_steps", "sample_batch_size")),
        *((name, 10**9) for name in ("validation_inference_steps", "max_buckets", "cache_crops")),
        *((name, 10**12) for name in ("max_train_steps", "num_train_epochs", "checkpointing_steps")),
        ("dataloader_num_workers", 10**6),
        ("resolution", 102400),
        ("learning_rate", "1e300"),
        ("guidance_scale", "1e39"),
        ("lora_alpha", "1e30"),
        ("max_grad_norm", "1e40"),
    ],
)
def test_numbers_beyond_any_use_are_refused(flag, value):
    assert refused(f"--{flag}={value}").startswith(f"--{flag} {float(value) if 'e' in str(value) else value}: must be ")


@pytest.mark.parametrize("value", ["1e400", "nan", "inf", "-inf", "9" * 5000], ids=lambda value: value[:5])
def test_a_number_is_finite_and_what_is_none_is_not_shown_whole(value):
    problem = refused(f"--learning_rate={value}")
    assert problem.startswith("--learning_rate: expects a finite number, not '") and len(problem) < 200


@pytest.mark.parametrize("value", ["9" * 20, "9" * 5000, "0x" + "f" * 6000, "1_" * 3000 + "1"], ids=lambda v: v[:5])
def test_a_whole_number_has_an_end(value, tmp_path):
    problem = refused(f"--rank={value}")
    assert problem.startswith("--rank: expects a whole number of at most 19 digits, not '") and len(problem) < 200
    (tmp_path / "a.yaml").write_text(f"rank: {value}")
    assert "rank" in (problem := refused(f"--config={tmp_path / 'a.yaml'}")) or "cannot be read" in problem
    assert len(problem) < 250


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--lora_layers=,,,"], "--lora_layers ,,,: names no layer; give some, or leave it out"),
        (["--validation_size=99999999999x16"], "--validation_size 99999999999x16: expects height x width"),
        (["--validation_size=8192x16"], "--validation_size 8192x16: both sides must be multiples of 16, up to 4096"),
        (["--aspect_ratio_buckets=" + "9" * 5000 + ",16"], "--aspect_ratio_buckets: "),
        (["--instance_prompt=dog\udcff"], "--instance_prompt: has something in it that is no character"),
        (["--output_dir=a\ud800"], "--output_dir: has something in it that is no character"),
        (["--validation_prompt=a", "--validation_prompt=\0"], "--validation_prompt: has a NUL character in it"),
        (["--device=" + "x" * 10**5], "--device: expects one of auto, Ascend, CPU, not xxx"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_values_that_mean_nothing(words, problem):
    found = refused(*words)
    assert found.startswith(problem)


def test_the_length_of_a_run_counted_in_epochs_is_known_before_it_starts(world, tmp_path):
    settings = world.settings(tmp_path / "out", num_train_epochs=4, lr_scheduler="cosine", lr_warmup_steps=13)
    del settings["max_train_steps"]
    done = run(command("check", *flags(settings)))
    assert done.returncode == 2
    assert done.stderr == (
        "error: --lr_warmup_steps 13: longer than the run of --num_train_epochs 4, which has 12 steps; shorten the"
        " warm-up\n"
    )
    assert run(command("check", *flags(settings | {"lr_warmup_steps": 12}))).returncode == 0
    more = run(command("check", *flags(settings | {"num_train_epochs": 10**8, "repeats": 100})))
    assert "error: --num_train_epochs 100000000: makes 30000000000 steps; at most 10000000 are" in more.stderr


# --- prodigy -----------------------------------------------------------------------------------------------------


def test_prodigy_has_a_learning_rate_with_which_it_learns_and_another_is_warned_of(world, tmp_path):
    config = parse_config([*REQUIRED, "--optimizer=prodigy"])
    assert config.optim.learning_rate == 1.0 and warnings(config) == []
    assert parse_config(REQUIRED).optim.learning_rate == 1e-4
    (warning,) = warnings(parse_config([*REQUIRED, "--optimizer=prodigy", "--learning_rate=1e-4"]))
    assert warning.startswith("--learning_rate 0.0001: Prodigy finds its step size itself")
    done = run(command("check", *flags(world.settings(tmp_path / "out", optimizer="prodigy", learning_rate=0.01))))
    assert done.returncode == 0 and "  ! --learning_rate 0.01: Prodigy finds its step size itself" in done.stdout


# --- YAML --------------------------------------------------------------------------------------------------------


def test_a_file_full_of_keys_that_are_none_is_refused_in_a_few_lines(tmp_path):
    (tmp_path / "a.yaml").write_text("".join(f"key{n}: 1\n" for n in range(5000)))
    with pytest.raises(UserError) as caught:
        parse_config([*REQUIRED, f"--config={tmp_path / 'a.yaml'}"], checks=(check_values,))
    assert len(caught.value.problems) == MOST_UNKNOWN + 1
    assert caught.value.problems[-1] == f"{tmp_path / 'a.yaml'}: 4980 more keys that are no settings"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('instance_prompt: "\\ud800"', "instance_prompt: has something in it that is no character"),
        ('output_dir: "a\\0b"', "output_dir: has a NUL character in it"),
        ("rank: .inf", "rank: expects a whole number, not inf"),
        ("learning_rate: .nan", "learning_rate: expects a finite number, not nan"),
        ("rank: &a [1, *a]", "not valid YAML at line 1: an anchor that holds itself"),
    ],
)
def test_yaml_that_no_setting_can_have(tmp_path, text, problem):
    (tmp_path / "a.yaml").write_text(text)
    assert problem in refused(f"--config={tmp_path / 'a.yaml'}")


def test_a_bomb_of_aliases_is_one_line(world, tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    (tmp_path / "a.yaml").write_text("\n".join([*lines, "rank: *a9"]))
    done = run(command("check", "--config", tmp_path / "a.yaml", *flags(world.settings(tmp_path / "out"))), timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: --config {tmp_path / 'a.yaml'}: not valid YAML at line 5: aliases that expand to more than 20,000"
        " values\n"
    )


# --- files of prompts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: os.mkfifo(path), "is a pipe, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
        (lambda path: path.mkdir(), "is a folder, not a file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"a dog\0"), "has a NUL character in it"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not a text file in UTF-8"),
        (lambda path: path.write_text("dog\n" * 10_001), "has 10,001 prompts; at most 10,000 can be drawn"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**31), "has more than 16 MiB"),
    ],
    ids=["pipe", "zero", "folder", "loop", "nul", "bytes", "many", "sparse"],
)
def test_prompts_come_from_a_file_of_a_sane_size(world, tmp_path, make, problem):
    path = tmp_path / "prompts.txt"
    make(path)
    settings = flags(world.settings(tmp_path / "out", validation_prompts_file=path))
    with pytest.raises(UserError, match=problem):
        read_config(settings).checked(check_values, check_files)
