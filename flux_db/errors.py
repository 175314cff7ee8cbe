"""How a program of this package ends when something goes wrong: which exceptions mean what, and the exit codes."""

import argparse
import difflib
import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from flux_db import early_interrupt, garbage, streams
from flux_db.console import printable, release, show_warning
from flux_db.terminal import on_screen

# EFBIG: what a limit on the size of files (ulimit -f) answers
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_left_behind: list[str] = []


class UserError(Exception):
    """One or several problems that the user can mend; shown without a traceback.

    A problem is one line: a line break in it came from a file's name or content, and is shown escaped. What needs more
    lines has them in `details`. `exit_code` is what the program ends with.
    """

    exit_code = 2

    def __init__(
        self, problems: str | Iterable[str], details: Iterable[str] = (), *, exit_code: int | None = None
    ) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        self.details: list[str] = [*details, *(line for p in self.problems for line in getattr(p, "details", ()))]
        self.exit_code = exit_code or type(self).exit_code
        super().__init__(self.problems)

    def __str__(self) -> str:
        bullet = "" if len(self.problems) == 1 else "- "
        lines = [f"{bullet}{problem}" for problem in self.problems]
        return "\n".join(map(printable, [*lines, *self.details]))


class RunError(UserError):
    """The settings are right and the run failed nevertheless: a full disk, a child that ended badly."""

    exit_code = 1


class CommandParser(argparse.ArgumentParser):
    """For commands: a mistake is one line, as all others are, and not the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; {self.prog} --help describes the command")


def run_guarded(main: Callable[[], int | None], *, prints_results: bool = True) -> int:
    """Run a program's main and return its exit code; what goes wrong is one line on stderr, a bug has a traceback.

    2 for a UserError, 1 for a run that failed, 130 for Ctrl-C. `prints_results`: stdout is what the program is for, so
    that a stdout that cannot be written is a failure; a reader that has gone away is not.
    """
    garbage.search_rarely()
    streams.guard()
    warnings.showwarning = show_warning
    code = _ending(main)
    problem = streams.refusal()
    if problem and prints_results and code == 0:
        _complain(f"the output could not be written: {problem.strerror}")
        code = 1
    if _left_behind:
        sys.stderr.flush()
        os._exit(code)
    return code


def _ending(main: Callable[[], int | None]) -> int:
    try:
        early_interrupt.hear()
        _demand_current_folder()
        return main() or 0
    except UserError as error:
        release()
        several = "" if len(error.problems) == 1 else f"{len(error.problems)} problems\n"
        print(on_screen(f"error: {several}{error}", sys.stderr), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        hint = "; make room, then start again: what was written before is whole" if is_full(error) else ""
        _complain(f"{describe(error)}{hint}")
    except MemoryError as error:
        _complain(f"not enough memory: {describe(error)}; what was written before is whole")
    except RecursionError:
        _complain("a file or a setting is nested too deeply to be read")
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C", head="")
        return 130
    return 1


def _demand_current_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        # MindSpore does not even start there
        raise UserError(f"the current folder is gone ({error.strerror}): change to one that exists") from error


def leave_behind(name: str) -> None:
    """End the program without the last words of a library that is stuck or slow: Python would wait for it."""
    _left_behind.append(name)


def describe(error: BaseException) -> str:
    """An exception in one line: for an OSError the file, and what the system says of it."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, OSError):
        return reason
    reason = error.strerror or reason
    return reason if error.filename is None else f"{error.filename}: {reason}"


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in DISK_FULL


def unwritable(what: str, error: OSError) -> UserError:
    """The error to raise for what cannot be written: the user's mistake, unless the disk is full."""
    reason = error.strerror or " ".join(str(error).split())
    return RunError(f"{what}: {reason}; make room") if is_full(error) else UserError(f"{what}: {reason}")


def did_you_mean(name: str, known: Iterable[str], near: Mapping[str, str] | None = None) -> str:
    """The end of a message about an unknown name: the closest known one, or nothing.

    `near`: other names -> the known one that is meant by them.
    """
    meant = {word: word for word in known} | dict(near or {})
    matches = difflib.get_close_matches(name, meant, n=1)
    return f"; did you mean {meant[matches[0]]}?" if matches else ""


def _complain(text: str, head: str = "error: ") -> None:
    release()
    print(on_screen(f"{head}{printable(text)}", sys.stderr), file=sys.stderr)
