"""JSON that others wrote: one meaning, finite numbers, and no depth that ends the program."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from typing import Any, NoReturn


def parse_json(text: str) -> Any:
    """The content. A ValueError also for a key given twice, of which json keeps the last, for NaN and for depth."""
    try:
        return json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_number, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {reprlib.repr(name)} twice")
        found[name] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is no number")
