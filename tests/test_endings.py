"""How the program ends when its surroundings fail it: streams, encodings, folders, memory; as a user starts it."""

import errno
import os
import signal
import socket
import subprocess

import pytest
from program import PYTHON, ROOT, SCRIPT, command, environment, run, start, trainer
from world import lora_bytes, metrics

from flux_db import errors
from flux_db.errors import RunError, UserError, run_guarded
from flux_db.output_folder import LORA_FILE

# LoRA in one layer only: the step compiles in seconds
QUICK = {"lora_layers": "single_transformer_blocks.0.attn.to_q", "max_train_steps": 3, "report_to": "tensorboard"}


def check(world, output, **changes):
    return command("check", *trainer(world.settings(output, **changes))[2:])


def redirected(words, redirection):
    return ["sh", "-c", f'exec "$@" {redirection}', "sh", *words]


@pytest.fixture
def dead_pipe():
    """A pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


# --- exit codes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["-m", "flux_db", "check"], [str(SCRIPT)]], ids=["command", "trainer"])
def test_a_python_without_the_packages_is_one_line_with_the_command_that_helps(words):
    done = run([PYTHON, "-S", *words])
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "has no package tqdm; " in line
    is_installed = (ROOT / ".venv" / "bin" / "activate").is_file()
    assert line.endswith("source .venv/bin/activate" if is_installed else "pip install -e . in its folder")


@pytest.mark.parametrize(
    ("problem", "code", "text"),
    [
        (UserError("--rank 0: too small"), 2, "error: --rank 0: too small"),
        (UserError(["one", "two"]), 2, "error: 2 problems\n- one\n- two"),
        (RunError("the encode stage failed"), 1, "error: the encode stage failed"),
        (OSError(errno.EIO, "Input/output error", "/a/b"), 1, "error: /a/b: Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied", "x\ny"), 1, "error: x\\ny: Permission denied"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/a"),
            1,
            "error: /a: No space left on device; make room, then start again: what was written before is whole",
        ),
        (OSError("cannot load\n  the file"), 1, "error: cannot load the file"),
        (MemoryError(), 1, "error: not enough memory: MemoryError; what was written before is whole"),
        (RecursionError("maximum depth"), 1, "error: a file or a setting is nested too deeply to be read"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
    ],
)
def test_every_ending_has_its_code_and_its_line(capsys, problem, code, text):
    def main():
        raise problem

    assert run_guarded(main) == code
    assert capsys.readouterr() == ("", text + "\n")


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_guarded(lambda: 1 // 0)


def test_ctrl_c_ends_a_command_in_one_line(tmp_path):
    """An upload to a server that takes the connection and never answers."""
    (tmp_path / LORA_FILE).write_bytes(b"a LoRA")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        variables = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_x", "NO_PROXY": "127.0.0.1"}
        words = command("push", tmp_path, "--hub_model_id", "me/dog")
        process = start(words, env=environment(tmp_path, **variables), stderr=subprocess.PIPE)
        connection, _ = server.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            text = process.communicate(timeout=120)[1]
    assert (process.returncode, text) == (130, "stopped by Ctrl-C\n")


# --- streams -----------------------------------------------------------------------------------------------------


def test_a_reader_that_has_seen_enough_is_no_failure(world, tmp_path, dead_pipe):
    done = run(check(world, tmp_path), capture_output=False, stdout=dead_pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(check(world, tmp_path, rank=0), capture_output=False, stdout=dead_pipe, stderr=dead_pipe)
    assert done.returncode == 2


def test_a_result_that_cannot_be_written_is_a_failure(world, tmp_path):
    done = run(redirected(check(world, tmp_path), ">/dev/full"))
    assert (done.returncode, done.stderr) == (1, "error: the output could not be written: No space left on device\n")
    assert run(redirected(check(world, tmp_path), ">/dev/full 2>/dev/full")).returncode == 1


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(world, tmp_path, redirection):
    done = run(redirected(check(world, tmp_path), redirection))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "pictures.csv").exists()
    assert run(redirected(check(world, tmp_path, rank=0), redirection)).returncode == 2


def test_a_run_outlives_its_terminal(world, tmp_path, dead_pipe):
    """`python train_dreambooth_lora_flux.py ... >&- 2>&1 | head -1`: also the process that encodes."""
    output = tmp_path / "out"
    settings = world.settings(output, encode_cache_dir=tmp_path / "cache", **QUICK)
    words = redirected(trainer(settings), "<&- >&-")
    done = run(words, capture_output=False, stdout=dead_pipe, stderr=dead_pipe)
    assert done.returncode == 0
    assert lora_bytes(output) and [row["step"] for row in metrics(output)] == [1, 2, 3]
    (events,) = (output / "logs").iterdir()
    assert b"train/loss" in events.read_bytes()


# --- locale and folders ------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(world, tmp_path):
    """Pictures and captions with letters that few encodings have, and a name that is no text at all."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    picture = (world.pictures / "dog_00.png").read_bytes()
    (folder / "köpek 🐶.png").write_bytes(picture)
    (folder / "köpek 🐶.txt").write_text("собака 🐶 犬", encoding="utf-8")
    (folder / os.fsdecode(b"\xff\xfe.png")).write_bytes((world.pictures / "dog_01.png").read_bytes())
    return folder


@pytest.mark.parametrize(
    "variables",
    [
        {"LANG": "C"},
        {"LC_ALL": "POSIX"},
        {"PYTHONIOENCODING": "ascii:strict"},
        {"PYTHONIOENCODING": "gbk"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=str,
)
def test_letters_that_the_terminal_lacks_are_escaped(world, foreign, tmp_path, variables):
    # a Python that is forced to ASCII knows no letters of flags, and takes those of file names for bytes
    ascii_only = "PYTHONUTF8" in variables
    output = tmp_path / ("out" if ascii_only else "öut 犬")
    words = check(world, output, instance_data_dir=foreign)
    done = run(words, env=environment(**variables))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\udcff\\udcfe.png" in done.stdout
    if "PYTHONIOENCODING" in variables:
        assert "k\\xf6pek \\U0001f436.png" in done.stdout
    name = "k\\udcc3\\udcb6pek" if ascii_only else "köpek 🐶.png"
    assert name in (output / "pictures.csv").read_text(encoding="utf-8")


def test_a_run_in_another_encoding_without_home_and_tmpdir(world, foreign, tmp_path):
    """mindone prints an emoji when it is imported, which an ASCII or GBK terminal does not have."""
    output = tmp_path / "öut"
    settings = world.settings(output, instance_data_dir=foreign, encode_cache_dir=tmp_path / "cache", **QUICK)
    path = environment()["PATH"]
    done = run(trainer(settings), env={"PATH": path, "PYTHONIOENCODING": "gbk", "TMPDIR": str(tmp_path / "nowhere")})
    assert done.returncode == 0, done.stderr[-2000:]
    assert lora_bytes(output)
    assert "warning: the report" not in done.stderr


def test_a_folder_that_is_gone(world, tmp_path):
    gone = tmp_path / "gone"
    for words in (check(world, tmp_path / "out"), trainer(world.settings(tmp_path / "out"))):
        gone.mkdir()
        done = run(["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *words], cwd=gone)
        assert (done.returncode, done.stdout) == (2, "")
        assert (
            done.stderr == "error: the current folder is gone (No such file or directory): change to one that exists\n"
        )


# --- what a library still wants ------------------------------------------------------------------------------------


def test_a_library_that_hangs_does_not_keep_the_program(monkeypatch):
    ends = []
    monkeypatch.setattr(errors, "_left_behind", ["wandb"])
    monkeypatch.setattr(os, "_exit", ends.append)
    run_guarded(lambda: 7)
    assert ends == [7]
