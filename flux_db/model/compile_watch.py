"""A compilation that grows beyond any sane bound ends the program: faults of MindSpore's compiler rewrite a graph for
ever, and fill the machine's memory rather than fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mindspore as ms
import psutil
from mindspore import nn

from flux_db.console import release, say
from flux_db.errors import UserError

VARIABLE = "FLUX_DB_COMPILE_LIMIT"
PERIOD_SECONDS = 0.5
GB = 2**30
# The training step of FLUX.1-dev has 4,000 cells and grows by 2 GB while it is compiled, here for a minute, on Ascend
# for 5 to 15. So these are several times of what is needed, on slow machines too.
BASE_SECONDS, CELL_SECONDS = 600.0, 1.0
BASE_BYTES, CELL_BYTES = 2 * GB, 3 * 2**20
# Of the memory that is free when it begins: a process that takes all of it is killed by the system without a word.
FREE_SHARE = 0.95


class Limits(NamedTuple):
    """Of one compilation."""

    seconds: float
    bytes: float
    """By which the process may grow."""


def limits(cells: int, weights: int, free: int, factor: float) -> Limits:
    """`weights`: bytes of the parameters, which MindSpore may copy; `free`: bytes of the machine's memory."""
    grown = factor * (BASE_BYTES + cells * CELL_BYTES + 2 * weights)
    return Limits(factor * (BASE_SECONDS + cells * CELL_SECONDS), min(grown, FREE_SHARE * free))


def factor(environment: Mapping[str, str]) -> float:
    """Of all limits, from the environment; 0 for no limits."""
    given = environment.get(VARIABLE, "1")
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise UserError(f"{VARIABLE}={given}: must be a number, such as 2 for twice the limits, or 0 for none")
    return value


@contextmanager
def watching(cell: nn.Cell, inputs: Sequence[Any], named: Mapping[str, Any]) -> Iterator[None]:
    """End the program if compiling this cell takes too much."""
    if not (times := factor(os.environ)):
        yield
        return
    cells = sum(1 for _ in cell.cells_and_names())
    weights = sum(parameter.nbytes for parameter in cell.get_parameters())
    allowed = limits(cells, weights, psutil.virtual_memory().available, times)
    done = threading.Event()
    threading.Thread(target=_watch, args=(type(cell).__name__, allowed, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _watch(name: str, allowed: Limits, done: threading.Event) -> None:
    process, begin = psutil.Process(), time.monotonic()
    before = process.memory_info().rss
    while not done.wait(min(PERIOD_SECONDS, allowed.seconds)):
        seconds, grown = time.monotonic() - begin, process.memory_info().rss - before
        if seconds > allowed.seconds or grown > allowed.bytes:
            _end(name, seconds, grown, allowed)


def _end(name: str, seconds: float, grown: int, allowed: Limits) -> None:
    """The compiler cannot be interrupted. What is on disk is whole at any moment."""
    try:
        release()
        say(
            f"error: MindSpore {ms.__version__} does not come to an end with compiling {name}: {seconds:.0f} s (limit "
            f"{allowed.seconds:.0f}) and {grown / GB:.1f} GB (limit {allowed.bytes / GB:.1f}); the program was ended "
            f"before the machine is full. Try another MindSpore, or give it twice as much with {VARIABLE}=2"
        )
    finally:
        os._exit(1)
