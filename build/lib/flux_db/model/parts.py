"""The parts of a FLUX.1 folder: whether each is whole, by its settings, vocabulary and weight headers."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flux_db.errors import UserError
from flux_db.files import TEXT_LIMIT, read_bytes
from flux_db.model.model_folder import NETWORKS, _config_name
from flux_db.model.part_weights import INCOMPLETE, read_object, short_name, variants, weight_problems

# Settings that training reads itself: the range that makes sense, and the default of an absent one, if it has any.
_NUMBERS: dict[str, dict[str, tuple[float, float, float | None]]] = {
    "scheduler": {
        "num_train_timesteps": (1, 100_000, 1000),
        "shift": (1e-3, 1e3, 1.0),
        "base_shift": (-100.0, 100.0, 0.5),
        "max_shift": (-100.0, 100.0, 1.15),
    },
    "vae": {"scaling_factor": (1e-4, 1e4, None), "shift_factor": (-1e4, 1e4, None)},
}


# diffusers writes the class into a part's settings; another one would be a network of another kind.
_CLASSES = {"transformer": "FluxTransformer2DModel", "vae": "AutoencoderKL"}


def part_problems(part: Path, variant: str | None) -> list[str]:
    """Problems of a network's folder: its config.json, its weights, and whether they belong together."""
    problems: list[str] = []
    config = _read_settings(part, problems)
    return [*problems, *_detours(part, config or {}), *weight_problems(part, variant, config)]


def all_variants_problems(part: Path) -> list[str]:
    """As `part_problems`, for the plain weights and those of every variant that there are."""
    found = variants(part) or [None]
    return list(dict.fromkeys(problem for variant in found for problem in part_problems(part, variant)))


def _scheduler_problems(part: Path, _variant: str | None) -> list[str]:
    problems: list[str] = []
    _read_settings(part, problems)
    return problems


def _tokenizer_problems(part: Path, _variant: str | None) -> list[str]:
    """The files that the tokenizers read are small, and all but two are JSON."""
    problems: list[str] = []
    objects = ("vocab.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    for name in objects:
        if os.path.lexists(part / name):
            _read(part / name, problems)
    for name in ("merges.txt", "spiece.model"):
        if os.path.lexists(part / name):
            try:
                read_bytes(part / name, TEXT_LIMIT)
            except OSError as problem:
                problems.append(f"{part.name}/{name} cannot be read ({problem.strerror}); {INCOMPLETE}")
    sets = VOCABULARIES[part.name]
    if not any(all(os.path.isfile(part / name) for name in names) for names in sets):
        wanted = " or ".join(" and ".join(names) for names in sets)
        problems.append(f"{part.name} has no vocabulary ({wanted}); {INCOMPLETE}")
    return problems


# Sets of files that each hold a whole vocabulary. CLIP's tokenizer does not read tokenizer.json.
VOCABULARIES = {"tokenizer": (("vocab.json", "merges.txt"),), "tokenizer_2": (("tokenizer.json",), ("spiece.model",))}


MODEL_PARTS: dict[str, Callable[[Path, str | None], list[str]]] = {
    "scheduler": _scheduler_problems,
    "tokenizer": _tokenizer_problems,
    "tokenizer_2": _tokenizer_problems,
    **dict.fromkeys(NETWORKS, part_problems),
}


def _detours(part: Path, config: dict[str, Any]) -> list[str]:
    """What makes transformers load other weights than those that are checked here."""
    if not part.name.startswith("text_encoder"):
        return []
    found = ["config.json has transformers_weights"] if "transformers_weights" in config else []
    found += ["there is an adapter_config.json"] if os.path.lexists(part / "adapter_config.json") else []
    return [f"{part.name}: {reason}, so that other weights would be loaded; remove that" for reason in found]


def _read_settings(part: Path, problems: list[str]) -> dict[str, Any] | None:
    """A part's own settings, or None; with a note in problems on what is wrong with them."""
    file = part / _config_name(part.name)
    config = _read(file, problems)
    if config is None:
        return None
    for name, (least, most, default) in _NUMBERS.get(part.name, {}).items():
        value = config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | type(least)) or not least <= value <= most:
            kind = "whole number" if isinstance(least, int) else "number"
            problems.append(
                f"{short_name(file)}: {name} {reprlib.repr(value)}: must be a {kind} from {least:g} to {most:g}; "
                "fetch it again"
            )
    wanted = _CLASSES.get(part.name)
    if wanted and (name := config.get("_class_name", wanted)) != wanted:
        problems.append(f"{short_name(file)}: is of a {reprlib.repr(name)}, not of a {wanted}; use a FLUX.1 model")
    return config


def _read(file: Path, problems: list[str]) -> dict[str, Any] | None:
    """The content of a JSON file, or None with a note in problems."""
    try:
        return read_object(file)
    except UserError as error:
        problems += [f"{problem}; {INCOMPLETE}" for problem in error.problems]
        return None
