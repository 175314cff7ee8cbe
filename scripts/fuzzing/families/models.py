"""A model's weights: tensors, files and shards that are missing, renamed, reshaped, cut, or something else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from fuzzing import hostile, tensors
from fuzzing.case import Bench, Case, Expect, Plan, fine, plan, refused
from fuzzing.hostile import KINDS
from fuzzing.looks import can_start
from fuzzing.tensors import Raw

FLAG = "--pretrained_model_name_or_path"
NETWORKS = {
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
    "text_encoder_2": "model",
}

Shards = dict[str, dict[str, Raw]]


def plans() -> Iterator[Plan]:
    yield plan("a sound model", lambda bench: with_model(bench, lambda model: None, fine(can_start)))
    for part in NETWORKS:
        for dtype in ("F16", "BF16"):
            yield plan(f"{part} in {dtype}", retyped, part, dtype)
        for count in (2, 5):
            yield plan(f"{part} in {count} shards", sharded, part, count)
        for about, change in WEIGHTS.items():
            yield plan(f"{part}: {about}", changed_weights, part, change)
        for about, content in FILES.items():
            yield plan(f"{part}: {about}", replaced_weights, part, content)
        for about in KINDS:
            yield plan(f"{part}: weights that are {about}", special_file, f"{part}/{NETWORKS[part]}.safetensors", about)
    for about, change in INDEXES.items():
        for part in ("transformer", "text_encoder_2"):
            yield plan(f"{part}, index: {about}", indexed, part, change)


def with_model(bench: Bench, change: Callable[[Path], object], expect: Expect, **flags: object) -> Case:
    model = bench.world.copy_model(bench.folder / "model")
    change(model)
    return bench.check(expect, pretrained_model_name_or_path="model", **flags)


def weights_of(model: Path, part: str) -> Path:
    return model / part / f"{NETWORKS[part]}.safetensors"


# --- weights -------------------------------------------------------------------------------------------------------


def changed_weights(bench: Bench, part: str, change: Callable[[Bench, dict[str, Raw]], str]) -> Case:
    """One tensor is not what it should be: it must be refused by its name, or else it would be a random one."""
    found: list[str] = []

    def apply(model: Path) -> None:
        content, metadata = tensors.read(weights_of(model, part))
        found.append(change(bench, content))
        weights_of(model, part).write_bytes(tensors.file_of(content, metadata))

    case = with_model(bench, apply, refused())
    return case.but(expect=refused(found[0]))


def pick(bench: Bench, content: dict[str, Raw]) -> str:
    return bench.rng.choice(sorted(name for name, tensor in content.items() if len(tensor.shape) > 1))


def missing(bench: Bench, content: dict[str, Raw]) -> str:
    name = pick(bench, content)
    del content[name]
    return name


def renamed(bench: Bench, content: dict[str, Raw]) -> str:
    name = pick(bench, content)
    content[f"{name}_old"] = content.pop(name)
    return name


def prefixed(_bench: Bench, content: dict[str, Raw]) -> str:
    """All of them, as another program would write them."""
    names = sorted(content)
    for name in names:
        content[f"model.{name}"] = content.pop(name)
    return "model."


def turned(bench: Bench, content: dict[str, Raw]) -> str:
    name = bench.rng.choice(sorted(name for name, tensor in content.items() if tensor.shape != tensor.shape[::-1]))
    content[name] = Raw(content[name].dtype, content[name].shape[::-1], content[name].data)
    return name


def flattened(bench: Bench, content: dict[str, Raw]) -> str:
    name = pick(bench, content)
    tensor = content[name]
    content[name] = Raw(tensor.dtype, (math.prod(tensor.shape),), tensor.data)
    return name


def shortened(bench: Bench, content: dict[str, Raw]) -> str:
    name = pick(bench, content)
    rows, *others = content[name].shape
    data = content[name].data[: len(content[name].data) // rows * (rows - 1)]
    content[name] = Raw(content[name].dtype, (rows - 1, *others), data)
    return name


def integers(bench: Bench, content: dict[str, Raw]) -> str:
    name = pick(bench, content)
    content[name] = Raw("I32", content[name].shape, content[name].data)
    return name


def emptied(bench: Bench, content: dict[str, Raw]) -> str:
    name = pick(bench, content)
    content[name] = Raw(content[name].dtype, (0, *content[name].shape[1:]), b"")
    return name


def unexpected(_bench: Bench, content: dict[str, Raw]) -> str:
    content["something.else.weight"] = next(iter(content.values()))
    return "something.else.weight"


def nothing_at_all(_bench: Bench, content: dict[str, Raw]) -> str:
    content.clear()
    return FLAG


WEIGHTS: dict[str, Callable[[Bench, dict[str, Raw]], str]] = {
    "a tensor is missing": missing,
    "a tensor is renamed": renamed,
    "all tensors have a prefix": prefixed,
    "a tensor is turned": turned,
    "a tensor is flat": flattened,
    "a tensor lacks a row": shortened,
    "a tensor of integers": integers,
    "a tensor without rows": emptied,
    "a tensor too many": unexpected,
    "no tensor": nothing_at_all,
}

FILES: dict[str, Callable[[bytes], bytes]] = {
    "a page": lambda _: hostile.HTML,
    "an LFS pointer": lambda _: hostile.LFS_POINTER,
    "cut in the data": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "cut in the header": lambda data: data[:200],
    "bytes too many": lambda data: data + b"\0" * 64,
    "a pickle": lambda _: b"\x80\x02}q\x00.",
    "a zip file": lambda _: b"PK\x03\x04" + b"\0" * 200,
    "zeros": lambda data: b"\0" * len(data),
    "an empty header": lambda _: b"\x02" + b"\0" * 7 + b"{}",
}


def replaced_weights(bench: Bench, part: str, content: Callable[[bytes], bytes]) -> Case:
    def apply(model: Path) -> None:
        path = weights_of(model, part)
        path.write_bytes(content(path.read_bytes()))

    return with_model(bench, apply, refused(part))


def special_file(bench: Bench, name: str, about: str) -> Case:
    def apply(model: Path) -> None:
        (model / name).unlink()
        KINDS[about](model / name)

    return with_model(bench, apply, refused(name, name.split("/")[0]))


def retyped(bench: Bench, part: str, dtype: str) -> Case:
    """As published models are: in half precision, under the name of a variant."""

    def apply(model: Path) -> None:
        content, metadata = tensors.read(weights_of(model, part))
        content = {name: tensors.raw(tensor.array(), dtype) for name, tensor in content.items()}
        weights_of(model, part).write_bytes(tensors.file_of(content, metadata))

    return with_model(bench, apply, fine(can_start))


# --- shards --------------------------------------------------------------------------------------------------------


def write_shards(model: Path, part: str, count: int, change: Callable[[Shards, dict], object]) -> None:
    """The weights in several files with an index; `change` may damage both before they are written."""
    path = weights_of(model, part)
    content, metadata = tensors.read(path)
    path.unlink()
    names = [f"{path.stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    shards: Shards = {name: {} for name in names}
    for number, (key, tensor) in enumerate(content.items()):
        shards[names[number % count]][key] = tensor
    index = {"metadata": {}, "weight_map": {key: name for name, tensors_ in shards.items() for key in tensors_}}
    change(shards, index)
    for name, tensors_ in shards.items():
        (model / part / name).write_bytes(tensors.file_of(tensors_, metadata))
    (model / part / f"{path.name}.index.json").write_text(json.dumps(index))


def sharded(bench: Bench, part: str, count: int) -> Case:
    return with_model(bench, lambda model: write_shards(model, part, count, lambda *_: None), fine(can_start))


def indexed(bench: Bench, part: str, change: Callable[[Shards, dict], object]) -> Case:
    return with_model(bench, lambda model: write_shards(model, part, 2, change), refused(part))


def _all_to(place: object) -> Callable[[Shards, dict], object]:
    def change(_shards: Shards, index: dict) -> None:
        index["weight_map"] = dict.fromkeys(index["weight_map"], place)

    return change


def _one_to(place: object) -> Callable[[Shards, dict], object]:
    def change(_shards: Shards, index: dict) -> None:
        index["weight_map"][next(iter(index["weight_map"]))] = place

    return change


def _other_shard(shards: Shards, index: dict) -> None:
    key, name = next(iter(index["weight_map"].items()))
    index["weight_map"][key] = next(other for other in shards if other != name)


def _in_both(shards: Shards, _index: dict) -> None:
    first, second = shards.values()
    second |= {next(iter(first)): next(iter(first.values()))}


INDEXES: dict[str, Callable[[Shards, dict], object]] = {
    "no weight_map": lambda _shards, index: index.pop("weight_map"),
    "weight_map a list": lambda _shards, index: index.update(weight_map=list(index["weight_map"])),
    "weight_map empty": lambda _shards, index: index.update(weight_map={}),
    "weight_map null": lambda _shards, index: index.update(weight_map=None),
    "a tensor not listed": lambda _shards, index: index["weight_map"].popitem(),
    "a tensor that is not there": lambda _shards, index: index["weight_map"].update(
        nothing=next(iter(index["weight_map"].values()))
    ),
    "a tensor in the other shard": _other_shard,
    "a tensor in both shards": _in_both,
    "a shard that is missing": lambda shards, _index: shards.popitem(),
    "all in /etc/passwd": _all_to("/etc/passwd"),
    "all above the folder": _all_to("../vae/diffusion_pytorch_model.safetensors"),
    "one in /dev/zero": _one_to("/dev/zero"),
    "one above the folder": _one_to("../../../../../../etc/passwd"),
    "one in the folder itself": _one_to("."),
    "one without a name": _one_to(""),
    "one with NUL": _one_to("a\0b"),
    "one with an escape sequence": _one_to("\x1b[31m.safetensors"),
    "one of half a letter": _one_to("\ud800"),
    "one a number": _one_to(5),
    "one a list": _one_to(["a"]),
    "one null": _one_to(None),
    "one of 300 letters": _one_to("x" * 300),
    "one .bin": _one_to("pytorch_model.bin"),
}
