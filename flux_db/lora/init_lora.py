"""A LoRA to start training from: which settings follow from its file, whether it fits a run, and its first weights."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flux_db.errors import UserError
from flux_db.files import open_regular
from flux_db.lora import convert, layer_names, lora_file, merge
from flux_db.lora.convert import Layers
from flux_db.lora.lora_file import Layer
from flux_db.lora.resize import resize
from flux_db.problem import Problem
from flux_db.settings import lora_layers
from flux_db.settings.command_line import Given
from flux_db.settings.derived import text_lora
from flux_db.settings.layer_patterns import exactly
from flux_db.settings.lora_layers import BLOCKS, PRESETS
from flux_db.settings.schema import TEXT_ENCODER_LAYERS, Config, LoraConfig, from_flat_dict, to_flat_dict

FLAG, FINGERPRINT = "init_lora", "init_lora_fingerprint"

# What the file decides too. A YAML file's are often a template's, so they give way to it where the two contradict.
RANKS = frozenset({"rank", "lora_alpha", "lora_rank_pattern", "text_encoder_rank"})


def resolve(given: Given) -> Given:
    """The settings with what --init_lora decides, and the problems of its file."""
    config = given.config
    if config.lora.init_lora is None or FLAG in given.faulty:
        return given
    notes: tuple[str, ...] = ()
    try:
        layers = read(config)
        config = taken_over(config, layers, given.named)
        if not config.lora.init_lora_resize and _other_ranks(config, layers):
            of_file = (RANKS & given.named) - given.typed
            config = taken_over(given.config, layers, given.named - of_file)
            notes = (_yielded(given.config, layers, of_file),) if of_file else ()
        found = problems(config, layers, typed=given.typed)
    except UserError as error:
        found = [_problem(config, text) for text in error.problems]
    notes = () if found else notes
    return dataclasses.replace(given, config=config, problems=(*given.problems, *found), notes=(*given.notes, *notes))


def _yielded(config: Config, layers: Layers, names: Iterable[str]) -> str:
    ranks = " and ".join(map(str, sorted({layer.rank for layer in layers.values()})))
    given = ", ".join(f"{name}: {to_flat_dict(config)[name]}" for name in sorted(names))
    text = f"--{FLAG} {config.lora.init_lora}: the run has the file's ranks, {ranks}, and not what the YAML file says"
    return f"{text} ({given}); --init_lora_resize brings the LoRA to that"


def read(config: Config) -> Layers:
    """The layers of the file by diffusers' names, those of CLIP only if they are wanted."""
    layers = convert.parts(lora_file.read(config.lora.init_lora))
    if config.lora.init_lora_transformer_only:
        layers = {name: layer for name, layer in layers.items() if not layer_names.is_text(name)}
    return layers


def fingerprint(config: Config) -> dict[str, str]:
    """Of the file's content, for checkpoints and metadata; nothing without --init_lora."""
    if config.lora.init_lora is None:
        return {}
    with open_regular(lora_file.locate(config.lora.init_lora)) as file:
        digest = hashlib.sha256()
        while piece := file.read(2**24):
            digest.update(piece)
    return {FINGERPRINT: digest.hexdigest()[:16]}


def name_of(config: Config, content: str | None) -> str | None:
    """The file for people: its name and content, without its place."""
    if config.lora.init_lora is None or content is None:
        return None
    return f"{os.path.basename(os.path.abspath(config.lora.init_lora))}, sha256 {content}"


# --- settings ----------------------------------------------------------------------------------------------------


def taken_over(config: Config, layers: Layers, named: Iterable[str]) -> Config:
    """Rank, alpha and layers as the file has them, unless they are `named`: given by the user."""
    named, own, text = set(named), _transformer(layers), _text(layers)
    if not own:
        raise UserError(f"{config.lora.init_lora}: has no layers of FLUX.1's transformer")
    rank = config.lora.rank if "rank" in named else _most_common(layer.rank for layer in own.values())
    strength = _most_common(layer.scale for layer in own.values())
    found: dict[str, Any] = {"rank": rank, "lora_alpha": None if strength == 1 else strength * rank}
    if "rank" not in named:
        others = {name: layer.rank for name, layer in own.items() if layer.rank != rank}
        found["lora_rank_pattern"] = tuple(f"{exactly(name)}={r}" for name, r in others.items())
    found["lora_layers"] = described(own)
    if text and config.text_encoder.train_text_encoder:
        text_rank = _most_common(layer.rank for layer in text.values())
        kinds = {name.rpartition(".")[2] for name in text}
        found["text_encoder_rank"] = None if text_rank == rank else text_rank
        if kinds != set(TEXT_ENCODER_LAYERS[:4]):
            found["text_encoder_layers"] = ",".join(kind for kind in TEXT_ENCODER_LAYERS if kind in kinds)
    return from_flat_dict(to_flat_dict(config) | {name: v for name, v in found.items() if name not in named})


def described(names: Iterable[str]) -> str | None:
    """--lora_layers for these layers, and as few others as it can say; None for the default."""
    inside: dict[str, set[int]] = {kind: set() for kind in BLOCKS}
    kinds, outside = set(), []
    for name in names:
        start, number, rest = (*name.split(".", 2), "", "")[:3]
        kind = next((kind for kind, prefix in BLOCKS.items() if prefix == start), None)
        if kind is None:
            outside.append(name)
        else:
            inside[kind].add(int(number))
            kinds.add(rest)
    if not outside and kinds == set(PRESETS["default"]):
        return None
    preset = next((preset for preset, own in PRESETS.items() if set(own) == kinds), None)
    named = [preset] if preset else sorted(kinds)
    # block numbers would leave out what is in no block
    blocks = [] if outside else [part for kind, numbers in inside.items() for part in _ranges(kind, numbers)]
    return ",".join([*named, *outside, *blocks])


def _ranges(kind: str, numbers: Iterable[int]) -> list[str]:
    """`double:0-18`, `20`: runs of numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return [f"{kind}:{texts[0]}", *texts[1:]] if texts else []


def _most_common(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _transformer(layers: Layers) -> Layers:
    return {name: layer for name, layer in layers.items() if not layer_names.is_text(name)}


def _text(layers: Layers) -> Layers:
    """CLIP's, without the prefix."""
    return {
        name.removeprefix(layer_names.TEXT_ENCODER): layer
        for name, layer in layers.items()
        if layer_names.is_text(name)
    }


# --- whether it fits ---------------------------------------------------------------------------------------------


def problems(config: Config, layers: Layers, typed: Set[str] = frozenset()) -> list[Problem]:
    """Why the run cannot start from these layers; `typed` are the settings of the command line."""
    text, lora = _text(layers), text_lora(config)
    found = _lost(config, _transformer(layers), config.lora, "lora_layers")
    only = "init_lora_transformer_only"
    if lora is None and text:
        also = ("train_text_encoder", only)
        why = f"has layers of CLIP, which is not trained; add --train_text_encoder, or leave them out by --{only}"
        found.append(_problem(config, why, *also))
    elif lora is not None and not text and not config.lora.init_lora_transformer_only:
        also = ("train_text_encoder", only)
        why = f"has no layers of CLIP for --train_text_encoder; let them start afresh by --{only}"
        found.append(_problem(config, why, *also))
    elif lora is not None:
        found += _lost(config, text, lora, "text_encoder_layers")
    if not found and not config.lora.init_lora_resize and (other := _other_ranks(config, layers)):
        found.append(_rank_problem(config, other, typed))
    model = Path(config.model.pretrained_model_name_or_path)
    if not found and os.path.isdir(model):
        additions = {name: [(layer, 1.0)] for name, layer in layers.items()}
        try:
            misfits = merge.unfit(model, additions)
        except UserError:  # the model's own problem, which its check reports
            misfits = []
        found += [_problem(config, text, "pretrained_model_name_or_path") for text in misfits]
    return found + _place_problems(config)


def _lost(config: Config, own: Layers, lora: LoraConfig, flag: str) -> list[Problem]:
    """Layers of one network that would not be trained."""
    try:
        choice = lora_layers.parse(lora.lora_layers)
    except ValueError:  # reported by the check of values
        return []
    lost = next((name for name in own if not choice.takes(name)), None)
    text = f"has a LoRA on {lost}, which --{flag} does not train; it would be lost"
    return [] if lost is None else [_problem(config, text, flag)]


def _other_ranks(config: Config, layers: Layers) -> list[tuple[str, int, int]]:
    """(name, rank in the file, rank in the run) of the layers in which these differ."""
    parts = ((_transformer(layers), config.lora), (_text(layers), text_lora(config)))
    try:
        pairs = [
            (name, layer.rank, lora_layers.rank_of(lora, name))
            for own, lora in parts
            if lora is not None
            for name, layer in own.items()
        ]
    except ValueError:  # a pattern, reported by the check of values
        return []
    return [pair for pair in pairs if pair[1] != pair[2]]


def _rank_problem(config: Config, other: Sequence[tuple[str, int, int]], typed: Set[str]) -> Problem:
    """Without these flags the ranks are the file's, whatever they are."""
    name, theirs, ours = other[0]
    ranks = ("rank", "lora_rank_pattern", "text_encoder_rank")
    flags = " and ".join(f"--{flag}" for flag in ranks if flag in typed) or "--rank"
    why = (
        f"its LoRA on {name} has rank {theirs}, and this run's is {ours}; leave {flags} out, so that all ranks are the"
    )
    return _problem(
        config, f"{why} file's, or add --init_lora_resize, which brings it to this run's", *ranks, "init_lora_resize"
    )


def _place_problems(config: Config) -> list[Problem]:
    """A new run sets aside what its output folder holds, and a resume would not find the file any more."""
    place, output = Path(config.lora.init_lora).resolve(), Path(config.output.output_dir).resolve()
    if not place.is_relative_to(output):
        return []
    return [_problem(config, "lies in --output_dir, whose content a new run sets aside; choose another", "output_dir")]


def _problem(config: Config, text: str, *also: str) -> Problem:
    path = config.lora.init_lora
    text = text if text.startswith(f"{path}") else f"{path}: {text}"
    return Problem(f"--{FLAG} {text}", flag=FLAG, also=also)


# --- weights -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartWeights:
    """The first weights of one network's LoRA, in the order of `names`."""

    values: list[np.ndarray]
    taken: int
    """Layers from the file; the others are fresh."""
    resized: int
    error: float
    """Of the resized layers, relative to their size."""


def start_weights(
    layers: Mapping[str, Layer], lora: LoraConfig, names: Sequence[str], fresh: Sequence[np.ndarray]
) -> StartWeights:
    """`names` end in `.lora_A` or `.lora_B`; `fresh` are the values of a LoRA that starts from nothing."""
    drawn = dict(zip(names, fresh, strict=True))
    own = {module: layers[module] for module in {name.rpartition(".")[0] for name in names} if module in layers}
    other = {name: layer for name, layer in own.items() if layer.rank != drawn[f"{name}.lora_A"].shape[0]}
    strength, fitted, lost, total = lora.alpha / lora.rank, dict(own), 0.0, 0.0
    for name, layer in other.items():
        exact = dataclasses.replace(layer, down=layer.down.astype(np.float32), up=layer.up.astype(np.float32))
        made = resize({name: [(exact, 1.0)]}, rank=drawn[f"{name}.lora_A"].shape[0])
        fitted[name] = made.layers[name]
        size = _size(layer)
        lost, total = lost + (made.error * size) ** 2, total + size**2
    values = {}
    for name, layer in fitted.items():
        down, up = layer.down.astype(np.float32), layer.up.astype(np.float32)
        if layer.scale != strength:
            up = up * np.float32(layer.scale / strength)
        # a row of zeros in both would never learn: A's are drawn, and B's are zero as in a fresh LoRA
        first = drawn[f"{name}.lora_A"]
        missing = first.shape[0] - layer.rank
        values[f"{name}.lora_A"] = np.concatenate([down, first[layer.rank :]])
        values[f"{name}.lora_B"] = np.concatenate([up, np.zeros((up.shape[0], missing), np.float32)], axis=1)
    error = float(np.sqrt(lost / total)) if total else 0.0
    return StartWeights([values.get(name, drawn[name]) for name in names], len(own), len(other), error)


def _size(layer: Layer) -> float:
    """Frobenius norm of what the layer adds, without its whole matrix."""
    down, up = layer.down.astype(np.float64), layer.up.astype(np.float64)
    return abs(layer.scale) * float(np.sqrt(max(0.0, np.sum((up.T @ up) * (down @ down.T)))))
