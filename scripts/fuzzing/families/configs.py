"""A model's other files: configs, index of the parts, tokenizers; missing, damaged, or with values that cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzzing import hostile
from fuzzing.case import Bench, Case, Expect, Plan, either, plan, refused
from fuzzing.families.models import NETWORKS, special_file, with_model
from fuzzing.hostile import KINDS

CONFIGS = ("model_index.json", *(f"{part}/config.json" for part in NETWORKS), "scheduler/scheduler_config.json")

# Values that no config of a FLUX.1 model has: part, field, value.
FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("transformer", "guidance_embeds", None),  # the opposite of what it is
    ("transformer", "num_layers", 3),
    ("transformer", "num_layers", -1),
    ("transformer", "num_layers", "two"),
    ("transformer", "num_layers", 10**9),
    ("transformer", "num_single_layers", 1),
    ("transformer", "num_single_layers", None),
    ("transformer", "attention_head_dim", 0),
    ("transformer", "attention_head_dim", 1.5),
    ("transformer", "num_attention_heads", 7),
    ("transformer", "in_channels", 10**12),
    ("transformer", "joint_attention_dim", 5),
    ("transformer", "axes_dims_rope", "x"),
    ("transformer", "_class_name", "UNet2DConditionModel"),
    ("vae", "block_out_channels", []),
    ("vae", "block_out_channels", "x"),
    ("vae", "block_out_channels", [1] * 100_000),
    ("vae", "block_out_channels", [8, "x", 8, 8]),
    ("vae", "latent_channels", 0),
    ("vae", "latent_channels", "x"),
    ("vae", "scaling_factor", None),
    ("vae", "scaling_factor", "x"),
    ("vae", "scaling_factor", float("nan")),
    ("vae", "scaling_factor", 0),
    ("vae", "shift_factor", "x"),
    ("vae", "shift_factor", float("inf")),
    ("text_encoder", "hidden_size", 1),
    ("text_encoder", "num_hidden_layers", 10**9),
    ("text_encoder", "vocab_size", -5),
    ("text_encoder", "num_attention_heads", 0),
    ("text_encoder_2", "d_model", 1),
    ("text_encoder_2", "num_layers", "x"),
    ("text_encoder_2", "vocab_size", 10**12),
    ("text_encoder_2", "num_heads", 0),
    ("scheduler", "num_train_timesteps", 0),
    ("scheduler", "num_train_timesteps", "x"),
    ("scheduler", "num_train_timesteps", 10**12),
    ("scheduler", "shift", "x"),
    ("scheduler", "shift", float("nan")),
)


def plans() -> Iterator[Plan]:
    for name in CONFIGS:
        part = name.split("/")[0]
        for about, content in JSON.items():
            yield plan(f"{name}: {about}", replaced, name, content, refused(part))
        for about, content in JSON_OBJECTS.items():
            yield plan(
                f"{name}: {about}", replaced, name, content, either(part) if part == "scheduler" else refused(part)
            )
    for name in ("model_index.json", "transformer/config.json"):
        for about in KINDS:
            yield plan(f"{name} is {about}", special_file, name, about)
    for part, field, value in FIELDS:
        yield plan(f"{part}: {field} = {str(value)[:20]}", with_field, part, field, value)
    for about, (name, content) in TOKENIZERS.items():
        yield plan(about, tokenizer, name, content)
    for part in (*NETWORKS, "tokenizer", "tokenizer_2", "scheduler"):
        yield plan(f"without {part}", without, part)


JSON: dict[str, bytes] = {
    "nothing": b"",
    "a page": hostile.HTML,
    "a list": b"[]",
    "null": b"null",
    "cut": b'{"_class_name": "Fl',
    "lists 100,000 deep": hostile.deep("[", "]", 100_000).encode(),
    "objects 100,000 deep": hostile.deep('{"a":', "}", 100_000, "1").encode(),
    "Latin-1": '{"a": "é"}'.encode("latin-1"),
}
# A scheduler without settings has its defaults; a network without settings is another network.
JSON_OBJECTS: dict[str, bytes] = {
    "escape sequences": json.dumps({"_class_name": hostile.TERMINAL}).encode(),
    "an empty object": b"{}",
}


def replaced(bench: Bench, name: str, content: bytes, expect: Expect) -> Case:
    return with_model(bench, lambda model: (model / name).write_bytes(content), expect)


def with_field(bench: Bench, part: str, field: str, value: Any) -> Case:
    def apply(model: Path) -> None:
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        content = json.loads((model / part / name).read_text())
        content[field] = not content[field] if field == "guidance_embeds" else value
        (model / part / name).write_text(json.dumps(content))

    return with_model(bench, apply, refused(part))


TOKENIZERS: dict[str, tuple[str, bytes | None]] = {
    "no vocab.json": ("tokenizer/vocab.json", None),
    "no merges.txt": ("tokenizer/merges.txt", None),
    "no tokenizer.json": ("tokenizer_2/tokenizer.json", None),
    "vocab.json of noise": ("tokenizer/vocab.json", b"\xff\xfe\0"),
    "vocab.json a list": ("tokenizer/vocab.json", b"[]"),
    "vocab.json a page": ("tokenizer/vocab.json", hostile.HTML),
    "tokenizer.json cut": ("tokenizer_2/tokenizer.json", b'{"version": "1.0", "model": {'),
    "tokenizer.json a page": ("tokenizer_2/tokenizer.json", hostile.HTML),
    "tokenizer.json an LFS pointer": ("tokenizer_2/tokenizer.json", hostile.LFS_POINTER),
    "tokenizer.json empty": ("tokenizer_2/tokenizer.json", b""),
}


def tokenizer(bench: Bench, name: str, content: bytes | None) -> Case:
    def apply(model: Path) -> None:
        (model / name).unlink() if content is None else (model / name).write_bytes(content)

    return with_model(bench, apply, refused(name.split("/")[0]))


def without(bench: Bench, part: str) -> Case:
    return with_model(bench, lambda model: shutil.rmtree(model / part), refused(part))
