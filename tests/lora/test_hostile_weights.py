"""Weight and LoRA files of strangers: each is refused in one line by every command that would use it.

The files are made byte by byte, since the library would not write them.
"""

import json
import os
import resource
import shutil
import struct
import time

import ml_dtypes
import numpy as np
import pytest
from program import command, run
from safetensors.numpy import load_file

from flux_db.__main__ import main
from flux_db.errors import UserError
from flux_db.lora import convert, describe, generate_flags, lora_file, merge
from flux_db.weight_file import open_weights, to_bytes

LAYER = "transformer_blocks.0.attn.to_q"
PREFIX = f"transformer.{LAYER}"


def raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensor(shape=(2,), start=0, end=8, dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end], **more}


def one_line(error):
    """The message, which must be one line without anything that a terminal obeys."""
    text = str(error)
    assert text.isprintable() and len(text) < 2000, text
    return text


# ---- The header ----

EIGHT = bytes(8)
ENTRY = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
HEADERS = {
    "two tensors in one place": ({"a": tensor(), "b": tensor()}, EIGHT, "damaged.*tensor `[ab]`"),
    "overlap": ({"a": tensor(), "b": tensor(start=4, end=12)}, bytes(12), "damaged.*tensor `b`"),
    "hole": ({"a": tensor(), "b": tensor(start=12, end=20)}, bytes(20), "damaged.*tensor `b`"),
    "hole at the start": ({"a": tensor(start=4, end=12)}, bytes(12), "damaged.*tensor `a`"),
    "data after the last tensor": ({"a": tensor()}, bytes(9), "not fully covered"),
    "data without tensors": ({}, EIGHT, "not fully covered"),
    "cut off": ({"a": tensor(), "b": tensor(start=8, end=16)}, bytes(15), "cut off in the middle of b"),
    "the same tensor twice": (b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", EIGHT, "it has 'a' twice"),
    "metadata twice": (b'{"__metadata__":{"x":"1","x":"2"},"a":' + ENTRY + b"}", EIGHT, "it has 'x' twice"),
    "dtype twice": (b'{"a":{"dtype":"I32",' + ENTRY[1:] + b"}", EIGHT, "it has 'dtype' twice"),
    "negative shape": ({"a": tensor((-2,))}, EIGHT, "damaged at a"),
    "two negative sides": ({"a": tensor((-1, -2))}, EIGHT, "damaged at a"),
    "float shape": ({"a": tensor((2.0,))}, EIGHT, "damaged at a"),
    "bool shape": ({"a": tensor((True,), end=4)}, bytes(4), "damaged at a"),
    "text shape": ({"a": tensor(("2",))}, EIGHT, "damaged at a"),
    "NaN shape": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', EIGHT, "NaN is no number"),
    "shape that is no list": ({"a": {**tensor(), "shape": "2"}}, EIGHT, "damaged at a"),
    "shape beyond 64 bits": ({"a": tensor((2**64 + 2,))}, EIGHT, "damaged at a"),
    "shape that wraps around": ({"a": tensor((2**62, 4))}, EIGHT, "damaged at a"),
    "shape of 5,000 digits": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', EIGHT,
                              "damaged"),
    "shape with 100,000 sides": ({"a": tensor((1,) * 100_000 + (2,))}, EIGHT, "100001 dimensions"),
    "another size than the shape's": ({"a": tensor((3,))}, EIGHT, "damaged at a"),
    "negative offset": ({"a": tensor(start=-8, end=0)}, EIGHT, "damaged.*integer `-8`"),
    "offset into the header": ({"a": tensor(start=-16, end=-8)}, EIGHT, "damaged.*integer `-16`"),
    "giant offset": ({"a": tensor(end=2**63)}, EIGHT, "damaged at a"),
    "giant offsets": ({"a": tensor(start=2**63, end=2**63 + 8)}, EIGHT, "cut off in the middle of a"),
    "float offset": ({"a": {**tensor(), "data_offsets": [0.0, 8.0]}}, EIGHT, "damaged at a"),
    "three offsets": ({"a": {**tensor(), "data_offsets": [0, 8, 8]}}, EIGHT, "damaged at a"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, EIGHT, "damaged at a"),
    "no entry": ({"a": 1}, EIGHT, "damaged at a"),
    "unknown type": ({"a": tensor(dtype="F99")}, EIGHT, "unknown variant `F99`"),
    "type of packed bits": ({"a": tensor((16,), dtype="F4")}, EIGHT, "a: is of a type that cannot be read: F4"),
    "type that is a number": ({"a": tensor(dtype=1)}, EIGHT, "damaged at a"),
    "empty tensor": ({"a": tensor((0,), end=0)}, b"", r"a: is empty; its shape is \(0,\)"),
    "empty tensor of giant shape": ({"a": tensor((0, 2**63), end=0)}, b"", "a: is empty"),
    "name of 10,000 characters": ({"a" * 10_000: tensor()}, EIGHT, "name of 10000 characters"),
    "metadata of numbers": ({"__metadata__": {"x": 1}, "a": tensor()}, EIGHT, "damaged.*expected a string"),
    "metadata of lists": ({"__metadata__": {"x": ["y"]}, "a": tensor()}, EIGHT, "damaged.*expected a string"),
    "metadata that is a list": ({"__metadata__": [], "a": tensor()}, EIGHT, "damaged.*expected a map"),
    "deep JSON": (b'{"a":' + b"[" * 100_000, b"", "nested too deeply"),
    "deep JSON in an entry": (b'{"a":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", b"", "nested too deeply"),
    "not UTF-8": (b'{"\xff":' + ENTRY + b"}", EIGHT, "damaged.*utf-8"),
    "UTF-16": ('{"a":1}'.encode("utf-16-le"), b"", "damaged"),
    "half of a surrogate pair": (b'{"\\ud800":' + ENTRY + b"}", EIGHT, "damaged"),
    "a list": (b"[1]", b"", "not a safetensors file"),
    "header of nothing": (b"", b"", "not a safetensors file"),
    "escape sequence in a name": ({"a\x1b[2J\n": tensor((3,))}, EIGHT, r"damaged at a\\x1b\[2J\\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_refused_in_one_line(tmp_path, name):
    header, data, message = HEADERS[name]
    path = raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(UserError, match=r"x\.safetensors") as caught:
        open_weights(path)
    caught.match(message)
    one_line(caught.value)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "not a safetensors"),
        (1000, "cut off"),
        (2**20 * 50, "not a safetensors"),
        (2**63, "not a safetensors"),
        (2**64 - 1, "not a safetensors"),
    ],
)
def test_a_header_of_a_strange_length(tmp_path, length, message):
    with pytest.raises(UserError, match=message):
        open_weights(raw(tmp_path / "x", {"a": tensor()}, EIGHT, length))


@pytest.mark.parametrize("padding", [b"", b"   "])
def test_what_is_sound_is_read(tmp_path, padding):
    header = json.dumps({"__metadata__": {"k": "v"}, "b": tensor(start=8, end=16), "a": tensor(extra=1)}).encode()
    file = open_weights(raw(tmp_path / "x", header + padding, np.arange(4, dtype=np.float32).tobytes()))
    assert file.metadata == {"k": "v"}
    assert (file.read("a").tolist(), file.read("b").tolist()) == ([0, 1], [2, 3])
    os.truncate(tmp_path / "x", file.entries["b"].end - 1)
    with pytest.raises(UserError, match="became shorter while it was read; b is cut off"):
        file.read("b")


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "folder", "sparse", "dangling link", "name too long"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "/dev/zero":
        path.symlink_to(kind)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 2**42)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nothing")
    else:
        path = tmp_path / ("x" * 300)
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"not a file|not a safetensors file|cannot be read"):
        open_weights(path)
    with pytest.raises(UserError):
        lora_file.read(path)
    assert time.monotonic() - begin < 5


# ---- The LoRA ----


def matrices(prefix=PREFIX, rank=2, sides=(8, 8), names=("lora_A", "lora_B"), dtype=np.float32):
    outputs, inputs = sides
    rng = np.random.default_rng(0)
    return {
        f"{prefix}.{names[0]}.weight": rng.standard_normal((rank, inputs)).astype(dtype),
        f"{prefix}.{names[1]}.weight": rng.standard_normal((outputs, rank)).astype(dtype),
    }


def changed(tensors, key, value):
    return {**tensors, key: value}


def filled(value, **options):
    """A LoRA with one value that should not be there."""
    tensors = matrices(**options)
    next(iter(tensors.values()))[1, 3] = value
    return tensors


A, B, ALPHA = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight", f"{PREFIX}.alpha"
GOOD = matrices()
TENSORS = {
    "NaN": (filled(np.nan), f"{PREFIX} holds values that are NOT FINITE"),
    "infinity": (filled(np.inf), f"{PREFIX} holds values that are NOT FINITE"),
    "NaN in bf16": (filled(np.nan, dtype=ml_dtypes.bfloat16), "NOT FINITE"),
    "NaN in 8 bits": (filled(np.nan, dtype=ml_dtypes.float8_e4m3fn), "NOT FINITE"),
    "NaN in a kohya file": (
        filled(np.nan, prefix="lora_unet_double_blocks_0_img_attn_qkv", sides=(24, 8), names=("lora_down", "lora_up")),
        "lora_unet_double_blocks_0_img_attn_qkv holds values that are NOT FINITE",
    ),
    "NaN alpha": (changed(GOOD, ALPHA, np.array(np.nan, np.float32)), f"{PREFIX} has an alpha of nan"),
    "infinite alpha": (changed(GOOD, ALPHA, np.array(-np.inf, np.float32)), f"{PREFIX} has an alpha of -inf"),
    "giant alpha": (changed(GOOD, ALPHA, np.array(1e300)), f"{PREFIX} has an alpha of 1e\\+300"),
    "alpha that is a list": (changed(GOOD, ALPHA, np.ones(2, np.float32)), f"{ALPHA}: is F32 .* not one number"),
    "alpha that is a matrix": (changed(GOOD, ALPHA, np.ones((1, 1), np.float32)), f"{ALPHA}: .* not one number"),
    "alpha that is true": (changed(GOOD, ALPHA, np.array(True)), f"{ALPHA}: is BOOL .* not one number"),
    "scalar": (changed(GOOD, A, np.array(1.0, np.float32)), f"{A}: is F32 of shape \\(\\), not a matrix"),
    "vector": (changed(GOOD, B, np.ones(8, np.float32)), f"{B}: is F32 of shape \\(8,\\), not a matrix"),
    "integers": (changed(GOOD, A, np.ones((2, 8), np.int32)), f"{A}: is I32 .*, not a matrix of floats"),
    "more than two dimensions": (changed(GOOD, A, np.ones((2, 8, 3, 3), np.float32)), "more than two dimensions"),
    "two ranks": (changed(GOOD, A, np.ones((3, 8), np.float32)), f"{A} and {B} do not fit"),
    "one matrix only": ({A: GOOD[A]}, f"it holds {A}"),
    "lora_A and lora_down": (
        {**GOOD, **matrices(names=("lora_down", "lora_up"))},
        f"the layer {PREFIX} is there twice, as {A} and as {PREFIX}.lora_down.weight",
    ),
    "with and without .default": (
        {**GOOD, **matrices(names=("lora_A.default", "lora_B.default"))},
        f"the layer {PREFIX} is there twice",
    ),
    "with and without prefix": (
        {**GOOD, **matrices(LAYER)},
        f"the layer {LAYER} is there twice, as {PREFIX} and as {LAYER}",
    ),
    "by diffusers' and by kohya's name": (
        {**GOOD, **matrices(f"lora_unet_{LAYER.replace('.', '_')}", names=("lora_down", "lora_up"))},
        f"the layer {LAYER} is there twice",
    ),
    "single and fused": (
        {**GOOD, **matrices("lora_unet_double_blocks_0_img_attn_qkv", sides=(24, 8), names=("lora_down", "lora_up"))},
        "mixes fused layers with single ones",
    ),
    "block 007": (matrices("transformer.transformer_blocks.007.attn.to_q"), "is not a LoRA for FLUX.1"),
    "block of other digits": (matrices("transformer.transformer_blocks.٣.attn.to_q"), "is not a LoRA for FLUX.1"),
    "alpha of nothing": (changed(GOOD, "x.alpha", np.array(1.0, np.float32)), "would be lost: x.alpha"),
    "outputs that cannot be divided": (
        matrices("diffusion_model.double_blocks.0.img_attn.qkv", sides=(25, 8)),
        "25 outputs cannot be divided",
    ),
    "no scale and shift": (
        matrices("diffusion_model.final_layer.adaLN_modulation.1", sides=(9, 8)),
        "9 outputs cannot be divided",
    ),
}
USES = {
    "export": lambda path: convert.convert(lora_file.read(path), "diffusers"),
    "fuse": lambda path: merge.read_all([merge.Weighted(path)]),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", TENSORS)
def test_a_hostile_lora_is_refused_by_name(tmp_path, name, use):
    tensors, message = TENSORS[name]
    (tmp_path / "x.safetensors").write_bytes(to_bytes(tensors, {}))
    with pytest.raises(UserError) as caught:
        USES[use](tmp_path / "x.safetensors")
    caught.match(message)
    one_line(caught.value)


def test_rank_0_is_refused(tmp_path):
    header = {A: tensor((0, 8), end=0), B: tensor((8, 0), end=0)}
    with pytest.raises(UserError, match=r"lora_A.weight: is empty; its shape is \(0, 8\)"):
        lora_file.read(raw(tmp_path / "x", header))


@pytest.mark.parametrize(
    ("part", "other", "message"),
    [
        ("to_k", {"sides": (8, 16)}, "have different inputs or types"),
        ("to_k", {"dtype": np.float16}, "have different inputs or types"),
        ("to_k", {"dtype": ml_dtypes.bfloat16}, "have different inputs or types"),
    ],
)
def test_parts_that_cannot_be_one_layer(tmp_path, part, other, message):
    tensors = {**GOOD, **matrices(f"transformer.transformer_blocks.0.attn.{part}", **other)}
    (tmp_path / "x").write_bytes(to_bytes(tensors, {}))
    with pytest.raises(UserError, match=f"transformer_blocks.0.attn.{part}, {LAYER}: {message}"):
        convert.convert(lora_file.read(tmp_path / "x"), "kohya")


def test_info_describes_what_is_not_finite_and_prints_no_table_of_nan(tmp_path, capsys):
    (tmp_path / "x.safetensors").write_bytes(to_bytes(filled(np.nan), {}))
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "NOT FINITE in 1 layers, such as transformer_blocks.0.attn.to_q" in text
    assert f"BROKEN    export, fuse and generate reject the file: {PREFIX} holds values" in text
    assert "rank      2" in text and "nan" not in text
    (tmp_path / "x.safetensors").write_bytes(to_bytes({k: v * np.float32(1e30) for k, v in GOOD.items()}, {}))
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "e+60 in all" in text and "NOT FINITE" not in text, "large, but a number"


# ---- peft's settings ----

ENDLESS = {"alpha_pattern": {"(([a-z_.0-9]+)+)+!": 1}}
SETTINGS = {
    "an expression": (ENDLESS, "alpha_pattern: .* is not the name of a layer; expressions are not read"),
    "alternatives": ({"rank_pattern": {"(to_q|to_k)": 2}}, "rank_pattern: .* is not the name of a layer"),
    "broken expression": ({"alpha_pattern": {"(": 2}}, "is not the name of a layer"),
    "escape sequence": ({"alpha_pattern": {"\x1b[2J\n": 2}}, "is not the name of a layer"),
    "pattern that is a list": ({"alpha_pattern": ["to_q"]}, "alpha_pattern is no JSON object"),
    "text in a pattern": ({"alpha_pattern": {"to_q": "2"}}, "alpha_pattern: 'to_q' is no alpha: '2'"),
    "rank in text": ({"r": "2"}, "r is no rank: '2'"),
    "rank that is true": ({"r": True}, "r is no rank: True"),
    "rank 0": ({"r": 0}, "r is no rank: 0"),
    "negative rank": ({"r": -2}, "r is no rank: -2"),
    "giant rank": ({"r": 10**400}, "r is no rank: 1000"),
    "float rank": ({"r": 2.0}, "r is no rank: 2.0"),
    "alpha in text": ({"lora_alpha": "2"}, "lora_alpha is no alpha: '2'"),
    "alpha that is false": ({"lora_alpha": False}, "lora_alpha is no alpha: False"),
    "giant alpha": ({"lora_alpha": 10**400}, "lora_alpha is no alpha"),
    "infinite alpha": ('{"P.lora_alpha": 1e400}', "1e400 is no number"),
    "NaN alpha": ('{"P.lora_alpha": NaN}', "NaN is no number"),
    "a list as alpha": ({"lora_alpha": [[[]]]}, "lora_alpha is no alpha"),
    "rslora in text": ({"use_rslora": "false"}, "use_rslora is neither true nor false: 'false'"),
    "no object": ("[1, 2]", "is no JSON object"),
    "no JSON": ("{", "cannot be read"),
    "deep JSON": ("[" * 100_000, "nested too deeply"),
    "a key twice": ('{"P.r": 2, "P.r": 3}', "r' twice"),
    "another rank": ({"r": 4}, "has rank 2, but the settings that came with the LoRA say 4"),
    "another rank in a pattern": ({"r": 2, "rank_pattern": {"attn.to_q": 8}}, "has rank 2, but .* say 8"),
    "another rank for this layer": ({"r": 2, "rank_pattern": {f"^{LAYER}": 8}}, "has rank 2, but .* say 8"),
}


def with_settings(folder, settings, where):
    """A LoRA with these settings: in its metadata, or in the file beside it."""
    text = settings if isinstance(settings, str) else json.dumps({f"P.{name}": v for name, v in settings.items()})
    text = text.replace("P.", "transformer." if where == "diffusers" else "")
    name, metadata = "x.safetensors", {"lora_adapter_metadata": text}
    if where == "peft":
        (folder / "adapter_config.json").write_text(text)
        name, metadata = "adapter_model.safetensors", {}
    (folder / name).write_bytes(to_bytes(GOOD, metadata))
    return folder / name


@pytest.mark.parametrize("where", ["diffusers", "peft"])
@pytest.mark.parametrize("name", SETTINGS)
def test_hostile_settings_are_refused_by_name(tmp_path, name, where):
    settings, message = SETTINGS[name]
    path = with_settings(tmp_path, settings, where)
    with pytest.raises(UserError) as caught:
        USES["fuse"](path)
    caught.match(message)
    one_line(caught.value)


@pytest.mark.parametrize("where", ["diffusers", "peft"])
@pytest.mark.parametrize(
    ("settings", "alpha"),
    [
        ({"r": 2, "lora_alpha": 6}, 6),
        ({"r": None, "lora_alpha": None, "alpha_pattern": None, "use_rslora": None}, 2),
        ({"lora_alpha": 6, "alpha_pattern": {"to_q": 3}}, 3),
        ({"lora_alpha": 6, "alpha_pattern": {"attn.to_q": 3, "to_q": 4}}, 3),
        ({"lora_alpha": 6, "alpha_pattern": {"to_q": 4, "attn.to_q": 3}}, 4),
        ({"lora_alpha": 6, "alpha_pattern": {"o_q": 3, "^attn.to_q": 4, "proj_mlp": 5}}, 6),
        ({"lora_alpha": 6, "alpha_pattern": {f"^{LAYER}": 3}}, 3),
        ({"lora_alpha": 6, "alpha_pattern": {rf"^{LAYER}$".replace(".", r"\."): 3}}, 3),
        ({"lora_alpha": 6, "use_rslora": True}, 6 * 2**0.5),
        ({"r": 8, "rank_pattern": {"attn.to_q": 2}, "lora_alpha": 1}, 1),
    ],
)
def test_usual_settings_are_read_as_peft_reads_them(tmp_path, settings, alpha, where):
    layers = USES["fuse"](with_settings(tmp_path, settings, where))
    assert layers[LAYER][0][0].alpha == pytest.approx(alpha)


def test_an_alpha_in_both_places_must_be_the_same(tmp_path):
    path = tmp_path / "x.safetensors"
    told = {"transformer.r": 2, "transformer.lora_alpha": 6}
    for alpha in (6.0, 7.0):
        tensors = changed(GOOD, ALPHA, np.array(alpha, np.float32))
        path.write_bytes(to_bytes(tensors, {"lora_adapter_metadata": json.dumps(told)}))
        if alpha == 6:
            tensors, metadata = USES["export"](path)
            assert ALPHA in tensors and "lora_adapter_metadata" not in metadata, "diffusers rejects both"
        else:
            with pytest.raises(UserError, match="has alpha 7, but the settings that came with the LoRA say 6"):
                USES["export"](path)


def test_settings_that_are_a_pipe_or_too_large(tmp_path):
    path = with_settings(tmp_path, {}, "peft")
    config = tmp_path / "adapter_config.json"
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(UserError, match="is a pipe, not a file"):
        lora_file.read(path)
    config.unlink()
    config.touch()
    os.truncate(config, 2**40)
    with pytest.raises(UserError, match="too much for such a file"):
        lora_file.read(path)


# ---- What reaches the terminal ----


def test_names_and_metadata_of_strangers_are_shown_escaped(tmp_path, capsys):
    nasty = "\x1b]0;owned\x07\x9b2J\u202e\n"
    (tmp_path / "x").write_bytes(
        to_bytes({**GOOD, f"lora{nasty}": np.ones(1, np.float32)}, {f"k{nasty}": f"v{nasty}", "z": "y" * 10**6})
    )
    assert main(["info", str(tmp_path / "x")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines) and max(map(len, lines)) < 500
    assert any(r"\u001b]0;owned" in line for line in lines) and any(r"lora\x1b" in line for line in lines)
    assert main(["export", str(tmp_path / "x"), "--format", "kohya", "-o", str(tmp_path / "y")]) == 2
    error = capsys.readouterr().err
    assert error.rstrip("\n").isprintable() and r"\x1b" in error


def test_info_of_a_file_with_thousands_of_entries_is_short(tmp_path):
    tensors = {f"{i}.x.lora_{s}.weight": np.ones((1, 1), np.float32) for i in range(1000) for s in "AB"}
    tensors = {f"kind{key}": value for key, value in tensors.items()}
    (tmp_path / "x").write_bytes(to_bytes(tensors, {f"k{i}": "v" for i in range(1000)}))
    text = describe.describe(tmp_path / "x")
    assert text.count("\n") < 250 and text.count("... and 900 more") == 2


# ---- Merging ----


SQUARE = matrices(sides=(32, 32))
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(world, tmp_path_factory):
    """The tiny model, its transformer in fp16."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(world.model, folder)
    weights = {name: value.astype(np.float16) for name, value in load_file(folder / WEIGHTS).items()}
    (folder / WEIGHTS).write_bytes(to_bytes(weights, {}))
    return folder


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lora(folder, tensors=SQUARE):
    (folder / "lora.safetensors").write_bytes(to_bytes(tensors, {}))
    return folder / "lora.safetensors"


@pytest.mark.parametrize(
    ("tensors", "scale", "message"),
    [
        (SQUARE, 1e5, f"{LAYER}: with the LoRA its weights are not finite numbers of type F16"),
        (SQUARE, 1e300, f"{LAYER}: with the LoRA its weights are not finite"),
        ({key: value * np.float32(1e25) for key, value in SQUARE.items()}, 1, f"{LAYER}: with the LoRA its weights"),
    ],
)
def test_fuse_writes_no_model_that_is_not_finite(model, tmp_path, capfd, tensors, scale, message):
    path = lora(tmp_path, tensors)
    assert main(["fuse", str(model), str(path), "--scale", str(scale), "-o", str(tmp_path / "out")]) == 2
    error = capfd.readouterr().err
    assert message in error and "Warning" not in error
    assert [p.name for p in tmp_path.iterdir()] == ["lora.safetensors"]


def test_a_lora_is_added_to_floats_only(tmp_path):
    (tmp_path / WEIGHTS).parent.mkdir()
    (tmp_path / WEIGHTS).write_bytes(to_bytes({f"{LAYER}.weight": np.ones((32, 32), np.int8)}, {}))
    file = lora(tmp_path)
    (problem,) = merge.misfits(tmp_path, [merge.Weighted(file)], USES["fuse"](file))
    assert f"{LAYER} is of type I8 in the model" in problem


def test_fuse_keeps_its_hands_off_a_header(model, tmp_path, capfd):
    """Offsets that point into the header: it was overwritten, in the copy."""
    bad = tmp_path / "model"
    shutil.copytree(model, bad)
    raw(bad / WEIGHTS, {f"{LAYER}.weight": tensor((32, 32), -4096, 0)}, bytes(4096))
    assert main(["fuse", str(bad), str(lora(tmp_path)), "-o", str(tmp_path / "out")]) == 2
    assert "header is damaged" in capfd.readouterr().err and not (tmp_path / "out").exists()


def test_fuse_copies_what_links_lead_to(model, tmp_path):
    """A model of the hub's cache consists of links; the copies are files, and the originals stay as they are."""
    linked = tmp_path / "linked"
    shutil.copytree(model, linked)
    (linked / WEIGHTS).unlink()
    (linked / WEIGHTS).symlink_to(model / WEIGHTS)
    (linked / "transformer/endless.json").symlink_to("/dev/zero")
    before = files_of(model)
    assert main(["fuse", str(linked), str(lora(tmp_path)), "-o", str(tmp_path / "out")]) == 0
    assert files_of(model) == before
    written = tmp_path / "out" / WEIGHTS
    assert not written.is_symlink() and written.read_bytes() != (model / WEIGHTS).read_bytes()
    assert not (tmp_path / "out/transformer/endless.json").exists()


@pytest.mark.parametrize("place", ["transformer/out", "out", "link/out"])
def test_fuse_does_not_write_into_the_model(model, tmp_path, capfd, place):
    (tmp_path / "link").symlink_to(model)
    output = tmp_path / place if place.startswith("link") else model / place
    before = files_of(model)
    assert main(["fuse", str(model), str(lora(tmp_path)), "-o", str(output)]) == 2
    assert "lies inside the model's folder" in capfd.readouterr().err
    assert files_of(model) == before


@pytest.mark.parametrize("name", ["fuse", "export"])
@pytest.mark.parametrize("kind", ["file", "pipe", "dangling link", "itself", "no folder", "under a file", "long name"])
def test_output_onto_something_that_exists_is_refused(model, tmp_path, capfd, name, kind):
    path, output = lora(tmp_path), tmp_path / "out"
    if kind == "file":
        output.write_text("mine")
    elif kind == "pipe":
        os.mkfifo(output)
    elif kind == "dangling link":
        output.symlink_to(tmp_path / "nothing")
    elif kind == "itself":
        output = path
    elif kind == "no folder":
        output = tmp_path / "none/out"
    elif kind == "under a file":
        output = path / "out"
    else:
        output = tmp_path / ("x" * 300)
    before = sorted(tmp_path.iterdir())
    words = [str(model), str(path)] if name == "fuse" else [str(path), "--format", "kohya"]
    assert main([name, *words, "-o", str(output)]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert "-o" in error[-1] and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "x", ""])
def test_a_strength_must_be_a_finite_number(model, tmp_path, capfd, value):
    assert main(["fuse", str(model), str(lora(tmp_path)), f"--scale={value}", "-o", str(tmp_path / "out")]) == 2
    assert f"--scale: must be a finite number, not {value}" in capfd.readouterr().err
    words = ["--model", str(model), "--prompt", "x", "-o", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"the weight must be a finite number|is not a weight"):
        generate_flags.read([*words, "--lora", f"{tmp_path / 'lora.safetensors'}:{value}"])


@pytest.mark.parametrize(
    "words",
    [
        ["--guidance", "nan"],
        ["--guidance", "1e400"],
        ["--num", "1000000000"],
        ["--num", "9" * 5000],
        ["--steps", "1000000000"],
        ["--size", "1024000x1024000"],
        ["--size", f"{'9' * 5000}x16"],
        ["--seed", "9" * 5000],
        ["--max_sequence_length", "513"],
    ],
    ids=lambda words: f"{words[0]} {words[1][:20]}",
)
def test_numbers_beyond_reason_are_refused_by_generate(model, tmp_path, words):
    with pytest.raises(UserError, match=words[0]):
        generate_flags.read(["--model", str(model), "--prompt", "x", "-o", str(tmp_path / "out"), *words])


@pytest.mark.parametrize("kind", ["file", "pipe", "dangling link", "under a file", "a picture's name"])
def test_generate_finds_out_before_it_draws_that_it_cannot_write(model, tmp_path, kind):
    output = tmp_path / "out"
    if kind == "pipe":
        os.mkfifo(output)
    elif kind == "dangling link":
        output.symlink_to(tmp_path / "nothing")
    elif kind == "a picture's name":
        output.mkdir()
        (output / "000-00.png").symlink_to(tmp_path / "nothing")
    else:
        output.write_text("mine")
    given = output / "below" if kind == "under a file" else output
    with pytest.raises(UserError, match=r"out is not a folder|has 000-00\.png already"):
        generate_flags.read(["--model", str(model), "--prompt", "x", "-o", str(given)])


# ---- As a user meets it ----


@pytest.mark.parametrize("name", ["info", "export", "fuse"])
@pytest.mark.parametrize("kind", ["pipe", "endless expression", "negative shape"])
def test_the_commands_end_at_once_with_one_line(model, tmp_path, name, kind):
    path = tmp_path / "x.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "negative shape":
        raw(path, {A: tensor((-2, -8), end=64), B: tensor((8, 2), 64, 128)}, bytes(128))
    else:
        with_settings(tmp_path, ENDLESS, "diffusers")
    words = {"info": [path], "export": [path, "--format", "kohya"], "fuse": [model, path]}[name]
    done = run(command(name, *words, *([] if name == "info" else ["-o", tmp_path / "out"])), timeout=20)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr.startswith(f"error: {path}") and done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["export", "fuse"])
def test_a_full_disk_leaves_nothing_behind(model, tmp_path, name):
    path = lora(tmp_path)
    words = [model, path] if name == "fuse" else [path, "--format", "kohya"]

    def almost_full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    done = run(command(name, *words, "-o", tmp_path / "out"), timeout=20, preexec_fn=almost_full)
    assert done.returncode in (1, 2), done.stderr
    assert f"error: -o {tmp_path / 'out'}: could not be written" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
