"""Expressions for names of layers, `EXPRESSION=VALUE`: the first one that fits a layer counts.

As in peft's rank_pattern, an expression must fit the end of a name, from a dot on: `attn\\.to_q` fits
`transformer_blocks.0.attn.to_q`, and with `^` before it an expression must fit the whole name.

Settings may come in a file of somebody else, and an expression of Python may take for ever. So only a part of Python's
expressions is read, and of those only ones whose every possible match can be tried quickly.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence

# Letters, digits, `_`, `-`, `.`, classes, groups, `|`, and repetitions of one of these but a group.
_TOKEN = re.compile(
    r"(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<bar>\|)|(?P<repeat>[*+?]\??|\{\d{1,2}(?:,\d{0,2})?\}\??)"
    r"|(?P<letter>[\w.-]|\\[.dDwW-]|\[\^?[\w.-]+\])",
    re.ASCII,
)
LONGEST_EXPRESSION = 500

# More than the characters of any layer's name in FLUX.1 and CLIP: so many ways there are to end a repetition.
_LONGEST_NAME = 64
MOST_WAYS = 2**15


def split_item(item: str) -> tuple[str, str]:
    """`EXPRESSION=VALUE` in two; a ValueError if it is none or its expression is not read."""
    expression, sign, value = item.rpartition("=")
    expression, value = expression.strip(), value.strip()
    if not sign or not expression or not value:
        raise ValueError("expects EXPRESSION=VALUE, such as attn.to_q=8")
    if problem := expression_problem(expression):
        raise ValueError(problem)
    return expression, value


def expression_problem(expression: str) -> str | None:
    """Why an expression is not read; None if it is."""
    if len(expression) > LONGEST_EXPRESSION:
        return f"the expression has more than {LONGEST_EXPRESSION} characters"
    text, position, before = _inner(expression), 0, ""
    # of each open group, and of the whole: the ways to match what is already read, and its number of alternatives
    ways, alternatives = [1], [1]
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return f"{text[position]!r} is not read in an expression here; put \\ before a dot, and nothing else"
        kind, position = token.lastgroup, token.end()
        if kind == "repeat":
            if before != "letter":
                return f"{token[0]!r} follows no single character or class; groups cannot be repeated"
            ways[-1] *= _LONGEST_NAME
        elif kind == "open":
            ways.append(1)
            alternatives.append(1)
        elif kind == "bar":
            alternatives[-1] += 1
        elif kind == "close":
            if len(ways) == 1:
                return "has a ) without its ("
            count = ways.pop() * alternatives.pop()
            ways[-1] *= count
        before = kind or ""
        if math.prod(ways) * math.prod(alternatives) > MOST_WAYS:
            return "the expression can fit in too many ways; use fewer repetitions or alternatives"
    if len(ways) > 1:
        return "has a ( without its )"
    try:
        _compiled(expression)
    except (re.error, OverflowError) as error:
        return f"is no expression: {error}"
    return None


def fits(expression: str, name: str) -> bool:
    """Whether an expression that is read fits a layer's name."""
    words = name.split(".")
    starts = (0,) if expression.startswith("^") else range(len(words))
    return any(_compiled(expression).fullmatch(".".join(words[start:])) for start in starts)


def first_match(patterns: Sequence[tuple[str, float]], name: str, default: float) -> float:
    """The value of the first expression that fits the name."""
    return next((value for expression, value in patterns if fits(expression, name)), default)


def unused(patterns: Iterable[tuple[str, float]], names: Iterable[str]) -> list[str]:
    """Expressions that fit none of the names."""
    names = list(names)
    return [expression for expression, _ in patterns if not any(fits(expression, name) for name in names)]


def exactly(name: str) -> str:
    """The expression that fits this one name."""
    return "^" + name.replace(".", "\\.")


def _inner(expression: str) -> str:
    return expression.removeprefix("^").removesuffix("$")


@functools.lru_cache(maxsize=4096)
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(_inner(expression), re.ASCII)
