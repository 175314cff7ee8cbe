"""safetensors files: headers changed byte by byte and field by field, as a LoRA and as a model's weights.

What the safetensors library refuses must be refused; what it accepts may be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from fuzzing import hostile, lora_files, tensors
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused
from fuzzing.hostile import KINDS
from fuzzing.tensors import Header, pack

WEIGHTS = "diffusion_pytorch_model.safetensors"

# A sound header and its data -> the file.
Change = Callable[[Header, bytes], bytes]


def plans() -> Iterator[Plan]:
    for about, change in REFUSED.items():
        for target in TARGETS:
            yield plan(f"{target}: {about}", structured, target, change, True)
    for about, change in LIBRARY.items():
        yield plan(f"info: {about}", structured, "info", change, False)
    for about, change in SOUND.items():
        yield plan(f"info: {about}", sound, change)
    for about in KINDS:
        for target in ("info", "export", "fuse"):
            yield plan(f"{target}: {about}", special, target, about)
    for n in range(60):
        target = tuple(TARGETS)[n % len(TARGETS)]
        changes = 1 + n // len(TARGETS) % 5
        yield plan(f"{target}: {changes} bytes of the header changed", mutated, target, changes)
    for _ in range(24):
        yield plan("info: a value of the header changed", shuffled)


# --- where the file is used ----------------------------------------------------------------------------------------


def info(bench: Bench, expect: Expect) -> Case:
    return bench.run(expect, "info", "lora.safetensors")


def export(bench: Bench, expect: Expect) -> Case:
    return bench.run(expect, "export", "lora.safetensors", "--format", "kohya", "-o", "made", writes=["made"])


def fuse(bench: Bench, expect: Expect) -> Case:
    return bench.run(expect, "fuse", bench.world.model, "lora.safetensors", "-o", "made", writes=["made"])


def model(bench: Bench, expect: Expect) -> Case:
    return bench.check(expect, pretrained_model_name_or_path="model")


def fused_model(bench: Bench, expect: Expect) -> Case:
    bench.write("lora.safetensors", tensors.file_of(lora_files.make(bench.world, bench.rng)))
    return bench.run(expect, "fuse", "model", "lora.safetensors", "-o", "made", writes=["made"])


TARGETS: dict[str, Callable[[Bench, Expect], Case]] = {
    "info": info,
    "export": export,
    "fuse": fuse,
    "check": model,
    "fuse, as the model": fused_model,
}


def place(bench: Bench, target: str, change: Callable[[bytes], bytes]) -> bool:
    """Write the file where the target looks for it; whether the safetensors library reads it."""
    if target in ("check", "fuse, as the model"):
        path = bench.world.copy_model(bench.folder / "model") / "transformer" / WEIGHTS
        path.write_bytes(change(path.read_bytes()))
    else:
        path = bench.write("lora.safetensors", change(tensors.file_of(lora_files.make(bench.world, bench.rng))))
    return tensors.is_sound(path)


NAMES = ("lora.safetensors", "transformer", WEIGHTS)


def structured(bench: Bench, target: str, change: Change, must: bool) -> Case:
    is_sound = place(bench, target, lambda file: change(*tensors.unpack(file)))
    return TARGETS[target](bench, refused(*NAMES) if must or not is_sound else either(*NAMES))


def sound(bench: Bench, change: Change) -> Case:
    place(bench, "info", lambda file: change(*tensors.unpack(file)))
    return info(bench, fine(lambda _, stdout: None if "diffusers" in stdout else "does not tell the format"))


def special(bench: Bench, target: str, about: str) -> Case:
    KINDS[about](bench.path("lora.safetensors"))
    return TARGETS[target](bench, refused("lora.safetensors"))


def mutated(bench: Bench, target: str, changes: int) -> Case:
    def change(file: bytes) -> bytes:
        content, length = bytearray(file), int.from_bytes(file[:8], "little")
        for _ in range(changes):
            letter = bench.rng.choice((bench.rng.randrange(256), *b'0123456789-+.eE"{}[],:\\ \n'))
            content[bench.rng.randrange(8 + length)] = letter
        return bytes(content)

    is_sound = place(bench, target, change)
    return TARGETS[target](bench, either() if is_sound else refused(*NAMES))


def shuffled(bench: Bench) -> Case:
    """A field of one tensor has another value, of any type."""

    def change(header: Header, data: bytes) -> bytes:
        entry = header[bench.rng.choice(sorted(header))]
        field = bench.rng.choice(("dtype", "shape", "data_offsets"))
        values: list[Any] = [None, True, -1, 0, 1.5, 10**30, "x", [], {}, [-1, 2], [2, 2, 2], ["0", "8"], [0.0, 8.0]]
        values += [[0, len(data)], [len(data), 0], [[0], 8], "F32", [1e308, 2], [True, False]]
        entry[field] = bench.rng.choice(values)
        return pack(header, data)

    return structured(bench, "info", change, False)


# --- what is changed -----------------------------------------------------------------------------------------------


def on_first(**fields: Any) -> Change:
    """Fields of the first tensor have other values."""

    def change(header: Header, data: bytes) -> bytes:
        header[_first(header)] |= fields
        return pack(header, data)

    return change


def _first(header: Header) -> str:
    return next(name for name in header if name != "__metadata__")


def with_metadata(value: Any) -> Change:
    return lambda header, data: pack({**header, "__metadata__": value}, data)


def without_field(name: str) -> Change:
    def change(header: Header, data: bytes) -> bytes:
        del header[_first(header)][name]
        return pack(header, data)

    return change


def overlap(header: Header, data: bytes) -> bytes:
    """The second tensor lies on the first."""
    names = [name for name in header if name != "__metadata__"]
    first, second = header[names[0]], header[names[1]]
    size = second["data_offsets"][1] - second["data_offsets"][0]
    second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + size]
    return pack(header, data)


def in_header(header: Header, data: bytes) -> bytes:
    """A tensor that would lie in the header: writing to it would change the header itself."""
    entry = header[_first(header)]
    start, end = entry["data_offsets"]
    entry["data_offsets"] = [start - 64, end - 64]
    return pack(header, data)


def hole(header: Header, data: bytes) -> bytes:
    for name in header:
        if name != "__metadata__":
            header[name]["data_offsets"] = [place + 16 for place in header[name]["data_offsets"]]
    return pack(header, b"\0" * 16 + data)


def twice(header: Header, data: bytes) -> bytes:
    name = _first(header)
    text = json.dumps(header)
    return pack(f"{text[:-1]}, {json.dumps(name)}: {json.dumps(header[name])}}}".encode(), data)


def wrapping(header: Header, data: bytes) -> bytes:
    """A shape whose product is 0 or small only modulo 2^64."""
    entry = header[_first(header)]
    entry["shape"] = [2**32, 2**32]
    entry["data_offsets"] = [0, 0]
    return pack(header, data)


REFUSED: dict[str, Change] = {
    "two tensors in one place": overlap,
    "a tensor in the header": in_header,
    "a hole before the tensors": hole,
    "a name twice": twice,
    "bytes after the tensors": lambda header, data: pack(header, data + b"\0" * 8),
    "the last byte is missing": lambda header, data: pack(header, data[:-1]),
    "no data": lambda header, _: pack(header, b""),
    "a size that wraps around": wrapping,
    "a negative shape": on_first(shape=[-4, -32]),
    "a shape with fractions": on_first(shape=[4.0, 32.5]),
    "a shape of text": on_first(shape=["4", "32"]),
    "a shape of 10^30": on_first(shape=[10**30]),
    "a shape that is null": on_first(shape=None),
    "a shape that is a number": on_first(shape=128),
    "a shape too small": on_first(shape=[4]),
    "a shape 10,000 long": on_first(shape=[1] * 10_000 + [7]),
    "negative offsets": on_first(data_offsets=[-8, 8]),
    "offsets that go back": on_first(data_offsets=[512, 0]),
    "offsets of text": on_first(data_offsets=["0", "512"]),
    "offsets with fractions": on_first(data_offsets=[0.5, 512.5]),
    "giant offsets": on_first(data_offsets=[2**63, 2**63 + 512]),
    "offsets of 10^400": on_first(data_offsets=[0, 10**400]),
    "three offsets": on_first(data_offsets=[0, 256, 512]),
    "no offsets": without_field("data_offsets"),
    "no shape": without_field("shape"),
    "no type": without_field("dtype"),
    "an unknown type": on_first(dtype="F7"),
    "a type in small letters": on_first(dtype="f32"),
    "a type that is a list": on_first(dtype=["F32"]),
    "a type with an escape sequence": on_first(dtype=hostile.TERMINAL),
    "an entry that is a list": lambda header, data: pack({**header, "x.lora_A.weight": [0, 8]}, data),
    "an entry that is null": lambda header, data: pack({**header, "x.lora_A.weight": None}, data),
    "metadata that is a list": with_metadata(["a"]),
    "metadata that is text": with_metadata("a"),
    "metadata that is a number": with_metadata(5),
    "metadata with numbers": with_metadata({"a": 5}),
    "metadata with lists": with_metadata({"a": ["b"]}),
    "metadata with null": with_metadata({"a": None}),
    "a header that is a list": lambda _, data: pack(b"[]", data),
    "a header that is cut": lambda header, data: pack(json.dumps(header).encode()[:-1], data),
    "a header with a comma too many": lambda header, data: pack(json.dumps(header).encode()[:-1] + b",}", data),
    "a header after a space": lambda header, data: pack(b" " + json.dumps(header).encode(), data),
    "a header with NaN": lambda header, data: pack(
        json.dumps({**header, "x.lora_A.weight": float("nan")}).encode(), data
    ),
    "a header of UTF-16": lambda header, data: pack(json.dumps(header).encode("utf-16-le"), data),
    "a header that is not UTF-8": lambda header, data: pack(json.dumps(header).encode()[:-1] + b', "\xff": 1}', data),
    "a header 100,000 deep": lambda _, data: pack(hostile.deep('{"a":', "}", 100_000, "1").encode(), data),
    "a header with lists 100,000 deep": lambda _, data: pack(
        b'{"x.lora_A.weight":' + hostile.deep("[", "]", 100_000).encode() + b"}", data
    ),
    "a header that claims 0 bytes": lambda header, data: pack(header, data, length=0),
    "a header that claims 2^63 bytes": lambda header, data: pack(header, data, length=2**63),
    "a header that claims more than the file": lambda header, data: pack(header, data, length=10**7),
    "a header that claims a byte less": lambda header, data: pack(header, data, length=len(json.dumps(header)) - 1),
    "no tensors": lambda *_: pack({}, b""),
    "only metadata": lambda *_: pack({"__metadata__": {"a": "b"}}, b""),
    "seven bytes": lambda *_: b"\x02\0\0\0\0\0\0",
    "eight bytes": lambda *_: b"\x02\0\0\0\0\0\0\0",
    "a page": lambda *_: hostile.HTML,
    "an LFS pointer": lambda *_: hostile.LFS_POINTER,
    "a pickle": lambda *_: b"\x80\x02}q\x00.",
}

# For the library to say.
LIBRARY: dict[str, Change] = {
    "an offset with a fraction of 0": on_first(data_offsets=[0.0, 512.0]),
    "an offset that is true": on_first(data_offsets=[False, True]),
    "a field too many": on_first(more=1),
    "metadata that is null": with_metadata(None),
    "a byte-order mark": lambda header, data: pack(b"\xef\xbb\xbf" + json.dumps(header).encode(), data),
    "a name that is empty": lambda header, data: pack({"": header.pop(_first(header)), **header}, data),
}

SOUND: dict[str, Change] = {
    "as it is": pack,
    "spaces after the header": lambda header, data: pack(json.dumps(header).encode() + b" " * 13, data),
    "line breaks in the header": lambda header, data: pack(json.dumps(header, indent=4).encode(), data),
    "metadata without an entry": with_metadata({}),
    "metadata with an escape sequence": with_metadata({"a": hostile.TERMINAL, hostile.TERMINAL: "b"}),
    "metadata with line breaks": with_metadata({"a\nb": "c\nerror: d\r\ne"}),
    "metadata of 1 MB": with_metadata({"a": "x" * 1_000_000}),
    "metadata with half a letter": lambda header, data: pack(
        {**header, "__metadata__": {"a": "\u202e" + hostile.MARKUP}}, data
    ),
    "entries in another order": lambda header, data: pack(dict(reversed(header.items())), data),
}
