"""Ctrl-C, SIGTERM, SIGHUP and SIGKILL in every part of the program: what each does, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys

import program
import pytest
from program import descendants, is_alive, wait_until
from world import fill_cache

from flux_db.settings.schema import from_flat_dict

# Listens as the trainer does. A thread of a library that was imported before must not take the signal.
LISTENER = """
import sys, threading, time
if "threads" in sys.argv:
    import numpy
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
from flux_db.interrupt import StopRequest
stop = StopRequest().listen()
with (
    stop.finishing_steps(lambda: "begun" in sys.argv),
    stop.before_leaving(lambda: print("last words", flush=True)),
):
    print(open(sys.argv[1]).read(), end="", flush=True)
    while not stop.signal:
        time.sleep(0.01)
    print("stopping for", stop.signal.name, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def listen():
    """Start the listener; its first line comes from a pipe that it inherited, as from --config <(...)."""
    started = []

    def start(*words, through=()):
        read, write = os.pipe()
        os.write(write, b"ready\n")
        os.close(write)
        process = program.start(
            [*through, sys.executable, "-c", LISTENER, f"/dev/fd/{read}", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[read],
        )  # fmt: skip
        os.close(read)
        started.append(process)
        assert process.stdout.readline() == "ready\n", process.communicate()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("threads", [[], ["threads"]], ids=["alone", "with threads"])
def test_the_first_signal_is_noted_and_only_a_second_ctrl_c_is_in_a_hurry(listen, threads):
    process = listen("begun", *threads)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping for SIGTERM\n"
    for number in (signal.SIGTERM, signal.SIGHUP):  # as a scheduler or a closed terminal may send
        process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGINT
    assert errors == "SIGTERM: finishing this step, then saving (Ctrl-C again leaves at once)\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_with_nothing_begun_a_signal_ends_the_program_at_once(listen, number):
    process = listen("threads")
    process.send_signal(number)
    output, errors = process.communicate(timeout=5)
    assert (process.returncode, output) == (128 + number, "last words\n")
    assert errors == f"{number.name}: leaving at once; what is stored so far stays\n"


def test_what_was_ignored_at_the_start_stays_ignored(listen):
    process = listen("begun", through=["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh"])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGINT):
        process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping for SIGTERM\n"


EARLY = """
import os, signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "flux_db.errors":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
"""


@pytest.mark.parametrize("way", [program.trainer({}), program.command("check")], ids=["script", "command"])
def test_ctrl_c_during_the_first_imports_has_no_traceback(tmp_path, way):
    (tmp_path / "sitecustomize.py").write_text(EARLY)
    done = program.run(way, env=program.environment(PYTHONPATH=str(tmp_path)))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


# --- children ----------------------------------------------------------------------------------------------------


def child_of(process):
    """The first process that the program starts."""
    (child,) = wait_until(lambda: descendants(process.pid), 60, "a child")
    return child


def encoding(world, tmp_path, **changes):
    """Settings of a run that has to encode first."""
    return world.settings(tmp_path / "out", encode_cache_dir=str(tmp_path / "cache"), **changes)


def test_a_signal_while_encoding_ends_both_and_nothing_comes_from_the_users_folder(world, tmp_path):
    for name in ("yaml", "numpy", "random"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w').close()\n")
    settings = encoding(world, tmp_path)
    process = program.start(program.trainer(settings), cwd=tmp_path, stderr=subprocess.PIPE)
    child = child_of(process)
    text = ""
    while text.count("device CPU") < 2 and (line := process.stderr.readline()):
        text += line
    process.send_signal(signal.SIGTERM)
    text += process.communicate(timeout=20)[1]
    assert process.returncode == 128 + signal.SIGTERM, text
    # not always last: the child ends a moment later
    assert "SIGTERM: leaving at once; what is stored so far stays\n" in text and "Traceback" not in text
    wait_until(lambda: not is_alive(child), 5, "the end of the child")
    assert not (tmp_path / "was_run").exists()
    assert not (tmp_path / "out" / "train_state.json").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGINT])
def test_no_child_outlives_prepare(world, tmp_path, number):
    words = program.command("prepare", *program.flags(encoding(world, tmp_path)))
    process = program.start(words, stderr=subprocess.PIPE)
    child = child_of(process)
    process.send_signal(number)
    process.communicate(timeout=20)
    wait_until(lambda: not is_alive(child), 5, "the end of the child")


def test_no_child_outlives_generate(world, tmp_path):
    words = {"model": world.model, "prompt": "a dog", "size": "32x32", "device": "CPU", "output": tmp_path / "out"}
    process = program.start(program.command("generate", *program.flags(words)), stderr=subprocess.PIPE)
    child = child_of(process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    wait_until(lambda: not is_alive(child), 5, "the end of the child")


def test_a_child_that_is_killed_tells_so_in_one_line(world, tmp_path):
    words = program.command("prepare", *program.flags(encoding(world, tmp_path)))
    process = program.start(words, stderr=subprocess.PIPE)
    os.kill(child_of(process), signal.SIGKILL)
    text = process.communicate(timeout=20)[1]
    assert process.returncode == 128 + signal.SIGKILL, text
    assert text.endswith("error: the encode stage was ended by SIGKILL\n") and "Traceback" not in text


def test_commands_take_no_module_from_the_current_folder(world, tmp_path):
    for name in ("yaml", "numpy", "random"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w').close()\n")
    words = program.command("check", *program.flags(world.settings(tmp_path / "out")))
    done = program.run(words, cwd=tmp_path, env=program.environment(PYTHONPATH=str(program.ROOT)))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "was_run").exists()


# --- before the first step -----------------------------------------------------------------------------------------


def test_a_signal_while_compiling_leaves_at_once_and_the_run_does_not_claim_to_go_on(world, tmp_path):
    # with all encoded: beside an encoding the lines of compiling are held back
    settings = world.settings(tmp_path / "out", encode_cache_dir=str(tmp_path / "cache"))
    fill_cache(from_flat_dict(settings))
    process = program.start(program.trainer(settings), env=program.environment(tmp_path), stderr=subprocess.PIPE)
    text = ""
    while "Compiling" not in text and (line := process.stderr.readline()):
        text += line
    process.send_signal(signal.SIGTERM)
    text += process.communicate(timeout=20)[1]
    assert process.returncode == 128 + signal.SIGTERM, text
    end = text.partition("Compiling")[2]
    assert "SIGTERM: leaving at once; what is stored so far stays\n" in end and "done in" not in end
    state = json.loads((tmp_path / "out" / "train_state.json").read_text())
    assert (state["status"], state["step"]) == ("interrupted", 0)
