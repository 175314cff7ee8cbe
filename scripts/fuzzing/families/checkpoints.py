"""Resuming: checkpoints that are damaged, or sealed by somebody who wants harm; and the files beside them.

The run that is resumed is at its last step, so that a sound case ends at once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing import hostile, tensors
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused
from fuzzing.hostile import KINDS
from fuzzing.tensors import Raw, raw

FOLDER = "checkpoint-2"
LORA, OPTIMIZER, STATE, MANIFEST = (
    "pytorch_lora_weights.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)
NAMES = (FOLDER, "--resume_from_checkpoint", LORA, OPTIMIZER, STATE, MANIFEST)


def plans() -> Iterator[Plan]:
    for about, build in _all().items():
        yield plan(about, build, way="mindspore")


def _all() -> dict[str, Callable[[Bench], Case]]:
    found: dict[str, Callable[[Bench], Case]] = {"a sound checkpoint": resumed(lambda _: None, fine(_done))}
    found["a sound checkpoint, sealed again"] = sealed(lambda _: None, fine(_done))
    for name in (LORA, OPTIMIZER, STATE, MANIFEST):
        for about in KINDS:
            found[f"{name} is {about}"] = resumed(_instead(name, about), refused(*NAMES))
    for about, change in UNSEALED.items():
        found[about] = resumed(change, refused(*NAMES))
    for about, content in MANIFESTS.items():
        found[f"a sealed manifest with {about}"] = manifested(content)
    for about, change in STATES.items():
        found[f"a sealed state with {about}"] = sealed(_state(change), refused(*NAMES))
    for about, data in JSON.items():
        found[f"a sealed state that is {about}"] = sealed(_write(STATE, data), refused(*NAMES))
    for name in (LORA, OPTIMIZER):
        for about, change in TENSORS.items():
            found[f"{name}, sealed: {about}"] = sealed(_tensors(name, change), refused(*NAMES))
        for about, data in FILES.items():
            found[f"{name}, sealed: {about}"] = sealed(_write(name, data), refused(*NAMES))
    for name in BESIDE:
        for about in ("a pipe", "a link to /dev/zero", "a folder", "noise", "a sparse file"):
            found[f"{name} is {about}"] = beside(name, about)
    found |= OTHERS
    return found


# --- running -------------------------------------------------------------------------------------------------------


def resume(bench: Bench, expect: Expect, wanted: str = f"out/{FOLDER}", **changes: object) -> Case:
    flags = {**bench.world.training, "resume_from_checkpoint": wanted, **changes}
    case = bench.run(expect, "train", *bench.flags(**flags), writes=["out"])
    # a refusal that comes late has taken the lock, and may have cleared away what a dead run left
    return case.but(memory_mb=4096, patience=3, writes=("out",), writes_anyway=expect.codes != (2,))


def resumed(change: Callable[[Path], object], expect: Expect) -> Callable[[Bench], Case]:
    """Resume after the checkpoint was changed."""

    def build(bench: Bench) -> Case:
        shutil.copytree(bench.world.finished, bench.folder / "out")
        (bench.folder / "out" / ".lock").unlink(missing_ok=True)
        change(bench.folder / "out" / FOLDER)
        return resume(bench, expect).but(
            writes=("out/.lock",) if expect.codes == (2,) else ("out",), writes_anyway=True
        )

    return build


def sealed(change: Callable[[Path], object], expect: Expect) -> Callable[[Bench], Case]:
    """The same, and the manifest agrees with what was changed."""

    def apply(folder: Path) -> None:
        change(folder)
        manifest = json.loads((folder / MANIFEST).read_text())
        for name in manifest["files"]:
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        seal(folder, manifest)

    return resumed(apply, expect)


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(_json(body)).hexdigest()
    (folder / MANIFEST).write_bytes(_json({**body, "sha256": digest}))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _done(case: Path, _stdout: str) -> str | None:
    status = json.loads((case / "out" / "train_state.json").read_text())
    return None if (status["status"], status["step"]) == ("finished", 2) else f"train_state.json says {status}"


def _instead(name: str, about: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        KINDS[about](folder / name)

    return change


def _write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


# --- what is changed -----------------------------------------------------------------------------------------------


def _flipped(folder: Path) -> None:
    data = bytearray((folder / LORA).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / LORA).write_bytes(data)


UNSEALED: dict[str, Callable[[Path], object]] = {
    "one bit changed": _flipped,
    "the state has one byte more": lambda folder: (folder / STATE).write_bytes((folder / STATE).read_bytes() + b" "),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "no state": lambda folder: (folder / STATE).unlink(),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "the folder is a file": lambda folder: (shutil.rmtree(folder), folder.write_text("a")),
    "the folder is a link to itself": lambda folder: (shutil.rmtree(folder), folder.symlink_to(folder.name)),
    "a manifest 100,000 deep": _write(MANIFEST, hostile.deep("[", "]", 100_000).encode()),
    "a manifest of another program": _write(MANIFEST, b'{"format": "other"}'),
    "a manifest of a later version": _write(
        MANIFEST, json.dumps({"format": "flux_db checkpoint", "schema": 10**400, "tool": hostile.TERMINAL}).encode()
    ),
}

Change = Callable[[dict[str, Any]], object]

MANIFESTS: dict[str, Change] = {
    "no files": lambda manifest: manifest.update(files={}),
    "files that are a list": lambda manifest: manifest.update(files=[]),
    "no state among the files": lambda manifest: manifest["files"].pop(STATE),
    "no LoRA among the files": lambda manifest: manifest["files"].pop(LORA),
    "a file above the folder": lambda manifest: manifest["files"].update({"../config.yaml": {"size": 1, "sha256": ""}}),
    "a file with NUL": lambda manifest: manifest["files"].update({"a\0b": {"size": 1, "sha256": ""}}),
    "a file of half a letter": lambda manifest: manifest["files"].update({"\ud800": {"size": 1, "sha256": ""}}),
    "a file with an escape sequence": lambda manifest: manifest["files"].update(
        {hostile.TERMINAL.replace("/", ""): {"size": 1, "sha256": ""}}
    ),
    "a file of 300 letters": lambda manifest: manifest["files"].update({"x" * 300: {"size": 1, "sha256": ""}}),
    "a size of text": lambda manifest: manifest["files"][STATE].update(size="much"),
    "a size below 0": lambda manifest: manifest["files"][STATE].update(size=-1),
    "a digest that is null": lambda manifest: manifest["files"][STATE].update(sha256=None),
    "a step below 0": lambda manifest: manifest.update(step=-1),
    "a step of 10^18": lambda manifest: manifest.update(step=10**18),
    "a step that is true": lambda manifest: manifest.update(step=True),
    "a step of text": lambda manifest: manifest.update(step="2"),
    "a schema that is true": lambda manifest: manifest.update(schema=True),
    "a schema of text": lambda manifest: manifest.update(schema="1"),
    "NaN": lambda manifest: manifest.update(more=float("nan")),
}


def manifested(change: Change) -> Callable[[Bench], Case]:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        change(manifest)
        seal(folder, manifest)

    return resumed(apply, refused(*NAMES))


def _state(change: Change) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        state = json.loads((folder / STATE).read_text())
        change(state)
        (folder / STATE).write_bytes(_json(state))

    return apply


STATES: dict[str, Change] = {
    "no config": lambda state: state.pop("config"),
    "a config that is a list": lambda state: state.update(config=[]),
    "a config that is null": lambda state: state.update(config=None),
    "no fingerprints": lambda state: state.pop("fingerprints"),
    "fingerprints of text": lambda state: state.update(fingerprints="x"),
    "fingerprints that are lists": lambda state: state["fingerprints"].update(model_fingerprint=[1]),
    "no world_size": lambda state: state.pop("world_size"),
    "a world_size of 0": lambda state: state.update(world_size=0),
    "a world_size of text": lambda state: state.update(world_size="x"),
    "a world_size that is infinite": lambda state: state.update(world_size=float("inf")),
    "no step": lambda state: state.pop("step"),
    "another step": lambda state: state.update(step=1),
    "a step below 0": lambda state: state.update(step=-5),
    "a step of text": lambda state: state.update(step="2"),
    "a step that is null": lambda state: state.update(step=None),
    "a step of 2.5": lambda state: state.update(step=2.5),
    "skipped steps of text": lambda state: state.update(skipped="x"),
    "no skipped steps": lambda state: state.pop("skipped"),
    "a batch of text": lambda state: state["config"].update(train_batch_size="x"),
    "a batch that is null": lambda state: state["config"].update(train_batch_size=None),
    "a length of text with a schedule": lambda state: state["config"].update(
        max_train_steps="many", lr_scheduler="linear"
    ),
    "a setting with escape sequences": lambda state: state["config"].update(instance_prompt=hostile.TERMINAL),
    "a setting with line breaks": lambda state: state["config"].update(instance_prompt="a\nerror: b"),
    "a setting of nobody": lambda state: state["config"].update(nobody=1),
    "a setting of nobody with escape sequences": lambda state: state["config"].update({hostile.TERMINAL: 1}),
    "another rank": lambda state: state["config"].update(rank=8),
    "a rank that is a list": lambda state: state["config"].update(rank=[4]),
}

JSON: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "text": b"not JSON",
    "not UTF-8": b"\xff\xfe",
    "100,000 deep": hostile.deep("[", "]", 100_000).encode(),
}

FILES: dict[str, bytes] = {
    "a page": hostile.HTML,
    "nothing": b"",
    "no tensors": tensors.pack({}, b""),
    "a header 100,000 deep": tensors.pack(hostile.deep('{"a":', "}", 100_000, "1").encode(), b""),
}

TensorChange = Callable[[dict[str, Raw]], object]


def _first(content: dict[str, Raw]) -> str:
    return next(name for name in sorted(content) if len(content[name].data) > 8)


def _tensors(name: str, change: TensorChange) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        content, metadata = tensors.read(folder / name)
        change(content)
        (folder / name).write_bytes(tensors.file_of(content, metadata))

    return apply


def _replace(make: Callable[[Raw], Raw]) -> TensorChange:
    return lambda content: content.update({_first(content): make(content[_first(content)])})


TENSORS: dict[str, TensorChange] = {
    "a tensor is missing": lambda content: content.pop(_first(content)),
    "a tensor is renamed": lambda content: content.update(nobody=content.pop(_first(content))),
    "a tensor of another shape": _replace(lambda tensor: raw(np.ones((3, 5)))),
    "a tensor that is a number": _replace(lambda tensor: raw(np.array(1.0))),
    "a tensor of integers": _replace(lambda tensor: Raw("I32", tensor.shape, tensor.data)),
    "a tensor of NaN": _replace(lambda tensor: raw(np.full(tensor.shape, np.nan))),
    "a tensor of infinity": _replace(lambda tensor: raw(np.full(tensor.shape, np.inf))),
}

# --- what lies beside the checkpoints ------------------------------------------------------------------------------

BESIDE = ("metrics.jsonl", "README.md", "config.yaml", "train_state.json", "report.html", "report", "logs", LORA)


def beside(name: str, about: str) -> Callable[[Bench], Case]:
    """It works, or says in a line what could not be read or written."""

    def change(folder: Path) -> None:
        path = folder.parent / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        KINDS[about](path)

    def build(bench: Bench) -> Case:
        return resumed(change, Expect(codes=(0, 1, 2)))(bench)

    return build


def latest(bench: Bench) -> Case:
    """The newest one is damaged: the one before is taken, and the step made again."""
    shutil.copytree(bench.world.finished, bench.folder / "out")
    (bench.folder / "out" / FOLDER / STATE).unlink()
    return resume(bench, fine(_done), "latest")


def exploding_card(bench: Bench) -> Case:
    """The base model's own card is read for its licence when the LoRA's card is written."""
    shutil.copytree(bench.world.finished, bench.folder / "out")
    model = bench.world.copy_model(bench.folder / "model")
    (model / "README.md").write_text(f"---\n{hostile.bomb()}license: *a29\n---\n")
    return resume(bench, fine(_done), pretrained_model_name_or_path=model)


def piped_card(bench: Bench) -> Case:
    shutil.copytree(bench.world.finished, bench.folder / "out")
    KINDS["a pipe"](bench.world.copy_model(bench.folder / "model") / "README.md")
    return resume(bench, fine(_done), pretrained_model_name_or_path=bench.folder / "model")


def other_setting(**changes: object) -> Callable[[Bench], Case]:
    """A change of the settings that is allowed, or not."""

    def build(bench: Bench) -> Case:
        shutil.copytree(bench.world.finished, bench.folder / "out")
        return resume(bench, either(*NAMES, *(f"--{name}" for name in changes), *changes), **changes)

    return build


def own_modules(bench: Bench) -> Case:
    """Files of the names of modules lie where the program is started; the encoder's process must not take them."""
    for name in ("yaml", "PIL", "tqdm", "safetensors", "json"):
        bench.write(f"{name}.py", "open('owned', 'w').write('x')\n")
    flags = bench.flags(**{**bench.world.training, "instance_prompt": "another prompt", "encode_cache_dir": "cache"})
    case = bench.run(fine(_done), "train", *flags, writes=["out", "cache"])
    return case.but(memory_mb=4096, patience=9)


OTHERS: dict[str, Callable[[Bench], Case]] = {
    "the newest of two is damaged": latest,
    "the model's card explodes": exploding_card,
    "the model's card is a pipe": piped_card,
    "another optimizer, allowed": other_setting(optimizer="prodigy", allow_changed="optimizer"),
    "another rank, allowed": other_setting(rank=8, allow_changed="rank"),
    "other layers, allowed": other_setting(lora_layers="attn.to_k", allow_changed="lora_layers"),
    "another rank": other_setting(rank=8),
    "fewer steps": other_setting(max_train_steps=1),
    "modules in the folder": own_modules,
}
