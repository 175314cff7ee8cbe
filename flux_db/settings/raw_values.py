"""Values of settings, from the text of a flag or from what YAML made of it; a ValueError says what is expected."""

from __future__ import annotations

import math
import os
from typing import Any

from flux_db.files import text_problem

# Of a value that is not understood so much is shown.
LONGEST_VALUE = 80

# A longer whole number is meant for no setting.
LONGEST_NUMBER = 19

# argparse stores this for a flag that came without its value, so that parsing goes on and finds the other problems.
NO_VALUE = object()


def given(raw: Any) -> Any:
    if raw is NO_VALUE:
        raise ValueError("needs a value; one that starts with a dash is written with =, as in --flag=-x")
    return raw


def choice(choices: tuple[str, ...], raw: Any) -> str:
    # YAML reads a bare `no` as false. Peers write AdamW where we write adamw.
    word = "no" if raw is False else str(raw)
    for known in choices:
        if known.lower() == word.lower():
            return known
    raise ValueError(f"expects one of {', '.join(choices)}, not {cut(word)}")


def switch(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    raise ValueError(f"expects true or false, not {cut(repr(raw))}")


def whole_number(raw: Any) -> int:
    too_long = len(str(raw)) > LONGEST_NUMBER
    try:
        if isinstance(raw, str | int) and not isinstance(raw, bool) and not too_long:
            return int(raw)
    except ValueError:
        pass
    limit = f" of at most {LONGEST_NUMBER} digits" if too_long else ""
    raise ValueError(f"expects a whole number{limit}, not {cut(repr(raw))}")


def number(raw: Any) -> float:
    # YAML reads 1e-4, without a point, as text.
    try:
        value = float(raw) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else None
    except ValueError:
        value = None
    if value is not None and math.isfinite(value):
        return value
    wanted = "a number" if value is None else "a finite number"
    raise ValueError(f"expects {wanted}, not {cut(repr(raw))}")


def text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"expects text, not {cut(repr(raw))}; put it in quotes")
    if problem := text_problem(raw):
        raise ValueError(problem)
    # The shell does not expand ~ in --flag=~/x, nor does YAML.
    return os.path.expanduser(raw) if raw.startswith("~/") else raw


def cut(shown: str) -> str:
    return shown if len(shown) <= LONGEST_VALUE else f"{shown[:LONGEST_VALUE]}... ({len(shown):,} characters)"
