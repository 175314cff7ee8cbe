"""Output folders that `report` reads: of runs that were killed, edited, copied halfway, or written by somebody else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import PngImagePlugin

from fuzzing import hostile
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused, unwritable
from fuzzing.families.pictures import png
from fuzzing.hostile import KINDS, MARKUP
from fuzzing.looks import page_is_harmless
from fuzzing.world import picture

FILES = (
    "config.yaml", "metrics.jsonl", "train_state.json", "samples/step-00002/00.png", "report/training_pictures.json",
    "report/training-00.webp", "pytorch_lora_weights.safetensors",
)  # fmt: skip

METRICS: dict[str, str] = {
    "nothing": "",
    "noise": "\x00\x01\x02\n",
    "a list": "[1, 2]\n",
    "lists 100,000 deep": hostile.deep("[", "]", 100_000) + "\n",
    "objects 100,000 deep": hostile.deep('{"a":', "}", 100_000, "1") + "\n",
    "a loss without a step": '{"loss": 1.0}\n',
    "a step that is text": '{"step": "two", "loss": 1.0}\n',
    "a step that is null": '{"step": null, "loss": 1.0}\n',
    "a step that is a list": '{"step": [1], "loss": 1.0}\n',
    "a step of markup": json.dumps({"step": MARKUP, "loss": 1.0}) + "\n",
    "a step below 0": '{"step": -5, "loss": 1.0}\n',
    "a step of 10^400": '{"step": 1' + "0" * 400 + ', "loss": 1.0}\n',
    "a step of 5000 digits": '{"step": ' + "9" * 5000 + ', "loss": 1.0}\n',
    "a loss of 10^400": '{"step": 1, "loss": 1' + "0" * 400 + "}\n",
    "a loss of 1e400": '{"step": 1, "loss": 1e400}\n{"step": 2, "loss": 1.0}\n',
    "a loss of 1e308": '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308}\n',
    "a loss of 1e-320": '{"step": 1, "loss": 1e-320}\n{"step": 2, "loss": 2e-320}\n',
    "a loss of NaN": '{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n',
    "only NaN": '{"step": 1, "loss": NaN}\n' * 3,
    "infinite losses": '{"step": 1, "loss": Infinity}\n{"step": 2, "loss": -Infinity}\n',
    "a loss that is text": '{"step": 1, "loss": "much"}\n',
    "a loss that is true": '{"step": 1, "loss": true}\n',
    "steps of NaN": '{"step": NaN, "loss": 1.0}\n{"step": 2, "loss": 1.0}\n',
    "seconds that are infinite": '{"step": 1, "loss": 1.0, "seconds": Infinity, "memory_mb": Infinity}\n',
    "seconds that are NaN": '{"step": 1, "loss": 1.0, "seconds": NaN, "memory_mb": NaN, "lr": NaN}\n',
    "memory below 0": '{"step": 1, "loss": 1.0, "memory_mb": -5, "device_memory_mb": 0}\n',
    "skipped of text": '{"step": 1, "loss": 1.0, "skipped": "<b>"}\n',
    "skipped of markup": json.dumps({"step": 1, "loss": 1.0, "skipped": MARKUP}) + "\n",
    "skipped that is a list": '{"step": 1, "loss": 1.0, "skipped": [1]}\n',
    "a validation loss of NaN": '{"step": 1, "loss": 1.0}\n{"step": 1, "validation_loss": NaN}\n',
    "steps out of order": "".join(f'{{"step": {9 - i}, "loss": {i}}}\n' for i in range(9)),
    "the same step many times": '{"step": 1, "loss": 1.0}\n' * 1000,
    "20,000 steps": "".join(f'{{"step": {i}, "loss": {i % 7}}}\n' for i in range(20_000)),
    "all values equal": '{"step": 1, "loss": 0.0, "grad_norm": 0.0, "lr": 0.0, "seconds": 0.0}\n' * 2,
    "a cut line": '{"step": 1, "loss": 1.0}\n{"step": 2, "lo',
    "keys with escape sequences": json.dumps({"step": 1, "loss": 1.0, hostile.TERMINAL: 1}) + "\n",
    "half a letter": '{"step": 1, "loss": 1.0, "event": "\\ud800"}\n',
}

STATE = {
    "status": "finished", "step": 2, "last_good_checkpoint": None, "message": None, "time": "2026-01-01T00:00:00+00:00",
    "tool": "flux_db 0", "schema": 1,
}  # fmt: skip

# Field of train_state.json -> a value that it never has.
STATES: tuple[tuple[str, Any], ...] = (
    ("status", None),
    ("status", 5),
    ("status", ["finished"]),
    ("status", MARKUP),
    ("status", 'x" onclick="alert(1)'),
    ("status", hostile.TERMINAL),
    ("step", "two"),
    ("step", 10**400),
    ("message", MARKUP),
    ("message", ["a"]),
    ("message", {"a": 1}),
    ("message", "\ud800"),
    ("time", None),
    ("time", 5),
    ("time", MARKUP),
    ("schema", 99),
    ("more", 1),
)

SETTINGS: dict[str, str] = {
    "nothing": "",
    "a list": "- a\n",
    "a number as key": "5: a\n",
    "null as key": "~: a\nrank: 4\n",
    "true as key": "true: a\nrank: 4\n",
    "a date as key": "2001-01-01: a\n",
    "a list as key": "? [a]\n: b\n",
    "a prompt that is a list": "instance_prompt: [a, b]\n",
    "a prompt that is null": "instance_prompt: ~\n",
    "a prompt of markup": f"instance_prompt: '{MARKUP}'\n",
    "a trigger that is a number": "instance_prompt: a {trigger}\ntrigger_word: 5\n",
    "a trigger that is a list": "instance_prompt: a {trigger}\ntrigger_word: [a]\n",
    "a trigger of markup": f"instance_prompt: a {{trigger}}\ntrigger_word: '{MARKUP}'\n",
    "a model that is a number": "pretrained_model_name_or_path: 5\n",
    "a model that is a list": "pretrained_model_name_or_path: [a]\n",
    "a model of 5000 letters": f"pretrained_model_name_or_path: {'x' * 5000}/y\n",
    "a model with NUL": 'pretrained_model_name_or_path: "a\\0/b"\n',
    "a rank of markup": f"rank: '{MARKUP}'\n",
    "infinite values": "learning_rate: .inf\nlora_alpha: .nan\n",
    "a date as value": "rank: 2001-01-01\n",
    "bytes": "rank: !!binary aGVsbG8=\n",
    "a set": "rank: !!set {a, b}\n",
    "steps that are text": "max_train_steps: many\n",
    "a key of markup": f"'{MARKUP}': 1\n",
    "half a letter": 'instance_prompt: "\\ud800"\n',
    "aliases that explode": hostile.bomb(),
    "aliases that explode in a value": hostile.bomb() + "validation_prompt: *a29\n",
    "merges that explode": "m0: &m0 {x: 1}\n"
    + "".join(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 10)}]}}\n" for i in range(1, 12)),
    "a mapping that merges itself": "a: &a\n  <<: *a\n",
    "lists 5,000 deep": hostile.deep("[", "]", 5000),
    "a bad bool": "center_crop: !!bool maybe\n",
    "a bad timestamp": "rank: !!timestamp x\n",
    "a month that is none": "rank: 2001-13-45\n",
    "an empty int": "rank: !!int ''\n",
    "5000 digits": f"rank: {'9' * 5000}\n",
    "a secret": f"hub_token: {hostile.SECRET}\nrank: 4\n",
    "Latin-1": "instance_prompt: \udce9\n",
}

INDEX = {"total": 1, "pictures": [{"file": "training-00.webp", "name": "dog1.png", "caption": "a dog"}]}
INDEXES: dict[str, Any] = {
    "no JSON": "not JSON",
    "lists 100,000 deep": hostile.deep("[", "]", 100_000),
    "a list": [],
    "no pictures": {"total": 1},
    "pictures null": {"total": 1, "pictures": None},
    "a picture that is text": {"total": 1, "pictures": ["a"]},
    "a picture without a name": {"total": 1, "pictures": [{"file": "training-00.webp"}]},
    "a file elsewhere": {"total": 1, "pictures": [{"file": "../../../etc/passwd", "name": "a", "caption": "b"}]},
    "a file that is a number": {"total": 1, "pictures": [{"file": 5, "name": "a", "caption": "b"}]},
    "a file with NUL": {"total": 1, "pictures": [{"file": "a\0b", "name": "a", "caption": "b"}]},
    "a file of half a letter": {"total": 1, "pictures": [{"file": "\ud800", "name": "a", "caption": "b"}]},
    "a name of markup": {"total": 1, "pictures": [{"file": "training-00.webp", "name": MARKUP, "caption": MARKUP}]},
    "a name that is null": {"total": 1, "pictures": [{"file": "training-00.webp", "name": None, "caption": 5}]},
    "a total of text": {"total": "many", "pictures": []},
    "a total that is infinite": {"total": float("inf"), "pictures": []},
    "a total of NaN": {"total": float("nan"), "pictures": []},
}


def plans() -> Iterator[Plan]:
    yield plan("a sound run", report, lambda run: None, fine(_shows_the_run))
    yield plan("a run that has only begun", report, _only_begun, fine(page_is_harmless("run/report.html")))
    yield plan("an empty folder", report, _emptied, refused("run"))
    for about, text in METRICS.items():
        yield plan(f"metrics.jsonl: {about}", replaced, "metrics.jsonl", text)
    for field, value in STATES:
        yield plan(f"train_state.json: {field} = {str(value)[:20]!r}", state, field, value)
    for about, text in (("a list", "[]"), ("cut", '{"status": "fi'), ("deep", hostile.deep("[", "]", 100_000))):
        yield plan(f"train_state.json: {about}", replaced, "train_state.json", text)
    for about, text in SETTINGS.items():
        yield plan(f"config.yaml: {about}", replaced, "config.yaml", text)
    for about, content in INDEXES.items():
        text = content if isinstance(content, str) else json.dumps(content)
        yield plan(f"training pictures: {about}", replaced, "report/training_pictures.json", text)
    for name in FILES:
        for about in KINDS:
            yield plan(f"{name} is {about}", special, name, about)
    for about, change in SAMPLES.items():
        yield plan(about, report, change, either("run", look=page_is_harmless("run/report.html")))
    yield plan(
        "a report that is a folder", report, lambda run: (run / "report.html").mkdir(), unwritable("report.html")
    )
    for about, build in COMPARISONS.items():
        yield plan(about, build)


def write_run(run: Path, number: int = 0) -> Path:
    """A small run that came to its end."""
    (run / "samples" / "step-00002").mkdir(parents=True)
    (run / "report").mkdir()
    (run / "config.yaml").write_text(
        "instance_prompt: a photo of sks dog\nrank: 4\nresolution: 32\nmax_train_steps: 2\n"
    )
    rows = [{"step": step, "loss": 1.0 / step, "lr": 1e-4, "grad_norm": 0.5, "seconds": 0.1} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "train_state.json").write_text(json.dumps(STATE))
    sample(run / "samples" / "step-00002" / "00.png", "a photo of sks dog", number=str(number))
    (run / "report" / "training_pictures.json").write_text(json.dumps(INDEX))
    picture(1).save(run / "report" / "training-00.webp")
    (run / "pytorch_lora_weights.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return run


def sample(path: Path, prompt: str, number: str = "0") -> None:
    about = PngImagePlugin.PngInfo()
    about.add_itxt("prompt", prompt)
    about.add_text("number", number)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(2).save(path, pnginfo=about)


def report(bench: Bench, change: Callable[[Path], object], expect: Expect) -> Case:
    change(write_run(bench.folder / "run"))
    return bench.run(expect, "report", "run", writes=["run/report.html"])


def replaced(bench: Bench, name: str, text: str) -> Case:
    content = text.encode("utf-8", "surrogateescape")
    look = page_is_harmless("run/report.html")
    return report(bench, lambda run: (run / name).write_bytes(content), either("run", look=look))


def state(bench: Bench, field: str, value: Any) -> Case:
    return replaced(bench, "train_state.json", json.dumps({**STATE, field: value}))


def special(bench: Bench, name: str, about: str) -> Case:
    def change(run: Path) -> None:
        (run / name).unlink()
        KINDS[about](run / name)

    return report(bench, change, either("run", look=page_is_harmless("run/report.html")))


def _shows_the_run(case: Path, _stdout: str) -> str | None:
    text = (case / "run" / "report.html").read_text()
    wanted = ("a photo of sks dog", "data:image/png;base64,", "<svg", "finished", "dog1.png")
    missing = [word for word in wanted if word not in text]
    return f"the report lacks {missing[0]}" if missing else None


def _emptied(run: Path) -> None:
    for path in sorted(run.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


def _only_begun(run: Path) -> None:
    _emptied(run)
    (run / "config.yaml").write_text("instance_prompt: a dog\n")


def _sample_named(name: str) -> Callable[[Path], object]:
    return lambda run: sample(run / "samples" / name, "a dog")


SAMPLES: dict[str, Callable[[Path], object]] = {
    "a step of 30 digits": _sample_named(f"step-{'9' * 30}/00.png"),
    "a step of 200 digits": _sample_named(f"step-{'9' * 200}/00.png"),
    "a step of another script": _sample_named("step-٣/00.png"),
    "a step that is a digit but no number": _sample_named("step-²/00.png"),
    "a step without number": _sample_named("step-/00.png"),
    "a sample with another name": _sample_named("step-00002/²é.png"),
    "a sample's number that is none": lambda run: sample(run / "samples/step-00002/01.png", "a", "²"),
    "a sample's number of 5000 digits": lambda run: sample(run / "samples/step-00002/01.png", "a", "9" * 5000),
    "a prompt of markup": lambda run: sample(run / "samples/step-00002/01.png", MARKUP),
    "a prompt with escape sequences": lambda run: sample(run / "samples/step-00002/01.png", hostile.TERMINAL),
    "a sample of 60,000 x 60,000": lambda run: (run / "samples/step-00002/01.png").write_bytes(png(60_000, 60_000)),
    "a sample of 20,000 x 20,000": lambda run: (run / "samples/step-00002/01.png").write_bytes(png(20_000, 20_000)),
    "a sample cut short": lambda run: (run / "samples/step-00002/01.png").write_bytes(png(64, 64, b"")),
    "a page as sample": lambda run: (run / "samples/step-00002/01.png").write_bytes(hostile.HTML),
    "a step that is a file": lambda run: (run / "samples/step-00003").write_text("a"),
    "samples that are a file": lambda run: ((run / "samples").rename(run / "old"), (run / "samples").write_text("a")),
    "samples that are a link to themselves": lambda run: (
        (run / "samples").rename(run / "old"),
        (run / "samples").symlink_to("samples"),
    ),
    "500 samples": lambda run: [sample(run / f"samples/step-{i:05d}/00.png", "a dog") for i in range(500)],
    "a report that is a link": lambda run: (run / "report.html").symlink_to("config.yaml"),
}


# --- several runs --------------------------------------------------------------------------------------------------


def two(bench: Bench) -> Case:
    write_run(bench.folder / "a"), write_run(bench.folder / "b", 1)
    return bench.run(fine(page_is_harmless("both.html")), "report", "a", "b", "-o", "both.html", writes=["both.html"])


def words(*given: str, writes: tuple[str, ...] = (), expect: Expect) -> Callable[[Bench], Case]:
    def build(bench: Bench) -> Case:
        write_run(bench.folder / "run")
        return bench.run(expect, "report", *given, writes=writes)

    return build


def named(name: str) -> Callable[[Bench], Case]:
    """The folder's own name is shown, too."""

    def build(bench: Bench) -> Case:
        write_run(bench.folder / name)
        return bench.run(
            either(look=page_is_harmless("made.html")), "report", name, "-o", "made.html", writes=["made.html"]
        )

    return build


COMPARISONS: dict[str, Callable[[Bench], Case]] = {
    "two runs": two,
    "the same run twice": words("run", "run", expect=refused("twice")),
    "the same run by another way": words("run", "run/../run", expect=refused("twice")),
    "seven runs": words(*["run"] * 7, expect=refused("7 runs")),
    "a run that is not there": words("run", "nobody", expect=refused("nobody")),
    "a file as run": words("run/config.yaml", expect=refused("config.yaml")),
    "/dev/null as run": words("/dev/null", expect=refused("/dev/null")),
    "a report in a folder that is not there": words("run", "-o", "no/a.html", expect=refused("--output", "-o")),
    "a report to a folder": words("run", "-o", "run", expect=unwritable("--output", "-o", "run")),
    "a report to /proc": words("run", "-o", "/proc/a.html", expect=unwritable("/proc")),
    "a report of a long name": words("run", "-o", "x" * 300, expect=unwritable("xxx")),
    "a run named with markup": named("<script>alert(1)"),
    "a run named with an escape sequence": named(hostile.TERMINAL),
    "a run named with a line break": named("a\nb"),
}
