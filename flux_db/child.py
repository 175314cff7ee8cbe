"""The processes that this program starts: of the same package, with no module from the user's folder, and none outlives
its parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flux_db.errors import UserError
from flux_db.interrupt import SIGNALS

PARENT = "FLUX_DB_PARENT"
"""Environment variable: the process that one of ours ends with."""

MAIN = str(Path(__file__).with_name("__main__.py"))
# Beside the package, in the repository and where pip puts it.
SCRIPT = str(Path(__file__).resolve().parents[1] / "train_dreambooth_lora_flux.py")
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

_BECOME = "import sys; sys.path[0] = sys.argv.pop(1); from flux_db.child import become; become(sys.argv[1:])"


class ChildFailed(UserError):
    """The child has said why. This program ends with the same exit code."""

    def __init__(self, problem: str, exit_code: int) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


def command(name: str, *words: str) -> list[str]:
    """`python -m flux_db NAME ...`, but by its path: -m looks for modules in the current folder first."""
    return [sys.executable, MAIN, name, *words]


def tied(words: Sequence[str]) -> list[str]:
    """The words that start another's program so that it ends with this process, and those of ours below it with it."""
    return [sys.executable, "-c", _BECOME, str(Path(MAIN).parents[1]), *words]


def environment(**variables: str) -> dict[str, str]:
    """What every child gets; it ends with this process."""
    return os.environ | {PARENT: str(os.getpid())} | variables


def run(words: Sequence[str], what: str, files: Sequence[int] = ()) -> None:
    """Run a child to its end, with these open files; `what` says in a message what it does."""
    finish(start(words, files), what)


def start(words: Sequence[str], files: Sequence[int] = ()) -> subprocess.Popen:
    """Start a child, with these open files, and go on beside it."""
    return subprocess.Popen(words, env=environment(), pass_fds=files)


def finish(process: subprocess.Popen, what: str) -> None:
    """Wait for the end of a child."""
    code = process.wait()
    if code < 0:
        raise ChildFailed(f"{what} was ended by {signal.Signals(-code).name}", 128 - code)
    if code:
        raise ChildFailed(f"{what} failed with exit code {code}; see its messages above", code)


# --- in the child ----------------------------------------------------------------------------------------------------


def end_with_parent() -> bool:
    """If a process of ours started this one, be killed as soon as it ends; returns whether one did."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return False
    if hasattr(libc := ctypes.CDLL(None), "prctl"):  # Linux
        libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != int(parent):  # it has ended before
        os._exit(128 + signal.SIGKILL)
    return True


def become(words: Sequence[str]) -> None:
    """Turn into another's program: deaf to the signals that are meant for its parent, and ending with it."""
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ[PARENT] = str(os.getpid())
    os.execv(words[0], words)
