"""Ctrl-C, SIGTERM and SIGHUP: while training, the first lets the current step finish; at any other time the program
leaves.

The system gives a signal to any thread that does not block it, and MindSpore answers a Ctrl-C inside a graph by sending
itself SIGTERM. So all threads of the trainer block the signals, and one waits for them. A thread inherits that from the
one that started it, and a program from the one whose place it takes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flux_db.console import release, say

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

COMMAND = "FLUX_DB_COMMAND"
"""Environment variable: what started this process, if the user did not do it directly."""


class StopRequest:
    """`signal` is the signal that asked the run to stop after its step, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._has_begun: Callable[[], bool] = lambda: False
        self._before_leaving: Callable[[], None] = lambda: None

    def listen(self) -> StopRequest:
        """Take the signals from now on; best before a library is imported, because many start threads."""
        if signals := _block():
            threading.Thread(target=self._wait, args=(signals,), daemon=True).start()
        return self

    @contextmanager
    def finishing_steps(self, has_begun: Callable[[], bool]) -> Iterator[None]:
        """In this block a signal is only noted, once `has_begun`: the loop stops at its next good moment."""
        self._has_begun = has_begun
        try:
            yield
        finally:
            self._has_begun = lambda: False

    @contextmanager
    def before_leaving(self, action: Callable[[], None]) -> Iterator[None]:
        """In this block a signal that ends the program at once does this first."""
        self._before_leaving = action
        try:
            yield
        finally:
            self._before_leaving = lambda: None

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0

    def _wait(self, signals: set[signal.Signals]) -> None:
        first = None
        while True:
            number = signal.Signals(signal.sigwait(signals))
            if first is None:
                first = number
                self._stop(number)
            # A closed terminal or a scheduler may send several; only a person in a hurry presses Ctrl-C twice
            elif number == signal.SIGINT:
                os._exit(128 + number)

    def _stop(self, number: signal.Signals) -> None:
        answer = self._leave
        if self._has_begun():
            self.signal = number
            answer = _announce
        # In a thread of its own: whatever it has to wait for, the next Ctrl-C is heard
        threading.Thread(target=answer, args=(number,), daemon=True).start()

    def _leave(self, number: signal.Signals) -> None:
        try:
            self._before_leaving()
            release()
            say(f"{number.name}: leaving at once; what is stored so far stays")
        finally:
            # What is on disk is whole at any moment; the lock and the children end with the process
            os._exit(128 + number)


def _announce(number: signal.Signals) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        say(f"{number.name}: finishing this step, then saving (Ctrl-C again leaves at once)")


def heeded() -> set[signal.Signals]:
    """The signals, but for those that this process was started to ignore, as by nohup."""
    return {number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}


def default_signals() -> None:
    """For a process that was started by one that blocks them: it would inherit that."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def start_anew(words: Sequence[str]) -> None:
    """Begin this process again, as if it had been started with these words; its open files and blocked signals stay."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *words[1:]])


def _block() -> set[signal.Signals]:
    """Block the signals in all threads, also in those that will be; returns them."""
    signals = heeded()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    tasks = Path("/proc/self/task")
    if not signals <= before and tasks.is_dir() and len(list(tasks.iterdir())) > 1:
        # Somebody has imported a library before: its threads would take the signals, and die of them with all the rest
        start_anew(sys.orig_argv)
    return signals


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
