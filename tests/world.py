"""A small world to train in: tiny model, a few pictures, their encodings; made once per test session."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file, save_file

from flux_db.demo.pictures import write_demo_pictures
from flux_db.demo.tiny_model import write_tiny_model
from flux_db.settings.schema import Config, from_flat_dict

PROMPT = "a photo of sks dog"


@dataclass(frozen=True)
class World:
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def pictures(self) -> Path:
        return self.folder / "pictures"

    def settings(self, output: Path, **changes) -> dict:
        """Flags of a short run; two small LoRA layers, because compiling takes most of a test's time."""
        return {
            "pretrained_model_name_or_path": str(self.model),
            "instance_data_dir": str(self.pictures),
            "instance_prompt": PROMPT,
            "encode_cache_dir": str(self.folder / "cache"),
            "output_dir": str(output),
            "resolution": 32,
            "max_sequence_length": 16,
            "rank": 4,
            "lora_layers": "attn.to_q,ff.net.2",
            "max_train_steps": 4,
            "learning_rate": 1e-3,
            "checkpointing_steps": 1000,
            "dataloader_num_workers": 0,
            "device": "CPU",
            "report_to": "none",
            **changes,
        }

    def config(self, output: Path, **changes) -> Config:
        return from_flat_dict(self.settings(output, **changes))


def make_world(folder: Path) -> World:
    world = World(folder)
    write_tiny_model(world.model, "tiny")
    write_demo_pictures(world.pictures, count=3, size=64)
    return world


def split_weights(file: Path, *names: str) -> Path:
    """Replace a weight file by several and an index, which is returned; tensors are dealt in turns."""
    tensors = load_file(file)
    weight_map = {tensor: names[number % len(names)] for number, tensor in enumerate(sorted(tensors))}
    for name in names:
        shard = {tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == name}
        save_file(shard, file.with_name(name), metadata={"format": "pt"})
    index = file.with_name(f"{file.name}.index.json")
    total = sum(array.nbytes for array in tensors.values())
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}), encoding="utf-8")
    file.unlink()
    return index


def train(config: Config, stop=None) -> int:
    """The main job in this process, as the script does it."""
    from flux_db.interrupt import StopRequest
    from flux_db.model import runtime
    from flux_db.training import run
    from flux_db.training.build import build
    from flux_db.training.prepare import prepare

    stop = stop or StopRequest()
    device = runtime.Runtime(device="CPU", dtype=runtime.DTYPES[config.runtime.mixed_precision])
    prepared = prepare(config, device)
    training = build(config, device, prepared.model, prepared.dataset)
    ground = run.restore(config, device, prepared, training)
    return run.publish(config, device, run.train(config, device, prepared, training, ground, stop), stop)


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


VARYING = ("seconds", "memory_mb")


def without_time(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in VARYING} for row in rows]


def lora_bytes(output: Path) -> bytes:
    return (output / "pytorch_lora_weights.safetensors").read_bytes()
