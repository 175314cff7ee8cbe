"""A short run of the tiny model, started in a bare environment as a user starts it; for the scripts beside this one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flux_db.demo.pictures import write_demo_pictures  # noqa: E402  a script finds its package beside it
from flux_db.demo.tiny_model import write_tiny_model  # noqa: E402

LORA_FILE = "pytorch_lora_weights.safetensors"
VARYING = ("seconds", "memory_mb")


def bare() -> dict[str, str]:
    """PATH, HOME and LANG alone: MindSpore changes the C environment of a process that imports it."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def write_inputs(folder: Path) -> None:
    """Model and pictures."""
    write_tiny_model(folder / "model", "tiny")
    write_demo_pictures(folder / "pictures", count=3, size=64)


def keep_one_block(transformer: Path) -> None:
    """Of the tiny model's blocks keep the first of each kind: it compiles in half the time."""
    config = transformer / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 1, "num_single_layers": 1}))
    file = transformer / "diffusion_pytorch_model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "blocks.1." not in name}
    save_file(kept, file, {"format": "pt"})


def trainer(folder: Path, output: Path, **changes: Any) -> list[str]:
    """The command of a run on what `write_inputs` wrote."""
    settings = {
        "pretrained_model_name_or_path": folder / "model",
        "instance_data_dir": folder / "pictures",
        "instance_prompt": "a photo of sks dog",
        "encode_cache_dir": folder / "cache",
        "output_dir": output,
        "resolution": 32,
        "max_sequence_length": 16,
        "rank": 4,
        # LoRA in one layer only: the step compiles in seconds
        "lora_layers": "single_transformer_blocks.1.attn.to_q",
        "learning_rate": 1e-3,
        "dataloader_num_workers": 0,
        "device": "CPU",
        "report_to": "none",
        **changes,
    }
    return [sys.executable, str(ROOT / "train_dreambooth_lora_flux.py"), *flag_words(settings)]


def flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line; a value of True is a switch."""
    words = ([f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in settings.items())
    return [word for pair in words for word in pair]


def lora_bytes(output: Path) -> bytes:
    return (output / LORA_FILE).read_bytes()


def metrics(path: Path) -> list[Mapping[str, Any]]:
    """The lines of a metrics log without what varies from run to run."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in row.items() if name not in VARYING} for row in rows]
