"""Uploading and datasets: names, tokens, addresses and answers of the hub; local datasets that are none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

from fuzzing import bad_hub, hostile
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused
from fuzzing.families.pictures import saved
from fuzzing.families.runs import write_run
from fuzzing.hostile import KINDS, SECRET
from fuzzing.looks import counts
from fuzzing.world import picture

NAMES = ("", " ", "a b", "../x", "a/b/c", "-x", "x" * 300, "a\x1b[31m", os.fsdecode(b"\xff"), "a--b", "a..b", "/x")

# An upload may fail for a reason of its own; so says the line.
FAILED = Expect(codes=(1, 2), names=("upload", "--push_to_hub", "--hub_model_id"))


def plans() -> Iterator[Plan]:
    for about, build in FOLDERS.items():
        yield plan(about, build)
    for name in NAMES:
        yield plan(f"push to {name[:20]!r}", push, ["--hub_model_id", name], FAILED, {})
        yield plan(f"train, to {name[:20]!r}", train, ["--hub_model_id", name], {})
    for answer in bad_hub.ANSWERS:
        yield plan(f"push, the hub answers: {answer}", answered, answer)
    for about, variables in VARIABLES.items():
        yield plan(f"push, {about}", push, ["--hub_model_id", "me/dog"], FAILED, variables)
    yield plan("train without a token", train, ["--hub_model_id", "me/dog"], {"HF_TOKEN": None})
    yield plan("train offline", train, ["--hub_model_id", "me/dog"], {"HF_HUB_OFFLINE": "1"})
    yield plan("a token on the command line", token_told)
    yield plan("check of a run with upload", lambda bench: bench.check(refused("--push_to_hub"), push_to_hub=True))


def push(bench: Bench, words: list[str], expect: Expect, variables: dict[str, str | None]) -> Case:
    write_run(bench.folder / "run")
    environment = {"HF_TOKEN": SECRET, "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", **variables}
    return bench.run(expect, "push", "run", *words).but(environment=environment, hidden=(SECRET,))


def train(bench: Bench, words: list[str], variables: dict[str, str | None]) -> Case:
    environment = {"HF_TOKEN": SECRET, "HF_ENDPOINT": "http://127.0.0.1:9", **variables}
    flags = [*bench.flags(push_to_hub=True), *words]
    expect = refused("--push_to_hub", "--hub_model_id")
    return bench.run(expect, "train", *flags).but(environment=environment, hidden=(SECRET,))


def answered(bench: Bench, answer: str) -> Case:
    return push(bench, ["--hub_model_id", "me/dog"], FAILED, {"HF_ENDPOINT": f"{bad_hub.address()}/{answer}"})


def token_told(bench: Bench) -> Case:
    case = push(bench, ["--hub_model_id", "me/dog", "--hub_token", SECRET], FAILED, {"HF_TOKEN": None})
    return case.but(words=("push", "run", "--hub_token", SECRET, "--hub_model_id", "me/dog"))


def with_run(change: Callable[[Bench], object], expect: Expect = FAILED) -> Callable[[Bench], Case]:
    def build(bench: Bench) -> Case:
        case = push(bench, ["--hub_model_id", "me/dog"], expect, {})
        change(bench)
        return case

    return build


def _instead(name: str, kind: str) -> Callable[[Bench], object]:
    def change(bench: Bench) -> None:
        (bench.folder / "run" / name).unlink(missing_ok=True)
        KINDS[kind](bench.folder / "run" / name)

    return change


FOLDERS: dict[str, Callable[[Bench], Case]] = {
    "push a folder that is not there": lambda bench: bench.run(refused("no"), "push", "no", "--hub_model_id", "a/b"),
    "push a file": lambda bench: bench.run(refused("passwd"), "push", "/etc/passwd", "--hub_model_id", "a/b"),
    "push without a LoRA": with_run(
        lambda bench: (bench.folder / "run" / "pytorch_lora_weights.safetensors").unlink(), refused("run")
    ),
    "push a LoRA that is a pipe": with_run(_instead("pytorch_lora_weights.safetensors", "a pipe"), refused("run")),
    "push a LoRA that is /dev/zero": with_run(
        _instead("pytorch_lora_weights.safetensors", "a link to /dev/zero"), refused("run")
    ),
    "push a sample that is a pipe": with_run(_instead("samples/step-00002/00.png", "a pipe")),
    "push a sample that is /dev/zero": with_run(_instead("samples/step-00002/00.png", "a link to /dev/zero")),
    "push a card that is a pipe": with_run(_instead("README.md", "a pipe")),
    "push a card that is noise": with_run(_instead("README.md", "noise")),
}

VARIABLES: dict[str, dict[str, str | None]] = {
    "without a token": {"HF_TOKEN": None},
    "with an empty token": {"HF_TOKEN": ""},
    "with a token of two lines": {"HF_TOKEN": f"{SECRET}\nInjected: header"},
    "with a token of other letters": {"HF_TOKEN": "hf_é狗"},
    "with a token of escape sequences": {"HF_TOKEN": "hf_\x1b[31m"},
    "offline": {"HF_HUB_OFFLINE": "1"},
    "without a hub": {},
    "with an address that is none": {"HF_ENDPOINT": "not an address"},
    "with an address of another kind": {"HF_ENDPOINT": "ftp://127.0.0.1"},
    "with half an address": {"HF_ENDPOINT": "http://[::1"},
    "with an address of escape sequences": {"HF_ENDPOINT": "http://\x1b[31m"},
    "with a proxy that is none": {"http_proxy": "nonsense", "NO_PROXY": None},
}


# --- datasets ------------------------------------------------------------------------------------------------------


def dataset_plans() -> Iterator[Plan]:
    for about, (files, expect) in DATASETS.items():
        yield plan(about, dataset, files, expect)
    for about in KINDS:
        yield plan(f"a dataset that is {about}", special_dataset, about)
    for flag in ("image_column", "caption_column", "dataset_config_name"):
        yield plan(f"--{flag} of nobody", other_column, flag, "nobody\x1b[31m")


def dataset(bench: Bench, files: dict[str, bytes], expect: Expect) -> Case:
    for name, content in files.items():
        bench.write(f"data/{name}", content)
    case = bench.check(expect, instance_data_dir=None, dataset_name="data")
    return case.but(environment={"HF_HUB_OFFLINE": "1"})


def special_dataset(bench: Bench, about: str) -> Case:
    KINDS[about](bench.path("data"))
    case = bench.check(refused("--dataset_name"), instance_data_dir=None, dataset_name="data")
    return case.but(environment={"HF_HUB_OFFLINE": "1"})


def other_column(bench: Bench, flag: str, value: str) -> Case:
    bench.write("data/train/a.png", saved(picture(1), "PNG"))
    case = bench.check(
        refused(f"--{flag}", "--dataset_name"), instance_data_dir=None, dataset_name="data", **{flag: value}
    )
    return case.but(environment={"HF_HUB_OFFLINE": "1"})


_ROWS = b"".join(json.dumps({"file_name": f"{n}.png", "text": "a dog"}).encode() + b"\n" for n in range(2))
_PICTURES = {f"train/{n}.png": saved(picture(n), "PNG") for n in range(2)}

DATASETS: dict[str, tuple[dict[str, bytes], Expect]] = {
    "a folder of pictures": (_PICTURES, fine(counts(2))),
    "a folder of pictures with captions": ({**_PICTURES, "train/metadata.jsonl": _ROWS}, fine(counts(2))),
    "captions of pictures that are not there": (
        {**_PICTURES, "train/metadata.jsonl": b'{"file_name": "9.png", "text": "a"}\n'},
        refused("--dataset_name"),
    ),
    "deep metadata": (
        {**_PICTURES, "train/metadata.jsonl": hostile.deep("[", "]", 100_000).encode()},
        refused("--dataset_name"),
    ),
    "an empty folder": ({"train/.hidden": b""}, refused("--dataset_name")),
    "a table of noise": ({"data.parquet": b"PAR1" + b"\0" * 100 + b"PAR1"}, refused("--dataset_name")),
    "a page": ({"data.parquet": hostile.HTML}, refused("--dataset_name")),
    "a table without pictures": ({"data.csv": b"a,b\n1,2\n"}, refused("--image_column", "--dataset_name")),
    "a picture of noise": ({**_PICTURES, "train/bad.png": b"noise"}, refused("--dataset_name")),
    "a saved dataset of noise": ({"dataset_dict.json": b"noise"}, refused("--dataset_name")),
    "a saved dataset of lists": ({"dataset_dict.json": b'{"splits": [[[]]]}'}, refused("--dataset_name")),
    "a saved dataset elsewhere": (
        {"state.json": b'{"_data_files": [{"filename": "/etc/passwd"}]}', "dataset_info.json": b"{}"},
        refused("--dataset_name"),
    ),
    "a script": ({"data.py": b"open('owned', 'w').write('x')\n"}, refused("--dataset_name")),
    "a card that explodes": (
        {**_PICTURES, "README.md": f"---\n{hostile.bomb()}---\n".encode()},
        either("--dataset_name"),
    ),
}
