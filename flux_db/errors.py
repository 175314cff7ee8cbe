"""A user's mistake: what it looks like as an exception, and how a program ends on it."""

import difflib
import sys
from collections.abc import Callable, Iterable

from flux_db.console import printable


class UserError(Exception):
    """One or several problems that the user can mend; shown without a traceback.

    A problem is one line: a line break in it came from a file's name or content, and is shown escaped. What needs more
    lines has them in `details`.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str], details: Iterable[str] = ()) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        self.details: list[str] = list(details)
        super().__init__(self.problems)

    def __str__(self) -> str:
        bullet = "" if len(self.problems) == 1 else "- "
        lines = [f"{bullet}{problem}" for problem in self.problems]
        return "\n".join(map(printable, [*lines, *self.details]))


def run_guarded(main: Callable[[], int | None]) -> int:
    """Run a program's main and return its exit code; a UserError has its own, and goes to stderr as plain text."""
    try:
        return main() or 0
    except UserError as error:
        head = "error: " if len(error.problems) == 1 else f"error: {len(error.problems)} problems\n"
        print(f"{head}{error}", file=sys.stderr)
        return error.exit_code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known one, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
