"""How text looks on a terminal: in colour, and wrapped at its width. In a log or a pipe it stays as it is."""

from __future__ import annotations

import os
import re
import textwrap
from typing import TextIO

RED, GREEN, YELLOW, CYAN, BOLD, PLAIN = (f"\x1b[{code}m" for code in ("1;31", "32", "33", "36", "1", "0"))

# What a line begins with, apart from spaces, and its colour.
HEADS = {"error:": RED, "warning:": YELLOW, "note:": CYAN, "!": YELLOW, "No problems:": GREEN}
HEAD = re.compile(rf"^(\s*)({'|'.join(map(re.escape, HEADS))})")

# Around what matters most in a line; characters of the private use area, which no text has.
STRONG, WEAK = "\ue000", "\ue001"

# A line with one gap has a name and what belongs to it, one with several is a row of a table.
GAP = re.compile(r"(?<=\S)  +(?=\S)")
HANGING = 2

# On a narrower terminal nothing can be read anyway.
LEAST_WIDTH = 40


def strong(text: str) -> str:
    """A part of a line for `on_screen`, which makes it bold where there are colours."""
    return f"{STRONG}{text}{WEAK}"


def on_screen(text: str, stream: TextIO, *, wrap: bool = True) -> str:
    """The text as it is written to the stream. Tables are never wrapped; with `wrap` off nothing is."""
    columns = width(stream)
    lines = text.split("\n")
    if columns and wrap:
        lines = [part for line in lines for part in _wrapped(line, columns)]
    return "\n".join(map(_coloured if _has_colours(stream) else _bare, lines))


def width(stream: TextIO | None) -> int | None:
    """Columns of the terminal; None for a log or a pipe, or if they are unknown."""
    if stream is None or not stream.isatty():
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return max(columns, LEAST_WIDTH) if columns else None


def _has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _wrapped(line: str, columns: int) -> list[str]:
    """The line in parts that fit; each begins a little to the right, or below what follows the name."""
    gaps = list(GAP.finditer(line))
    if len(_bare(line)) <= columns or len(gaps) > 1:
        return [line]
    begin = gaps[0].end() if gaps else len(line) - len(line.lstrip(" ")) + HANGING
    indent = " " * min(begin, columns // 2)
    return textwrap.wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _coloured(line: str) -> str:
    line = HEAD.sub(lambda head: f"{head[1]}{HEADS[head[2]]}{head[2]}{PLAIN}", line)
    return line.replace(STRONG, BOLD).replace(WEAK, PLAIN)


def _bare(line: str) -> str:
    return line.replace(STRONG, "").replace(WEAK, "")
