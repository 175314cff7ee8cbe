"""Runs cases: a process that has imported the program, and forks for each case. Started by runner.py, in any tree.

A line of JSON on stdin is a case, a line on stdout how it ended. The child becomes the program itself: what it raises
goes all the way up, and the interpreter ends as it would have for a user. Only the standard library is used here, and
nothing of the other files: the tree may be another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import select
import signal
import sys
import tempfile
import time
from typing import Any

Job = dict[str, Any]


def main(tree: str, warm_up: list[list[str]]) -> None:
    sys.path.insert(0, tree)
    for words in warm_up:
        _warm(words)
    os.write(1, b"ready\n")
    for line in sys.stdin.buffer:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _enter(job)
            _become(job, tree)
            return
        os.write(1, json.dumps(_wait(child, job["seconds"])).encode() + b"\n")


def _warm(words: list[str]) -> None:
    """Run a command here, so that its imports are done. How it ends is for a case to say."""
    if words[0] == "import":
        __import__(words[1])
        return
    sys.argv = ["flux_db", *words]
    path = list(sys.path)
    sys.path.insert(0, "")  # as python -m does; the program takes it away again
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        contextlib.suppress(Exception, SystemExit),
    ):
        runpy.run_module("flux_db", run_name="__main__", alter_sys=False)
    sys.path[:] = path


# --- the child -----------------------------------------------------------------------------------------------------


def _enter(job: Job) -> None:
    """Become a process such as a user's shell would start."""
    os.setsid()
    os.chdir(job["folder"])
    for descriptor, (kind, file) in enumerate(job["streams"]):
        _connect(descriptor, kind, file)
    for name, value in job["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    os.environ.clear()
    os.environ.update(job["environment"])
    tempfile.tempdir = None  # it was found out for the server
    if job["lost_cwd"]:
        os.mkdir("lost")
        os.chdir("lost")
        os.rmdir(os.path.join(job["folder"], "lost"))


def _connect(descriptor: int, kind: str, file: str) -> None:
    if kind == "closed":
        os.close(descriptor)
        return
    if kind == "pipe":  # what fits into one: the reader comes later
        source, writing = os.pipe()
        with open(file, "rb") as content:
            os.write(writing, content.read())
        os.close(writing)
    elif kind == "broken pipe":
        reading, source = os.pipe()
        os.close(reading)
    else:
        source = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY)
    os.dup2(source, descriptor)
    os.close(source)


def _become(job: Job, tree: str) -> None:
    words = job["words"]
    script = os.path.join(tree, "train_dreambooth_lora_flux.py")
    training = words[0] == "train"
    command = [script, *words[1:]] if training else ["-m", "flux_db", *words]
    if job["way"] == "start":
        os.execv(sys.executable, [sys.executable, *command])
    sys.orig_argv[:] = [sys.executable, *command]
    sys.argv = command if training else ["flux_db", *words]
    if training:
        runpy.run_path(script, run_name="__main__")
    else:
        sys.path.insert(0, "")
        runpy.run_module("flux_db", run_name="__main__", alter_sys=True)


# --- the parent ----------------------------------------------------------------------------------------------------


def _wait(child: int, seconds: float) -> dict[str, Any]:
    """How the child ended. What it leaves behind, and what takes too long, is killed."""
    began = time.monotonic()
    descriptor = os.pidfd_open(child)
    in_time = bool(select.select([descriptor], [], [], seconds)[0])
    os.close(descriptor)
    if not in_time:
        _kill_group(child)
    _, status, usage = os.wait4(child, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - began,
        "hung": not in_time,
        "memory_mb": usage.ru_maxrss / 1024,
        "left_behind": _kill_group(child) and in_time,
    }


def _kill_group(leader: int) -> bool:
    """Whether there was anybody left in it."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
