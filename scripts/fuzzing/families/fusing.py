"""Where `fuse` and `export` write to, strengths that are none, models with more in them than weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fuzzing import lora_files, tensors
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused, unwritable
from fuzzing.families.loras import NAMES, A, B, compare, merged
from fuzzing.hostile import KINDS
from fuzzing.tensors import raw


def plans() -> Iterator[Plan]:
    for value, expect in SCALES.items():
        yield plan(f"--scale {value}", scaled, value, expect)
    for about, build in PLACES.items():
        yield plan(f"fuse {about}", build)
    for about, (output, expect) in OUTPUTS.items():
        yield plan(f"export to {about}", export_to, output, expect)
    for about in KINDS:
        yield plan(f"export to what is {about}", export_to_special, about)


SCALES: dict[str, Expect] = {
    "nan": refused("--scale"),
    "inf": refused("--scale"),
    "-inf": refused("--scale"),
    "1e400": refused("--scale"),
    "1e300": refused("--scale", *NAMES),
    "1e39": refused("--scale", *NAMES),
    "x": refused("--scale"),
    "": refused("--scale"),
    "-1": fine(),
    "0": fine(),
    "0.5": fine(),
}


def scaled(bench: Bench, value: str, expect: Expect) -> Case:
    content = lora_files.make(bench.world, bench.rng)
    bench.write("lora.safetensors", tensors.file_of(content))
    expected = {}
    if expect.codes == (0,):
        expected = {layer: float(value) * delta for layer, delta in lora_files.deltas(content, "diffusers").items()}
        expect = fine(lambda case, _: compare(merged(case / "made", bench), expected))
    words = ["fuse", bench.world.model, "lora.safetensors", f"--scale={value}", "-o", "made"]
    return bench.run(expect, *words, writes=["made"])


def fuse_to(prepare: Callable[[Bench], object], output: str, expect: Expect) -> Callable[[Bench], Case]:
    def build(bench: Bench) -> Case:
        bench.write("lora.safetensors", tensors.file_of(lora_files.make(bench.world, bench.rng)))
        prepare(bench)
        return bench.run(
            expect, "fuse", "model", "lora.safetensors", "-o", output, writes=["made", "model/made", "nowhere"]
        )

    return build


def _model(bench: Bench) -> Path:
    return bench.world.copy_model(bench.folder / "model")


def _half_model(bench: Bench) -> None:
    """In half precision, with a LoRA that is too much for it."""
    path = _model(bench) / "transformer" / "diffusion_pytorch_model.safetensors"
    content = {name: raw(tensor.array(), "F16") for name, tensor in tensors.read(path)[0].items()}
    path.write_bytes(tensors.file_of(content))
    lora = {name: raw(1000 * t.array()) for name, t in lora_files.make(bench.world, bench.rng).items()}
    bench.write("lora.safetensors", tensors.file_of(lora))


def _other_width(bench: Bench) -> None:
    _model(bench)
    bench.write("lora.safetensors", tensors.file_of({A: raw(np.ones((4, 16))), B: raw(np.ones((16, 4)))}))


def _linked_part(bench: Bench) -> None:
    (_model(bench) / "vae" / "linked.json").symlink_to("/etc/passwd")


def _with_pipe(bench: Bench) -> None:
    KINDS["a pipe"](_model(bench) / "vae" / "pipe.json")


def _with_pipe_in_transformer(bench: Bench) -> None:
    KINDS["a pipe"](_model(bench) / "transformer" / "pipe.json")


PLACES: dict[str, Callable[[Bench], Case]] = {
    "into the model itself": fuse_to(_model, "model", refused("-o")),
    "into a folder of the model": fuse_to(_model, "model/made", either("-o")),
    "into a folder that is not there": fuse_to(_model, "no/made", refused("-o")),
    "to /proc/made": fuse_to(_model, "/proc/made", refused("-o")),
    "to a file": fuse_to(lambda bench: (_model(bench), bench.write("made", "")), "made", refused("-o")),
    "to a link to nowhere": fuse_to(
        lambda bench: (_model(bench), bench.path("made").symlink_to("nowhere")), "made", either("-o")
    ),
    "more than half precision holds": fuse_to(_half_model, "made", refused(*NAMES)),
    "a LoRA of another width": fuse_to(_other_width, "made", refused(*NAMES)),
    "without a model": fuse_to(lambda _: None, "made", refused("model")),
    "a model with a link in it": fuse_to(_linked_part, "made", either("model")),
    "a model with a pipe in it": fuse_to(_with_pipe, "made", either("model")),
    "a model with a pipe beside its weights": fuse_to(_with_pipe_in_transformer, "made", either("model")),
}


# --- export --------------------------------------------------------------------------------------------------------

OUTPUTS: dict[str, tuple[str, Expect]] = {
    "a new file": ("made", fine()),
    "the file itself": ("lora.safetensors", refused("-o")),
    "a folder that is not there": ("no/made", refused("-o")),
    "/proc": ("/proc/made", unwritable("-o", "/proc/made")),
    "/dev/full": ("/dev/full", refused("-o")),
    "a name of 300 letters": ("x" * 300, unwritable("-o", "xxx")),
    "a name with an escape sequence": ("made\x1b[31m", either("-o")),
    "a name that is empty": ("", refused("-o")),
}


def export_to(bench: Bench, output: str, expect: Expect) -> Case:
    bench.write("lora.safetensors", tensors.file_of(lora_files.make(bench.world, bench.rng)))
    return bench.run(expect, "export", "lora.safetensors", "--format", "kohya", "-o", output, writes=[output])


def export_to_special(bench: Bench, about: str) -> Case:
    """Nothing is overwritten, whatever it is; where a link leads nowhere, the file may be made or not."""
    KINDS[about](bench.path("made"))
    return export_to(bench, "made", either("-o") if about.endswith(("nowhere", "itself")) else refused("-o"))
