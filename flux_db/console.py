"""What the program says while it works: one line per stage, with the time it took."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from flux_db.terminal import STRONG, WEAK, on_screen

HEARTBEAT_SECONDS = 20.0
CLOCK_SECONDS = 1.0
DONE = "Done."
"""Printed when all files of a run are written; the launcher looks for it in the log of the first rank."""


_held: list[tuple[str, bool]] | None = None


def hold_back() -> None:
    """Keep what is said from now on: a child has the terminal, and its lines shall not be mixed with these."""
    global _held
    if _held is None:
        _held = []


def release() -> None:
    """Print what was held back, and everything else at once again."""
    global _held
    lines, _held = _held or [], None
    for text, wrap in lines:
        say(text, wrap=wrap)


def say(text: str, *, wrap: bool = True) -> None:
    """A line for the person at the terminal, above any progress bar; on stderr, so that stdout is free for results.

    A command to be copied is not wrapped.
    """
    if _held is not None:
        _held.append((text, wrap))
        return
    tqdm.write(on_screen(printable(text, keep=f"\n\t{STRONG}{WEAK}"), sys.stderr, wrap=wrap), file=sys.stderr)
    sys.stderr.flush()


def show(text: str) -> None:
    """A line of a result, on stdout."""
    print(on_screen(printable(text, keep=f"{STRONG}{WEAK}"), sys.stdout))


def show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """How a library's Python warning is shown: in one line, without a path of this machine."""
    say(f"warning: {category.__name__}: {printable(' '.join(str(message).split()))}")


def printable(text: str, keep: str = "") -> str:
    """Text that may come from a file, made harmless for a terminal: what is not printable is shown as an escape.

    That is line breaks, escape sequences, characters that turn the direction of writing, bytes that are no text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Announce a long silence, show that it goes on, and print how long it took.

    On a terminal a clock runs meanwhile; in a log there is a line every 20 seconds.
    """
    start = time.monotonic()
    done = threading.Event()
    say(f"{text} ...")
    show = _run_clock if sys.stderr.isatty() and _held is None else _beat
    # the thread blocks the signals that this one blocks: it inherits that
    shower = threading.Thread(target=show, args=(text, start, done), daemon=True)
    shower.start()
    try:
        yield
    finally:
        done.set()
        shower.join(CLOCK_SECONDS)  # its line is gone before the next one is printed
    say(f"  done in {time.monotonic() - start:.1f} s")


def _beat(text: str, start: float, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT_SECONDS):
        say(f"  ... still {text[0].lower()}{text[1:]} ({time.monotonic() - start:.0f} s)")


def _run_clock(text: str, start: float, done: threading.Event) -> None:
    """A line that counts the seconds, below any progress bar; it shows nothing in the first second."""
    if done.wait(CLOCK_SECONDS):
        return
    with tqdm(bar_format="  {desc}", leave=False, file=sys.stderr) as clock:
        while True:
            seconds = int(time.monotonic() - start)
            clock.set_description_str(f"{seconds // 60}:{seconds % 60:02d}")
            if done.wait(CLOCK_SECONDS):
                return


def counted(number: int, noun: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def program_name() -> str:
    """As the user has called it."""
    return "flux-db" if Path(sys.argv[0]).name == "flux-db" else "python -m flux_db"
