"""The script as a user runs it: bad input, signals, two runs at once, and crashes."""

import contextlib
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import program
import pytest
from PIL import Image
from world import lora_bytes, metrics, without_time

# LoRA in one layer only: the step compiles in seconds
# ... and enough steps that a signal meets the run alive on a fast machine too
STEPS = 400
QUICK = {"lora_layers": "single_transformer_blocks.0.attn.to_q", "max_train_steps": STEPS, "checkpointing_steps": 1000}


def run(settings: dict, **options) -> subprocess.CompletedProcess:
    return program.run(program.trainer(settings), **options)


# --- bad input ---------------------------------------------------------------------------------------------------


def test_all_problems_at_once_before_anything_is_written(world, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cut.png").write_bytes((world.pictures / "dog_00.png").read_bytes()[:200])
    (tmp_path / "pictures" / "empty.jpg").write_bytes(b"")
    settings = world.settings(
        tmp_path / "out", instance_data_dir=tmp_path / "pictures", resolution=50, rank=0, lora_layers="attn.to_x",
        mixed_precision="bf16", with_prior_preservation=True,
    )  # fmt: skip
    start = time.monotonic()
    done = run(settings)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for part in ("cut.png", "empty.jpg", "--resolution 50", "--rank 0", "attn.to_x", "bf16", "--class_prompt"):
        assert part in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()
    assert time.monotonic() - start < 60  # no model; that MindSpore is not imported, test_repo.py checks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instance_data_dir": "nowhere"}, "--instance_data_dir nowhere: no such folder"),
        ({"pretrained_model_name_or_path": "./nowhere"}, "--pretrained_model_name_or_path ./nowhere"),
        ({"output_dir": "/proc/nowhere"}, "--output_dir /proc/nowhere"),
        ({"resume_from_checkpoint": "nowhere"}, "nowhere"),
        ({"learning_rat": "1"}, "did you mean --learning_rate"),
        ({"zero_stage": 3}, "--zero_stage: not used here"),
    ],
)
def test_bad_input_is_named(world, tmp_path, change, message):
    done = run(world.settings(tmp_path / "out") | change)
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


def test_an_empty_picture_folder_and_a_model_part_missing(world, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for path in world.model.iterdir():
        if path.name != "vae":
            (model / path.name).symlink_to(path)
    (tmp_path / "pictures").mkdir()
    done = run(
        world.settings(tmp_path / "out", pretrained_model_name_or_path=model, instance_data_dir=tmp_path / "pictures")
    )
    assert done.returncode == 2
    assert "vae" in done.stderr and "no pictures" in done.stderr, done.stderr


# --- stopping and going on ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calm_run(world, tmp_path_factory):
    """A run that nobody disturbs, and what it prints."""
    output = tmp_path_factory.mktemp("calm")
    done = run(world.settings(output, **QUICK))
    assert done.returncode == 0, done.stderr[-2000:]
    assert str(output / "pytorch_lora_weights.safetensors") in done.stdout
    assert json.loads((output / "train_state.json").read_text())["status"] == "finished"
    return output, done.stdout


@pytest.fixture(scope="module")
def calm(calm_run):
    return calm_run[0]


def test_the_last_line_of_a_run_is_the_command_that_draws_with_it(calm_run):
    output, printed = calm_run
    name, command = printed.splitlines()[-1].split(maxsplit=1)
    assert name == "next:" and "--prompt 'a photo of sks dog in the forest'" in command
    done = program.run(["bash", "-c", command])
    assert done.returncode == 0, done.stderr
    with Image.open(f"{output}-pictures/000-00.png") as picture:
        assert picture.size == (32, 32)


def read_all(descriptor):
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 65536):
            pass


def wait_for_steps(process, output, count, meanwhile=lambda: None):
    end = time.monotonic() + 200
    while time.monotonic() < end and process.poll() is None:
        meanwhile()
        path = output / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        time.sleep(0.01)
    pytest.fail(f"no {count} steps: exit code {process.poll()}")


def assert_saved(output):
    state = json.loads((output / "train_state.json").read_text())
    assert state["status"] == "interrupted" and 3 <= state["step"] < STEPS
    assert Path(state["last_good_checkpoint"]).name == f"checkpoint-{state['step']}"


def test_sigterm_saves_and_the_printed_command_goes_on_to_the_same_bytes(world, calm, tmp_path):
    output = tmp_path / "out"
    process = program.start(program.trainer(world.settings(output, **QUICK)), stderr=subprocess.PIPE)
    wait_for_steps(process, output, 3)
    second = run(world.settings(output, **QUICK))
    assert second.returncode == 2 and str(process.pid) in second.stderr, second.stderr
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM, text[-2000:]
    assert_saved(output)
    command = shlex.split(text.strip().splitlines()[-1])
    assert command[0] == "python" and "Traceback" not in text
    done = program.run([program.PYTHON, *command[1:]])
    assert done.returncode == 0, done.stderr[-2000:]
    assert lora_bytes(output) == lora_bytes(calm)
    assert without_time(metrics(output)) == without_time(metrics(calm))


def test_ctrl_c_saves_also_if_a_library_has_started_threads_before(world, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import numpy\n")
    output = tmp_path / "out"
    environment = program.environment(PYTHONPATH=str(tmp_path))
    words = program.trainer(world.settings(output, **QUICK))
    process = program.start(words, env=environment, stderr=subprocess.PIPE)
    wait_for_steps(process, output, 3)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGINT, text[-2000:]
    assert_saved(output)
    assert "--resume_from_checkpoint latest" in text.splitlines()[-1] and "Traceback" not in text


def test_a_terminal_that_is_closed_saves(world, tmp_path):
    """The terminal sends SIGHUP, and from then on refuses what is written to it."""
    output = tmp_path / "out"
    terminal, its_end = pty.openpty()
    words = ["setsid", "--ctty", *program.trainer(world.settings(output, **QUICK))]
    process = program.start(words, stdin=its_end, stdout=its_end, stderr=its_end)
    os.close(its_end)
    os.set_blocking(terminal, False)
    try:
        wait_for_steps(process, output, 3, meanwhile=lambda: read_all(terminal))
    finally:
        os.close(terminal)
    assert process.wait(60) == 128 + signal.SIGHUP
    assert_saved(output)


def test_killed_and_resumed(tmp_path):
    sys.path.insert(0, str(program.ROOT / "scripts"))
    from crash_test import crash_test

    result = crash_test(tmp_path, kills=2)
    assert result.ok, result


def test_no_network_is_needed(world, tmp_path):
    """With local paths, a run whose every connection is refused works."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import socket\n"
        "def refuse(*a, **k):\n    raise AssertionError('network call')\n"
        "socket.socket.connect = refuse\nsocket.getaddrinfo = refuse\n"
    )
    environment = program.environment(PYTHONPATH=str(site))
    done = run(world.settings(tmp_path / "out", **QUICK | {"max_train_steps": 2}), env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "network call" not in done.stderr
