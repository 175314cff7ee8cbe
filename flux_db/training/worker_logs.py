"""The logs of workers under msrun: shown while they grow, kept, and read for what went wrong."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from flux_db.console import DONE, say
from flux_db.training.patient_msrun import RANK_LINE

MSRUN = "msrun.log"
SHOWN_LINES = 15
# Lines of MindSpore's own log; its errors stay.
CHATTER = rb"(?m)^\[(INFO|WARNING)\] .*\n"


def worker(log_dir: Path, rank: int) -> Path:
    return log_dir / f"worker_{rank}.log"


def keep_old(log_dir: Path) -> None:
    """Make room for new logs. Those of the launch before stay, as .old: they may show why a new launch was needed."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for path in [*log_dir.glob("worker_*.log"), *log_dir.glob("scheduler.log"), *log_dir.glob(MSRUN)]:
        path.replace(path.with_name(path.name + ".old"))


def is_silent(log_dir: Path, rank: int) -> bool:
    """Whether a worker has said nothing yet, so that it is still waiting for the others to join."""
    path = worker(log_dir, rank)
    return not path.exists() or not re.sub(CHATTER, b"", path.read_bytes()).strip()


@contextlib.contextmanager
def follow(path: Path) -> Iterator[None]:
    """Show a log on the terminal while it grows."""
    done = threading.Event()

    def copy() -> None:
        while not path.exists():
            if done.wait(0.1):
                return
        with path.open("rb") as log:
            while True:
                ended = done.is_set()
                if piece := log.read():
                    sys.stdout.buffer.write(re.sub(CHATTER, b"", piece))
                    sys.stdout.buffer.flush()
                elif ended:
                    return
                done.wait(0.1)

    def copy_until_closed() -> None:
        with contextlib.suppress(OSError):  # the terminal, or the program behind a pipe, may be gone
            copy()

    thread = threading.Thread(target=copy_until_closed, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def crashed_when_done(log_dir: Path) -> bool:
    """Whether a worker crashed in MindSpore's own shutdown: the run had written all its files by then."""
    match, log = _first_failure(log_dir), worker(log_dir, 0)
    crashed = match is not None and -int(match[2]) in (signal.SIGSEGV, signal.SIGABRT)
    return crashed and log.exists() and DONE in log.read_text(errors="replace").splitlines()


def report_failure(log_dir: Path) -> int:
    """Say which rank failed first and its last lines; returns its exit code."""
    match = _first_failure(log_dir)
    if match is None:
        say(f"error: the launch failed; the output of msrun is in {log_dir / MSRUN}")
        return 1
    rank, code = ranks(log_dir)[int(match[1])], int(match[2])
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    log = worker(log_dir, rank)
    say(f"\nerror: rank {rank} {how}, and the other ranks were stopped. Its last lines, from {log}:")
    for line in last_error(log.read_text(errors="replace") if log.exists() else ""):
        say(f"  {line}")
    return 128 - code if code < 0 else code


def ranks(log_dir: Path) -> dict[int, int]:
    """The rank of each worker's process that msrun has started."""
    line = RANK_LINE.format(process=r"(\d+)", rank=r"(\d+)")
    return {int(process): int(rank) for process, rank in re.findall(line, _of_msrun(log_dir))}


def has_failed(log_dir: Path) -> bool:
    """Whether msrun has seen a worker fail."""
    return _first_failure(log_dir) is not None


def _first_failure(log_dir: Path) -> re.Match | None:
    """Process and exit code. msrun ends the others as soon as it has seen one fail, so the first line is the cause."""
    return re.search(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)", _of_msrun(log_dir))


def _of_msrun(log_dir: Path) -> str:
    return (log_dir / MSRUN).read_text(errors="replace")


def last_error(log: str) -> list[str]:
    """The error at the end of a log, without MindSpore's C++ stacks and without overwritten bars."""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.split("\n")]
    lines = [line for line in _without_call_stacks(lines) if line and not re.match(r"\[(WARNING|INFO)\] ", line)]
    starts = [n for n, line in enumerate(lines) if line.startswith(("error:", "Traceback"))]
    if not starts:
        return lines[-3:]
    found = lines[starts[-1] :]
    return found if len(found) <= SHOWN_LINES else [found[0], "...", *found[-(SHOWN_LINES - 2) :]]


def _without_call_stacks(lines: list[str]) -> Iterator[str]:
    """MindSpore puts the stack after a title between rules; it ends at the next empty line."""
    inside = False
    for line in lines:
        if "C++ Call Stack" in line:
            inside = True
        elif not line:
            inside = False
        if not inside and not re.fullmatch("-{20,}", line):
            yield line
