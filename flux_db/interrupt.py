"""Ctrl-C and SIGTERM: while training, the first lets the current step finish; at any other time the program leaves.

MindSpore answers a Ctrl-C inside a graph by sending itself SIGTERM. So the signals are blocked before any library
starts threads, which inherit that, and one thread waits for them.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flux_db.console import say

SIGNALS = {signal.SIGINT, signal.SIGTERM}

COMMAND = "FLUX_DB_COMMAND"
"""Environment variable: what started this process, if the user did not do it directly."""


class StopRequest:
    """`signal` tells which signal asked the run to stop, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._finishes_step = False

    def listen(self) -> StopRequest:
        """Take the signals from now on; to be called before numpy and MindSpore are imported."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._wait, daemon=True).start()
        return self

    @contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """In this block a signal is only noted: the loop stops at its next good moment."""
        self._finishes_step = True
        try:
            yield
        finally:
            self._finishes_step = False

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0

    def _wait(self) -> None:
        while True:
            number = signal.Signals(signal.sigwait(SIGNALS))
            again = self.signal is not None and number == signal.SIGINT
            if again or not self._finishes_step:
                # At once: what is on disk is whole at any moment, and the lock ends with the process.
                os._exit(128 + number)
            self.signal = number
            say(f"{number.name}: finishing this step, then saving (Ctrl-C again leaves at once)")


def default_signals() -> None:
    """For a process started by one that blocks them: it would inherit that."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def resume_command(argv: list[str]) -> str:
    """The command line of this run, with the flag that makes it go on."""
    start = os.environ.get(COMMAND)
    words = [*shlex.split(start), *argv[1:]] if start else ["python", *argv]
    kept = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word == "--resume_from_checkpoint":
            skip = True
        elif not word.startswith("--resume_from_checkpoint="):
            kept.append(word)
    return shlex.join([*kept, "--resume_from_checkpoint", "latest"])
