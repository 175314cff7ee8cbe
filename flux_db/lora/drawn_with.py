"""What a LoRA is drawn with: base model, size, tokens, steps and the rest, as the run that trained it drew its samples.

They are in the settings of the run, if its folder is here, and in the metadata of the LoRA file.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flux_db import plain_yaml
from flux_db.errors import UserError
from flux_db.files import text_problem
from flux_db.lora import lora_file
from flux_db.lora.trained_file import DRAWN_WITH
from flux_db.model.identity import is_hub_name
from flux_db.output_folder import CONFIG, checkpoint_step
from flux_db.size import PIXELS_PER_TOKEN, Size, parse_size
from flux_db.weight_file import open_weights

# What somebody may want, and no typing error reaches.
MOST_STEPS, MOST_TOKENS, MOST_PIXELS, LARGEST_SEED = 1000, 512, 8192, 2**32 - 1


def number_to(most: int, least: int = 1) -> Callable[[str], int]:
    def read_number(text: str) -> int:
        value = int(text) if text.isdecimal() and len(text) <= len(str(most)) else least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text}")
        return value

    return read_number


def finite(text: str) -> float:
    """A number of the command line; NaN and infinity are none that a picture can be made with."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, not {text}")
    return value


def read_size(text: str) -> Size:
    size = parse_size(text) if len(text) <= 20 else None
    if size is None or any(side % PIXELS_PER_TOKEN or not 0 < side <= MOST_PIXELS for side in size):
        raise argparse.ArgumentTypeError(
            f"must be height x width in multiples of {PIXELS_PER_TOKEN} up to {MOST_PIXELS}, not {text}"
        )
    return size


def one_of(*choices: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, not {text}")
        return text

    return choose


def _name(text: str) -> str:
    if not text.strip() or text_problem(text):
        raise argparse.ArgumentTypeError("must be a name")
    return text


# Flag of generate -> the setting of a run that means the same, and how a value of it is read.
SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "model": ("pretrained_model_name_or_path", _name),
    "revision": ("revision", _name),
    "variant": ("variant", _name),
    "cache_dir": ("cache_dir", _name),
    "base_precision": ("base_precision", one_of("full", "int8")),
    "mixed_precision": ("mixed_precision", one_of("no", "fp16", "bf16")),
    "size": ("validation_size", read_size),
    "max_sequence_length": ("max_sequence_length", number_to(MOST_TOKENS)),
    "steps": ("validation_inference_steps", number_to(MOST_STEPS)),
    "guidance": ("validation_guidance", finite),
    "seed": ("validation_seed", number_to(LARGEST_SEED, least=0)),
}
# Of flags that are not given, and that no LoRA knows.
DEFAULTS: dict[str, Any] = {
    "base_precision": "full",
    "size": Size.square(1024),
    "max_sequence_length": 512,
    "steps": 28,
    "guidance": 3.5,
    "seed": 42,
}
# Of another model they mean nothing.
OF_THE_MODEL = ("revision", "variant", "cache_dir")


@dataclass(frozen=True)
class Taken:
    """The value of a flag that was not given, and where it is from."""

    flag: str
    value: Any
    source: str


def of_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flag of generate -> value, of the settings of a run; what is not there or cannot be used is left out."""
    side = settings.get("resolution")
    if settings.get("validation_size") is None and side is not None:
        settings = {**settings, "validation_size": f"{side}x{side}"}
    found = {}
    for flag, (name, read) in SETTINGS.items():
        try:
            if settings.get(name) is not None:
                found[flag] = read(str(settings[name]))
        except argparse.ArgumentTypeError:  # written by hand, or by a stranger
            continue
    return found


def of_lora(path: Path) -> tuple[str, dict[str, Any]]:
    """(where it is from, flag of generate -> value) of a LoRA; a file that cannot be read is reported elsewhere."""
    try:
        file = lora_file.locate(path)
        folder = file.parent.parent if checkpoint_step(file.parent.name) is not None else file.parent
        if found := of_settings(plain_yaml.read_mapping(folder / CONFIG)):
            return str(folder), found
        metadata = open_weights(file).metadata
    except UserError:
        return str(path), {}
    # a stranger's file may say anything: no path of this machine is taken from it
    known = {name: metadata[name] for name in (*DRAWN_WITH, "validation_size", "resolution") if name in metadata}
    if is_hub_name(base := metadata.get("base_model", "")):
        known[SETTINGS["model"][0]] = base
    return f"the metadata of {file}", of_settings(known)


def take(given: Mapping[str, Any], loras: Sequence[Path]) -> list[Taken]:
    """The values of flags that are not given, each from the first LoRA that has it."""
    wanted = [flag for flag in SETTINGS if given[flag] is None]
    found: dict[str, Taken] = {}
    for path in loras:
        source, values = of_lora(path)
        if given["model"] is not None or "model" in found:
            values = {flag: value for flag, value in values.items() if flag not in OF_THE_MODEL}
        for flag in wanted:
            if flag in values:
                found.setdefault(flag, Taken(flag, values[flag], source))
    return [found[flag] for flag in wanted if flag in found]


def described(taken: Sequence[Taken]) -> str:
    """Flags with their values, by where they are from."""
    sources = dict.fromkeys(one.source for one in taken)
    parts = (" ".join(f"--{t.flag} {_shown(t.value)}" for t in taken if t.source == source) for source in sources)
    return "; ".join(f"from {source}: {part}" for source, part in zip(sources, parts, strict=True))


def _shown(value: Any) -> str:
    if isinstance(value, Size):
        return f"{value.height}x{value.width}"
    return f"{value:g}" if isinstance(value, float) else str(value)
