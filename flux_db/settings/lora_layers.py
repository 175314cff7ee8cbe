"""Which layers get a LoRA, of which rank and alpha, and how fast each learns: functions of the settings and a name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from flux_db.settings import layer_patterns
from flux_db.settings.schema import DEFAULT_LAYERS, LoraConfig, OptimConfig

ATTENTION_LAYERS = tuple(name for name in DEFAULT_LAYERS if name.startswith("attn."))
# Every linear layer of the blocks: the default ones, the feed-forward of single blocks, and all modulations.
ALL_LAYERS = (*DEFAULT_LAYERS, "proj_mlp", "proj_out", "norm1.linear", "norm1_context.linear", "norm.linear")
PRESETS = {"attention": ATTENTION_LAYERS, "default": DEFAULT_LAYERS, "all": ALL_LAYERS}

# As LoRA trainers call the two kinds of blocks -> as FLUX.1's layers begin.
BLOCKS = {"double": "transformer_blocks", "single": "single_transformer_blocks"}

_IN_BLOCK = re.compile(r"(transformer_blocks|single_transformer_blocks)\.([0-9]{1,4})\.(.+)", re.ASCII)
_RANGE = re.compile(r"(?:(double|single):)?\s*([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)


@dataclass(frozen=True)
class Blocks:
    """`double:0-5`, or one number of `single:7,12`."""

    kind: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.first}" + ("" if self.first == self.last else f"-{self.last}")

    def holds(self, name: str) -> bool:
        match = _IN_BLOCK.fullmatch(name)
        return bool(match) and match[1] == BLOCKS[self.kind] and self.first <= int(match[2]) <= self.last


@dataclass(frozen=True)
class Choice:
    """--lora_layers: names, of which presets are some, in all blocks or in these only."""

    names: tuple[str, ...]
    blocks: tuple[Blocks, ...] = ()

    def takes(self, name: str) -> bool:
        """Whether the layer gets a LoRA."""
        return self.is_in_blocks(name) and any(is_named(item, name) for item in self.names)

    def is_in_blocks(self, name: str) -> bool:
        return not self.blocks or any(blocks.holds(name) for blocks in self.blocks)


def is_named(item: str, name: str) -> bool:
    """Whether a name or preset of --lora_layers means the layer. Presets are about the blocks' layers only."""
    if item in PRESETS:
        match = _IN_BLOCK.fullmatch(name)
        return bool(match) and match[3] in PRESETS[item]
    return name == item or name.endswith(f".{item}")


@functools.lru_cache
def parse(text: str | None) -> Choice:
    """--lora_layers; a ValueError says what is wrong with it."""
    names, blocks, kind = [], [], None
    for item in (part.strip() for part in (text or "default").split(",")):
        match = _RANGE.fullmatch(item)
        if match is None:
            kind = None
            names += [item] if item else []
            if item.startswith(tuple(f"{name}:" for name in BLOCKS)):
                raise ValueError(f"{item}: expects numbers of blocks, such as single:7,12 or double:0-5")
            continue
        kind = match[1] or kind
        if kind is None:
            raise ValueError(f"{item}: is a number of no blocks; write single:{item} or double:{item}")
        first, last = int(match[2]), int(match[3] or match[2])
        if last < first:
            raise ValueError(f"{item}: ends before it begins")
        blocks.append(Blocks(kind, first, last))
    if not names and not blocks:
        raise ValueError(f"{text}: names no layer; give some, or leave it out")
    return Choice(tuple(names) or ("default",), tuple(blocks))


def layer_names(lora: LoraConfig) -> tuple[str, ...]:
    """The names in --lora_layers, with those of its presets."""
    return tuple(name for item in parse(lora.lora_layers).names for name in PRESETS.get(item, (item,)))


def chosen(lora: LoraConfig, names: Iterable[str]) -> list[str]:
    """Of a network's linear layers those that get a LoRA."""
    choice = parse(lora.lora_layers)
    return [name for name in names if choice.takes(name)]


def rank_of(lora: LoraConfig, name: str) -> int:
    """--lora_rank_pattern, or --rank."""
    return int(layer_patterns.first_match(rank_patterns(lora.lora_rank_pattern), name, lora.rank))


def alpha_of(lora: LoraConfig, name: str) -> float:
    """Of a layer; alpha / rank is the same in all layers."""
    rank = rank_of(lora, name)
    return float(rank) if lora.alpha == lora.rank else lora.alpha * rank / lora.rank


def needs_alphas(lora: LoraConfig) -> bool:
    """Whether each layer needs its alpha in a file: without, diffusers takes one for all."""
    return lora.alpha != lora.rank or bool(lora.lora_rank_pattern)


def rate_factor(optim: OptimConfig, name: str, *, is_up: bool) -> float:
    """What the learning rate of a layer's matrix is multiplied by; `is_up`: its B."""
    factor = layer_patterns.first_match(rate_patterns(optim.lora_lr_pattern), name, 1.0)
    return factor * (optim.loraplus_ratio if is_up else 1.0)


def has_rate_factors(optim: OptimConfig) -> bool:
    return bool(optim.lora_lr_pattern) or optim.loraplus_ratio != 1


@functools.lru_cache
def rank_patterns(items: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """(expression, rank) each; a ValueError says what is wrong with one."""
    return tuple(_read(item, _rank) for item in items)


@functools.lru_cache
def rate_patterns(items: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """(expression, factor) each; a ValueError says what is wrong with one."""
    return tuple(_read(item, _factor) for item in items)


def _read(item, read):
    try:
        expression, value = layer_patterns.split_item(item)
        return expression, read(value)
    except ValueError as error:
        raise ValueError(f"{item}: {error}") from None


def _rank(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text, re.ASCII) or not 1 <= int(text) <= 4096:
        raise ValueError("the rank must be a whole number from 1 to 4096")
    return int(text)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1000:  # not if it is NaN
        raise ValueError("the factor must be a number above 0, up to 1000")
    return value
