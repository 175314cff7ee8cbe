"""What comes with a LoRA's tensors: peft's settings, and the notes of earlier conversions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzzing import hostile, lora_files, tensors
from fuzzing.case import Bench, Case, Plan, either, plan, refused
from fuzzing.families.loras import COMMANDS, NAMES, changed, command, compare, tells_not_finite
from fuzzing.hostile import KINDS

SETTINGS = "lora_adapter_metadata"


def plans() -> Iterator[Plan]:
    for about, settings in ADAPTERS.items():
        for command_ in COMMANDS:
            yield plan(f"{command_}: settings with {about}", adapter, command_, settings)
    for about, note in NOTES.items():
        for key, format_ in (("flux_db_parts", "kohya"), ("flux_db_fused", "diffusers")):
            yield plan(f"a note {key} with {about}", noted, key, format_, note)
    for about in KINDS:
        yield plan(f"peft's settings are {about}", peft_settings, about)


ADAPTERS: dict[str, Any] = {
    "no JSON": "not JSON",
    "a list": "[]",
    "a number": "5",
    "lists 100,000 deep": hostile.deep("[", "]", 100_000),
    "objects 100,000 deep": hostile.deep('{"a":', "}", 100_000, "1"),
    "5000 digits": '{"transformer.lora_alpha": ' + "9" * 5000 + "}",
    "alpha NaN": {"lora_alpha": float("nan")},
    "alpha infinite": {"lora_alpha": float("inf")},
    "alpha 10^400": '{"transformer.lora_alpha": 1' + "0" * 400 + "}",
    "alpha a text": {"lora_alpha": "much"},
    "alpha a list": {"lora_alpha": [4]},
    "alpha an object": {"lora_alpha": {}},
    "a pattern that never ends": {"lora_alpha": 4, "alpha_pattern": {"(([a-z0-9_.]+)+)+!": 8}},
    "a pattern that is none": {"lora_alpha": 4, "alpha_pattern": {"((": 8}},
    "a pattern of 100 kB": {"lora_alpha": 4, "alpha_pattern": {"(" * 5000 + ")" * 5000: 8}},
    "patterns as a list": {"lora_alpha": 4, "alpha_pattern": ["a"]},
    "patterns as text": {"lora_alpha": 4, "alpha_pattern": "a"},
    "a pattern's alpha NaN": {"lora_alpha": 4, "alpha_pattern": {"attn.to_out.0": float("nan")}},
    "a pattern's alpha a list": {"lora_alpha": 4, "alpha_pattern": {"attn.to_out.0": [1]}},
}


def adapter(bench: Bench, name: str, settings: Any) -> Case:
    text = settings
    if not isinstance(settings, str):
        text = json.dumps({f"transformer.{key}": value for key, value in settings.items()})
    look = tells_not_finite if name == "info" else None
    expect = either(*NAMES, look=look) if name == "info" and "alpha" in text else refused(*NAMES)
    return changed(bench, name, lambda _, metadata: metadata.update({SETTINGS: text}), expect)


def peft_settings(bench: Bench, about: str) -> Case:
    content = lora_files.make(bench.world, bench.rng, format_="peft")
    bench.write("lora/adapter_model.safetensors", tensors.file_of(content))
    KINDS[about](bench.path("lora/adapter_config.json"))
    # without settings alpha is the rank
    expect = either("lora") if about == "a link to nowhere" else refused("lora")
    return command(bench, "info", expect, "lora")


NOTES: dict[str, Any] = {
    "no JSON": "not JSON",
    "a list": [],
    "layers a list": {"layers": ["a"]},
    "lists 100,000 deep": hostile.deep("[", "]", 100_000),
    "a rank below 0": {"layers": {"*": [-5, 4.0, "F32"]}},
    "a giant rank": {"layers": {"*": [10**18, 4.0, "F32"]}},
    "a rank of 0": {"layers": {"*": [0, 0.0, "F32"]}},
    "alpha NaN": {"layers": {"*": [4, float("nan"), "F32"]}},
    "alpha infinite": {"layers": {"*": [4, float("inf"), "F32"]}},
    "a type of lists": {"layers": {"*": [4, 4.0, ["F32"]]}},
    "a type of integers": {"layers": {"*": [4, 4.0, "I8"]}},
    "layers of nobody": {"layers": {"nobody": [4, 4.0, "F32"]}},
    "settings that are no JSON": {"layers": {"*": [4, 4.0, "F32"]}, "metadata": {SETTINGS: "not JSON"}},
    "settings of text": {"layers": {"*": [4, 4.0, "F32"]}, "metadata": "text"},
    "escape sequences": {"layers": {}, "metadata": {hostile.TERMINAL: hostile.TERMINAL}},
}


def noted(bench: Bench, key: str, format_: str, note: Any) -> Case:
    """What an earlier conversion noted, written by somebody else: the result must be that of the tensors."""
    source = {"kohya": "diffusers", "diffusers": "kohya"}[format_]
    content = lora_files.make(bench.world, bench.rng, format_=source)
    if isinstance(note, dict) and "*" in (layers := note["layers"] or {}):
        names = lora_files.LAYERS.keys() if key == "flux_db_parts" else lora_files.LAYERS.values()
        note = {**note, "layers": dict.fromkeys(names, layers["*"])}
    text = note if isinstance(note, str) else json.dumps(note)
    bench.write("lora.safetensors", tensors.file_of(content, {key: text}))
    expected = lora_files.deltas(content, source)

    def look(case: Path, _stdout: str) -> str | None:
        if not tensors.is_sound(case / "made"):
            return "the safetensors library does not read what was written"
        return compare(lora_files.read_deltas(case / "made", format_), expected)

    words = ["export", "lora.safetensors", "--format", format_, "-o", "made"]
    return bench.run(either(*NAMES, look=look), *words, writes=["made"])
