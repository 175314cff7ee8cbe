"""One command: its function, and either a parser for its flags or the trainer's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """`run` takes the parsed flags, or all words as they are if `flags` is None: then it parses them itself.

    The first line of its docstring is the command's help, the whole of it the description.
    """

    run: Callable[..., int | None]
    flags: Callable[[argparse.ArgumentParser], None] | None = None
    takes_trainer_flags: bool = False
    """And no others."""

    @property
    def summary(self) -> str:
        return self.description.partition("\n")[0]

    @property
    def description(self) -> str:
        lines = (self.run.__doc__ or "").splitlines()
        return "\n".join(line.strip() for line in lines)


def whole_number(most: int) -> Callable[[str], int]:
    """A type for argparse: from 1 to `most`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {most}")
        return int(text)

    return convert
