"""The weight files of one part of a model: which ones mindone loads, and whether they hold what config.json asks for.

Only headers are read, and tensors that are there under two names. Every problem is a sentence that names the part and
the file.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flux_db.errors import UserError
from flux_db.files import open_regular, read_text
from flux_db.model import int8
from flux_db.model.expected_weights import Shapes, expected_weights, is_extra, own_name
from flux_db.plain_json import parse_json
from flux_db.weight_file import Entry, WeightFile, open_weights

# How the pointer begins that a git clone without LFS has in place of a large file.
LFS_POINTER = b"version https://git-lfs"

FLOATING = ("F64", "F32", "F16", "BF16")
GUIDANCE = "time_text_embed.guidance_embedder."
INCOMPLETE = "the download may be incomplete"

# The classes of these are in mindone.transformers; of the others in mindone.diffusers.
SCORING = ("dinov2", "clip")
OF_TRANSFORMERS = ("text_encoder", "text_encoder_2", *SCORING)

# In a message about many.
NAMES_SHOWN = 3
MOST_SHARDS = 1000


class Chosen(NamedTuple):
    """What mindone loads for a part."""

    file: Path
    """The weights, or the index of several files."""
    variant: str | None
    """None: the plain files."""
    network: str
    """Which one, as `expected_weights` knows it."""

    @property
    def is_index(self) -> bool:
        return self.file.suffix == ".json"


class Held(NamedTuple):
    """What the files of a part hold."""

    entries: dict[str, Entry]
    problems: list[str]


def choose(part: Path, variant: str | None, network: str | None = None) -> Chosen | None:
    """A variant's files go before the plain ones; of index and single file, what mindone's class looks for first.

    `network`: where the folder's name does not say which it is.
    """
    network = network or part.name
    for wanted in dict.fromkeys((variant, None)):
        for name in _names(network, wanted):
            if os.path.isfile(part / name):
                return Chosen(part / name, wanted, network)
    return None


def variants(part: Path) -> list[str | None]:
    """Those that the part has weights of; None means the plain ones."""
    names = [path.name for path in part.glob("*.safetensors")]
    found = [re.fullmatch(r"\w+\.([\w.-]+?)(-\d{5}-of-\d{5})?\.safetensors", name) for name in names]
    return [*([None] if choose(part, None) else []), *sorted({match[1] for match in found if match})]


def weight_problems(
    part: Path, variant: str | None, config: Mapping[str, Any] | None, network: str | None = None
) -> list[str]:
    """All that is wrong with a part's weights; without a config, only with the files themselves."""
    chosen = choose(part, variant, network)
    if chosen is None:
        return _no_weights(part, network or part.name)
    if old := _old_index(part, chosen):
        new = _names(chosen.network, chosen.variant)[0]
        return [f"{part.name}/{old} has the form of old versions; rename it to {new}"]
    held = read_headers(chosen)
    problems = [f"{problem}; {INCOMPLETE}" for problem in held.problems]
    if config is None:
        return problems
    try:
        expected = expected_weights(chosen.network, config)
    except ValueError as problem:
        return [*problems, f"{part.name}/config.json: {problem}; fetch it again"]
    return problems or _differences(chosen, expected, held.entries) or _unequal_twins(chosen, held.entries)


def read_headers(chosen: Chosen) -> Held:
    """The tensors of a part, from the headers of all its files."""
    return _read_shards(chosen.file) if chosen.is_index else _read_file(chosen.file)


def open_files(chosen: Chosen) -> list[WeightFile]:
    """The weight files themselves, of a part that `weight_problems` finds nothing wrong with."""
    names = sorted(set(read_object(chosen.file)["weight_map"].values())) if chosen.is_index else [chosen.file.name]
    return [open_weights(chosen.file.with_name(name)) for name in names]


def read_object(file: Path) -> dict[str, Any]:
    """The content of a JSON file of a model; a UserError says in one sentence what is wrong with it."""
    name = short_name(file)
    try:
        content = parse_json(read_text(file))
    except FileNotFoundError:
        raise UserError(f"{name} is missing") from None
    except OSError as problem:
        raise UserError(f"{name} cannot be read ({problem.strerror})") from problem
    except ValueError as problem:
        raise UserError(f"{name} cannot be read ({problem})") from problem
    if not isinstance(content, dict):
        raise UserError(f"{name} holds no JSON object")
    return content


def short_name(file: Path) -> str:
    """Relative to the model's folder."""
    return file.name if file.name == "model_index.json" else f"{file.parent.name}/{file.name}"


def some(names: Iterable[str]) -> str:
    """The first few, and how many more."""
    names = [name if len(name) <= 200 else f"{name[:200]}..." for name in names]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


# ---- which files ----


def _names(network: str, variant: str | None) -> list[str]:
    infix = f".{variant}" if variant else ""
    # mindone's diffusers classes look for an index first, its transformers classes for a single file
    if network in OF_TRANSFORMERS:
        return [f"model{infix}.safetensors", f"model.safetensors.index{infix}.json"]
    stem = "diffusion_pytorch_model"
    return [f"{stem}.safetensors.index{infix}.json", f"{stem}{infix}.safetensors"]


def _old_index(part: Path, chosen: Chosen) -> str | None:
    """An index that mindone would prefer to the single file of a variant."""
    if chosen.variant is None or chosen.is_index or chosen.network in OF_TRANSFORMERS:
        return None
    stem, ending = chosen.file.name.split(".")[0], "index.json"
    old = (f"{stem}.{chosen.variant}.safetensors.{ending}", f"{stem}.safetensors.{chosen.variant}.{ending}")
    return next((name for name in old if os.path.lexists(part / name)), None)


def _no_weights(part: Path, network: str) -> list[str]:
    names = sorted(_names(network, None), key=len)
    for name in names:
        if os.path.lexists(part / name):  # a pipe, a folder, a link to nothing
            return [f"{problem}; {INCOMPLETE}" for problem in _read_file(part / name).problems]
    others = sorted(path.name for path in part.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf"))
    hint = f"{others[0]} is of another format, which is never loaded" if others else INCOMPLETE
    if network not in SCORING and (found := variants(part)):
        hint = f"there are those of a variant: add --variant {found[0]}"
    return [f"{part.name} has no weights ({' or '.join(names)}); {hint}"]


# ---- headers ----


def _read_file(file: Path) -> Held:
    name = short_name(file)
    try:
        with open_regular(file) as stream:
            start = stream.read(len(LFS_POINTER))
    except FileNotFoundError:
        return Held({}, [f"{name} is missing"])
    except OSError as problem:
        return Held({}, [f"{name} cannot be read ({problem.strerror})"])
    if not start:
        return Held({}, [f"{name} is empty"])
    if start == LFS_POINTER:
        return Held({}, [f"{name} is only a pointer of Git LFS, which git lfs pull would fetch"])
    try:
        return Held(open_weights(file).entries, [])
    except UserError as error:
        return Held({}, [problem.replace(str(file), name) for problem in error.problems])


def _read_shards(index: Path) -> Held:
    name = short_name(index)
    try:
        content = read_object(index)
    except UserError as error:
        return Held({}, error.problems)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(content.get("metadata"), dict):
        return Held({}, [f"{name} is no index: it names no weight files, or has no metadata"])
    strange = [shard for shard in weight_map.values() if not _is_plain_name(shard)]
    if strange:
        shown = reprlib.repr(strange[0])
        return Held({}, [f"{name} names {shown}, which is no safetensors file in its own folder"])
    names = sorted(set(weight_map.values()))
    if len(names) > MOST_SHARDS:
        return Held({}, [f"{name} names {len(names)} files, more than any model has"])
    shards = {shard: _read_file(index.parent / shard) for shard in names}
    problems = [problem for held in shards.values() for problem in held.problems]
    entries = {tensor: entry for held in shards.values() for tensor, entry in held.entries.items()}
    return Held(entries, problems or _index_problems(name, weight_map, shards))


def _index_problems(name: str, weight_map: Mapping[str, str], shards: Mapping[str, Held]) -> list[str]:
    """mindone believes the index about which tensors there are, and loads whatever the files hold."""
    lacking = [tensor for tensor, shard in weight_map.items() if tensor not in shards[shard].entries]
    places = Counter(tensor for held in shards.values() for tensor in held.entries)
    twice = [tensor for tensor, count in places.items() if count > 1]
    unlisted = [tensor for tensor in places if tensor not in weight_map]
    return [
        f"{name} {text} {some(tensors)}"
        for text, tensors in (
            ("lists tensors in a file that does not hold them:", lacking),
            ("names several files that hold the same tensors:", twice),
            ("does not list all tensors of its files:", unlisted),
        )
        if tensors
    ]


def _is_plain_name(shard: object) -> bool:
    return (
        isinstance(shard, str)
        and shard.endswith(".safetensors")
        and "\0" not in shard
        and not shard.startswith(".")
        and os.path.basename(shard) == shard
    )


# ---- comparing ----


def _differences(chosen: Chosen, expected: Shapes, entries: Mapping[str, Entry]) -> list[str]:
    part, name = chosen.network, short_name(chosen.file)
    held = {tensor: entry for tensor, entry in entries.items() if not is_extra(part, tensor)}
    quantised = {tensor for tensor, entry in held.items() if _is_int8(part, tensor, entry)}
    expected = expected | {int8.scale_name(tensor): held[tensor].shape[:1] for tensor in quantised}
    wanted = {tensor: expected.get(own_name(part, tensor)) for tensor in held}
    known = {own_name(part, tensor) for tensor in held}
    missing = [tensor for tensor in expected if tensor not in known]
    unexpected = [tensor for tensor, shape in wanted.items() if shape is None]
    problems = _guidance_problems(part, expected, held)
    if problems:
        missing, unexpected = ([t for t in names if not t.startswith(GUIDANCE)] for names in (missing, unexpected))
    shapes = [
        f"{tensor} ({_sides(entry.shape)}, not {_sides(wanted[tensor])})"
        for tensor, entry in held.items()
        if wanted[tensor] not in (None, entry.shape)
    ]
    types = [
        f"{tensor} ({entry.dtype})"
        for tensor, entry in held.items()
        if wanted[tensor] is not None and entry.dtype not in FLOATING and tensor not in quantised
    ]
    same = "fetch config.json and the weights of the same model"
    quantised = "quantised weights cannot be used, fetch the original ones"
    lacks = f"lacks {len(missing)} of the {len(expected)} tensors that config.json asks for:"
    return problems + [
        f"{name} {text} {some(tensors)}; {remedy}"
        for text, tensors, remedy in (
            (lacks, missing, INCOMPLETE),
            ("holds tensors that config.json does not ask for:", unexpected, same),
            ("holds tensors of other shapes than config.json asks for:", shapes, same),
            (f"holds tensors that are not {', '.join(FLOATING)}:", types, quantised),
        )
        if tensors
    ]


def _is_int8(part: str, tensor: str, entry: Entry) -> bool:
    """A matrix as `flux_db quantize` stores it."""
    return part == "transformer" and entry.dtype == "I8" and int8.is_matrix(tensor, entry.shape)


def _unequal_twins(chosen: Chosen, entries: Mapping[str, Entry]) -> list[str]:
    """A tensor under both of its names must be one tensor: which of two would be loaded is nobody's choice."""
    named = {tensor: own_name(chosen.network, tensor) for tensor in entries}
    twins = {tensor: own for tensor, own in named.items() if own != tensor and own in entries}
    if not twins:
        return []
    files = {tensor: file for file in open_files(chosen) for tensor in file.entries}
    name = short_name(chosen.file)
    return [
        f"{name} holds {tensor} and {own}, which are one tensor, with different values; fetch it again"
        for tensor, own in twins.items()
        if not np.array_equal(files[tensor].read(tensor), files[own].read(own))
    ]


def _guidance_problems(part: str, expected: Iterable[str], held: Iterable[str]) -> list[str]:
    """FLUX.1-dev has an embedding for the guidance and FLUX.1-schnell has none; config.json must say which it is."""
    asked, there = ([tensor for tensor in names if tensor.startswith(GUIDANCE)] for names in (expected, held))
    says = f"{part}/config.json says guidance_embeds {str(bool(asked)).lower()}, but the weights"
    if asked and not there:
        schnell = "if they are those of FLUX.1-schnell, it must say false"
        return [f"{says} lack {some(asked)}; {schnell}; otherwise {INCOMPLETE}"]
    return [f"{says} hold {some(there)}; it must say true"] if there and not asked else []


def _sides(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"


# ---- JSON ----
