"""Prompts for samples: lines of a text file, each with options of its own pictures at its end."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from flux_db.errors import UserError, did_you_mean
from flux_db.files import read_text, text_problem
from flux_db.size import LARGEST_SIDE, PIXELS_PER_TOKEN, Size

# Of a file; each is encoded and drawn.
MOST_PROMPTS = 10_000

# Of a file with more, so many problems are listed.
MOST_PROBLEMS = 20

_OPTION = re.compile(r"(?:^|\s)--[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """A prompt, and what its pictures have otherwise than the rest; None: as the rest."""

    text: str
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    lora: float | None = None
    """Factor on the strength of the LoRA."""

    @property
    def options(self) -> str:
        """The options as they are written in a file; empty if there are none."""
        given = ((option, getattr(self, rule.field)) for option, rule in OPTIONS.items())
        return " ".join(f"--{option} {_shown(value)}" for option, value in given if value is not None)

    def with_text(self, text: str) -> PromptLine:
        return replace(self, text=text)

    def size(self, usual: Size) -> Size:
        return Size(self.height or usual.height, self.width or usual.width)


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


class _Rule(NamedTuple):
    field: str
    read: Callable[[str], Any]
    must_be: str
    holds: Callable[[Any], bool]


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,10}", text) else None


def _number(text: str) -> float | None:
    try:
        value = float(text) if len(text) <= 20 else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


_SIDE = (
    f"a multiple of {PIXELS_PER_TOKEN}, up to {LARGEST_SIDE}",
    lambda x: 0 < x <= LARGEST_SIDE and x % PIXELS_PER_TOKEN == 0,
)

OPTIONS: dict[str, _Rule] = {
    "w": _Rule("width", _whole, *_SIDE),
    "h": _Rule("height", _whole, *_SIDE),
    "seed": _Rule("seed", _whole, f"a whole number from 0 to {2**32 - 1}", lambda x: x < 2**32),
    "steps": _Rule("steps", _whole, "a whole number from 1 to 1000", lambda x: 1 <= x <= 1000),
    "guidance": _Rule("guidance", _number, "a number from 0 to 1000", lambda x: 0 <= x <= 1000),
    "lora": _Rule("lora", _number, "a number from -10 to 10", lambda x: -10 <= x <= 10),
}


def parse_line(line: str) -> PromptLine:
    """`a photo of a dog --w 768 --seed 3`; a ValueError says what is wrong with it."""
    found = _OPTION.search(line)
    if found is None:
        return PromptLine(text=line.strip())
    text, words = line[: found.start()].strip(), line[found.start() :].split()
    if not text:
        raise ValueError("no prompt before the options")
    values: dict[str, Any] = {}
    for option, value in zip(words[::2], [*words[1::2], ""], strict=False):
        rule = OPTIONS.get(option.removeprefix("--")) if option.startswith("--") else None
        if rule is None:
            names = [f"--{name}" for name in OPTIONS]
            raise ValueError(
                f"{option} is no option: the prompt comes first, then {', '.join(names)}, each with its value"
                f"{did_you_mean(option, names)}"
            )
        read = rule.read(value)
        if read is None or not rule.holds(read):
            raise ValueError(f"{option} {value}".rstrip() + f": must be {rule.must_be}")
        if rule.field in values:
            raise ValueError(f"{option} is given twice")
        values[rule.field] = read
    return PromptLine(text=text, **values)


def read_prompts(path: Path | str, flag: str) -> list[PromptLine]:
    """The prompts of a text file, one on each line; empty lines and those that begin with # are none."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file in UTF-8"
        raise UserError(f"--{flag} {path}: {reason}") from None
    if problem := text_problem(text):
        raise UserError(f"--{flag} {path}: {problem}")
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if len(lines) > MOST_PROMPTS:
        raise UserError(f"--{flag} {path}: has {len(lines):,} prompts; at most {MOST_PROMPTS:,} can be drawn")
    prompts, problems = [], []
    for number, line in lines:
        try:
            prompts.append(parse_line(line))
        except ValueError as error:
            problems.append(f"--{flag} {path}, line {number}: {error}")
    if problems:
        raise UserError(problems[:MOST_PROBLEMS])
    return prompts
