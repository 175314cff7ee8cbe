"""LoRA files whose tensors make no sense; and sound ones of every format, whose result is computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fuzzing import hostile, lora_files, tensors
from fuzzing.case import Bench, Case, Expect, Look, Plan, either, fine, plan, refused
from fuzzing.lora_files import FORMATS, RANK, Tensors
from fuzzing.tensors import Raw, raw

FIRST = "transformer.transformer_blocks.0.attn.to_out.0"
A, B, ALPHA = f"{FIRST}.lora_A.weight", f"{FIRST}.lora_B.weight", f"{FIRST}.alpha"
COMMANDS = ("info", "export", "fuse")
NAMES = ("lora.safetensors", FIRST.removeprefix("transformer."), "to_out")

# Tensors and metadata of a sound file, changed in place.
Change = Callable[[Tensors, dict[str, str]], object]


def plans() -> Iterator[Plan]:
    for format_ in FORMATS:
        for dtype, alpha in (("F32", None), ("F16", 2.0), ("BF16", 8.0)):
            for command in COMMANDS:
                yield plan(
                    f"{command}: sound, {format_}, {dtype}, alpha {alpha}", sound, command, format_, dtype, alpha
                )
    for about, change in REFUSED.items():
        for command in COMMANDS:
            yield plan(f"{command}: {about}", changed, command, change, refused(*NAMES))
    for about, change in NOT_FINITE.items():
        yield plan(f"info: {about}", changed, "info", change, either(*NAMES, look=tells_not_finite))
        for command in ("export", "fuse"):
            yield plan(f"{command}: {about}", changed, command, change, refused(*NAMES))
    for about, change in TOO_LARGE.items():
        for command, expect in (("info", either(*NAMES)), ("export", either(*NAMES)), ("fuse", refused(*NAMES))):
            yield plan(f"{command}: {about}", changed, command, change, expect)
    yield plan(
        "export: matrices with a third side of 1", changed, "export", _both((4, 32, 1), (32, 4, 1)), either(*NAMES)
    )
    for about, change in NOT_PLAIN.items():
        yield plan(f"info: {about}", changed, "info", change, either(*NAMES))
        yield plan(f"export: {about}", changed, "export", change, refused(*NAMES))


def command(bench: Bench, name: str, expect: Expect, lora: str = "lora.safetensors") -> Case:
    words: dict[str, list[object]] = {
        "info": ["info", lora],
        "export": ["export", lora, "--format", "diffusers", "-o", "made"],
        "fuse": ["fuse", bench.world.model, lora, "-o", "made"],
    }
    return bench.run(expect, *words[name], writes=[] if name == "info" else ["made"])


# --- sound files ---------------------------------------------------------------------------------------------------


def sound(bench: Bench, name: str, format_: str, dtype: str, alpha: float | None) -> Case:
    content = lora_files.make(bench.world, bench.rng, format_=format_, dtype=dtype, alpha=alpha)
    bench.write("lora.safetensors", tensors.file_of(content, {"format": "pt"}))
    expected = lora_files.deltas(content, format_)
    looks: dict[str, Look] = {
        "info": lambda _, stdout: None if re.search(rf"^rank +{RANK}$", stdout, re.M) else "does not tell the rank",
        "export": lambda case, _: compare(lora_files.read_deltas(case / "made", "diffusers"), expected),
        "fuse": lambda case, _: compare(merged(case / "made", bench), expected),
    }
    return command(bench, name, fine(looks[name]))


def merged(model: Path, bench: Bench) -> dict[str, np.ndarray]:
    """What fusing added to the weights."""
    weights, _ = tensors.read(model / "transformer" / "diffusion_pytorch_model.safetensors")
    names = [f"{layer}.weight" for layer in lora_files.LAYERS]
    return {n.removesuffix(".weight"): weights[n].array() - bench.world.weights[n].array() for n in names}


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> str | None:
    for layer, delta in expected.items():
        if not np.allclose(found[layer], delta, rtol=1e-4, atol=1e-5):
            return f"{layer} has another strength than the file says"
    return None


# --- tensors -------------------------------------------------------------------------------------------------------


def changed(bench: Bench, name: str, change: Change, expect: Expect) -> Case:
    write_changed(bench, change)
    return command(bench, name, expect)


def write_changed(bench: Bench, change: Change) -> None:
    content = lora_files.make(bench.world, bench.rng)
    metadata = {"format": "pt"}
    change(content, metadata)
    bench.write("lora.safetensors", tensors.file_of(content, metadata))


def put(name: str, tensor: Raw | Callable[[Raw], Raw]) -> Change:
    """Another tensor in this one's place."""
    return lambda content, _: content.update({name: tensor if isinstance(tensor, Raw) else tensor(content[name])})


def filled(name: str, value: float, dtype: str = "F32") -> Change:
    """One number of the tensor is another."""

    def change(tensor: Raw) -> Raw:
        values = tensor.array().astype(np.float64)
        values.flat[values.size // 2] = value
        return raw(values, dtype)

    return put(name, change)


def _both(shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> Change:
    return lambda content, _: content.update({A: raw(np.ones(shape_a)), B: raw(np.ones(shape_b))})


def _again(name: str) -> Change:
    """The first layer once more, under another program's name."""
    down, up = ("lora_down", "lora_up") if name.startswith(("lora_", FIRST)) else ("lora_A", "lora_B")
    return lambda content, _: content.update({f"{name}.{down}.weight": content[A], f"{name}.{up}.weight": content[B]})


def tells_not_finite(_case: Path, stdout: str) -> str | None:
    return None if "finite" in stdout.lower() else "does not tell that values are not finite"


REFUSED: dict[str, Change] = {
    "rank 0": _both((0, 32), (32, 0)),
    "scalars": _both((), ()),
    "vectors": _both((32,), (32,)),
    "ranks that do not fit": _both((4, 32), (32, 5)),
    "no inputs": _both((4, 0), (32, 4)),
    "no outputs": _both((4, 32), (0, 4)),
    "alpha without a number": put(ALPHA, raw(np.zeros((0,)))),
    "two alphas": put(ALPHA, raw(np.array([4.0, 8.0]))),
    "integers": lambda content, _: content.update({A: raw(np.ones((4, 32)), "I32"), B: raw(np.ones((32, 4)), "I32")}),
    "truth values": lambda content, _: content.update({A: raw(np.ones((4, 32)), "BOOL")}),
    "the layer twice, as lora_down": _again(FIRST),
    "the layer twice, without prefix": _again(FIRST.removeprefix("transformer.")),
    "the layer twice, as peft's": _again(FIRST.replace("transformer.", "base_model.model.", 1)),
    "the layer twice, with default": lambda content, _: content.update(
        {A.replace(".weight", ".default.weight"): content[A], B.replace(".weight", ".default.weight"): content[B]}
    ),
    "nothing like a LoRA": lambda content, _: (content.clear(), content.update({"x.weight": raw(np.ones((2, 2)))})),
}

NOT_FINITE: dict[str, Change] = {
    "NaN in A": filled(A, np.nan),
    "infinity in B": filled(B, np.inf),
    "minus infinity in A": filled(A, -np.inf),
    "NaN in half precision": filled(A, np.nan, "F16"),
    "NaN in bfloat16": filled(B, np.nan, "BF16"),
    "alpha NaN": put(ALPHA, raw(np.array(np.nan))),
    "alpha infinite": put(ALPHA, raw(np.array(np.inf))),
}

# Finite in the file, but not in a model's weights.
TOO_LARGE: dict[str, Change] = {
    "numbers whose product is infinite": lambda content, _: content.update(
        {A: raw(np.full((4, 32), 1e30)), B: raw(np.full((32, 4), 1e30))}
    ),
    "a number beyond float32": filled(A, 1e300, "F64"),
    "an alpha beyond float32": put(ALPHA, raw(np.array(1e300), "F64")),
}

# LoRAs of another kind, or more than a LoRA: to tell what they are is fine, to lose something is not.
NOT_PLAIN: dict[str, Change] = {
    "A without B": lambda content, _: content.pop(B),
    "B without A": lambda content, _: content.pop(A),
    "an alpha of no layer": put("transformer.nobody.alpha", raw(np.array(4.0))),
    "DoRA": put(f"{FIRST}.dora_scale", raw(np.ones((32, 1)))),
    "LoKr": put(f"{FIRST}.lokr_w1", raw(np.ones((2, 2)))),
    "a bias": put(f"{FIRST}.lora_B.bias", raw(np.ones((32,)))),
    "a layer that FLUX.1 has not": lambda content, _: content.update(
        {"transformer.nobody.lora_A.weight": content[A], "transformer.nobody.lora_B.weight": content[B]}
    ),
    "a block of the number ٣": lambda content, _: content.update(
        {A.replace(".0.attn", ".٣.attn"): content.pop(A), B.replace(".0.attn", ".٣.attn"): content.pop(B)}
    ),
    "names with escape sequences": put(f"{hostile.TERMINAL}.lora_A.weight", raw(np.ones((2, 2)))),
    "names with line breaks": put("a\nerror: b\r.lora_A.weight", raw(np.ones((2, 2)))),
    "a name of 100 kB": put("x" * 100_000 + ".lora_A.weight", raw(np.ones((2, 2)))),
    "an empty name": put(".lora_A.weight", raw(np.ones((2, 2)))),
}
