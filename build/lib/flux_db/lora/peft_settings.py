"""peft's settings of a LoRA: in diffusers' metadata, or in the file that peft writes beside its weights.

They are read from files of strangers. peft takes the keys of `rank_pattern` and `alpha_pattern` as regular expressions;
what peft and diffusers write there are layers' names, and only these are read: an expression may take for ever.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flux_db.plain_json import parse_json

# No LoRA comes near these.
RANK_LIMIT = 2**16
ALPHA_LIMIT = 1e6

# `attn.to_q`: every layer whose name ends so. `^transformer_blocks.0.attn.to_q`: this one layer. A dot may be escaped.
_LAYER_PATTERN = re.compile(r"(\^?)([\w-]+(?:\\?\.[\w-]+)*)\$?", re.ASCII)

_NEEDED = {"r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern"}

_shown = reprlib.repr


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is not given is None or empty."""

    rank: int | None = None
    alpha: float | None = None
    rank_pattern: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Pattern -> (its place in the file, rank); the first that fits counts."""
    alpha_pattern: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    use_rslora: bool = False
    target_modules: tuple[str, ...] = ()
    complete: bool = False
    """Whether all is there that diffusers 0.35 needs; it has other defaults, or none."""

    def alpha_of(self, name: str, rank: int) -> float:
        """The layer's alpha, in the sense that its strength is alpha / rank; the rank if no alpha is given."""
        alpha = _first_match(self.alpha_pattern, name, self.alpha)
        return float(rank if alpha is None else alpha) * (math.sqrt(rank) if self.use_rslora else 1.0)

    def contradiction(self, name: str, rank: int, alpha: float) -> str | None:
        """Where the layer's own rank and alpha differ from what is given here."""
        given_rank = _first_match(self.rank_pattern, name, self.rank)
        if given_rank not in (None, rank):
            return f"has rank {rank}, but the settings that came with the LoRA say {given_rank}"
        given_alpha = _first_match(self.alpha_pattern, name, self.alpha)
        if given_alpha is not None and not math.isclose(self.alpha_of(name, rank), alpha, rel_tol=1e-5):
            return f"has alpha {alpha:g}, but the settings that came with the LoRA say {given_alpha:g}"
        return None

    def targets(self, names: Iterable[str]) -> bool:
        """Whether each of these layers is a target, and each target one of these layers."""
        endings = {name: set(_endings(name)) for name in names}
        wanted = set(self.target_modules)
        return all(wanted & found for found in endings.values()) and wanted <= set().union(*endings.values())


def parse(text: str, prefix: str = "") -> Settings:
    """The settings in a JSON text, from keys with this prefix; a ValueError says what is wrong with it."""
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("is no JSON object")
    content = {name.removeprefix(prefix): value for name, value in content.items() if name.startswith(prefix)}
    given = {name: value for name, value in content.items() if value is not None}
    rslora = given.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise ValueError(f"use_rslora is neither true nor false: {_shown(rslora)}")
    targets = _targets(given.get("target_modules"))
    return Settings(
        rank=_rank("r", given["r"]) if "r" in given else None,
        alpha=_alpha("lora_alpha", given["lora_alpha"]) if "lora_alpha" in given else None,
        rank_pattern=_pattern("rank_pattern", given, _rank),
        alpha_pattern=_pattern("alpha_pattern", given, _alpha),
        use_rslora=rslora,
        target_modules=targets,
        complete=given.keys() >= _NEEDED and bool(targets),
    )


def usable_alpha(alpha: float) -> bool:
    return abs(alpha) <= ALPHA_LIMIT  # not if it is NaN


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= RANK_LIMIT:
        raise ValueError(f"{name} is no rank: {_shown(value)}")
    return value


def _alpha(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not usable_alpha(value):
        raise ValueError(f"{name} is no alpha: {_shown(value)}")
    return float(value)


def _pattern(name: str, given: Mapping[str, Any], read: Callable[[str, Any], Any]) -> dict[str, tuple[int, Any]]:
    """Keys are a layer's name with `^` before it, or the end of a layer's name."""
    patterns = given.get(name, {})
    if not isinstance(patterns, dict):
        raise ValueError(f"{name} is no JSON object: {_shown(patterns)}")
    found: dict[str, tuple[int, Any]] = {}
    for pattern, value in patterns.items():
        match = _LAYER_PATTERN.fullmatch(pattern)
        if match is None:
            raise ValueError(f"{name}: {_shown(pattern)} is not the name of a layer; expressions are not read")
        value = read(f"{name}: {_shown(pattern)}", value)
        found.setdefault(match[1] + match[2].replace("\\", ""), (len(found), value))
    return found


def _targets(value: Any) -> tuple[str, ...]:
    """peft also takes an expression, as text: that is not read."""
    return tuple(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else ()


def _first_match(patterns: Mapping[str, tuple[int, Any]], name: str, default: Any) -> Any:
    fitting = [patterns[end] for end in (f"^{name}", *_endings(name)) if end in patterns]
    return min(fitting)[1] if fitting else default


def _endings(name: str) -> list[str]:
    """`a.b.c`, `b.c`, `c`"""
    words = name.split(".")
    return [".".join(words[start:]) for start in range(len(words))]
