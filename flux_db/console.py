"""What the program says while it works: one line per stage, with the time it took."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

HEARTBEAT_SECONDS = 20.0


def say(text: str) -> None:
    """A line for the person at the terminal, above any progress bar; on stderr, so that stdout is free for results."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Announce a long silence, show that it goes on, and tell how long it took."""
    start = time.monotonic()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            say(f"  ... still {text[0].lower()}{text[1:]} ({time.monotonic() - start:.0f} s)")

    say(f"{text} ...")
    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        done.set()
    say(f"  done in {time.monotonic() - start:.1f} s")
