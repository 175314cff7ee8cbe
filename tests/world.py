"""A small world to train in: tiny model, a few pictures, their encodings; made once per test session."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import program
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from small_run import keep_one_block

from flux_db.demo.pictures import write_demo_pictures
from flux_db.demo.tiny_model import write_tiny_model
from flux_db.settings.schema import Config, from_flat_dict, to_flat_dict

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


def make_world(folder: Path, *, whole: bool = False) -> World:
    """`whole`: with the tiny model as it is, and not with one block of each kind, which compiles in half the time."""
    world = World(folder)
    write_tiny_model(world.model, "tiny")
    if not whole:
        keep_one_block(world.model / "transformer")
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


# Settings that a compiled graph and its first state do not depend on: runs that differ only in these can share one.
_OF_THE_RUN = """
concepts
instance_data_dir instance_prompt encode_cache_dir class_data_dir class_prompt num_class_images mask_dir random_flip
center_crop cache_crops repeats resolution dataloader_num_workers sample_batch_size max_train_steps num_train_epochs
learning_rate lr_scheduler lr_warmup_steps output_dir checkpointing_steps checkpoints_total_limit resume_from_checkpoint
allow_changed max_skipped_steps report_to validation_prompt validation_prompts_file num_validation_images
validation_steps validation_size validation_inference_steps validation_data_dir validation_share keep_best
score_steps score_dino score_clip ema_export early_stop_patience max_train_minutes
"""
_graphs: dict[str, tuple[Any, list[tuple[Any, np.ndarray]]]] = {}


def train(config: Config, stop=None, *, compile_anew: bool = False) -> int:
    """The main job in this process, as the script does it; but runs of the same graph compile it once."""
    if compile_anew:
        return _train(config, stop, compile_anew=True)
    with stored_graphs():
        return _train(config, stop)


@contextmanager
def stored_graphs():
    """With the graphs that other processes of this session have compiled, as the program has them."""
    from flux_db.model import compile_cache, device, runtime
    from flux_db.settings.schema import RuntimeConfig

    folder = compile_cache.default_folder({"XDG_CACHE_HOME": str(program.HOME / ".cache")})
    store = runtime.graph_store(RuntimeConfig(compile_cache_dir=str(folder)), device.ascend_facts(), ["CPU", 0, 1])
    compile_cache.use(store)
    try:
        yield
    finally:
        compile_cache.use(None)


def _train(config: Config, stop=None, *, compile_anew: bool = False) -> int:
    from flux_db.interrupt import StopRequest
    from flux_db.model import runtime
    from flux_db.training import build, run
    from flux_db.training.prepare import prepare

    stop = stop or StopRequest()
    device = runtime.Runtime(device="CPU", dtype=runtime.DTYPES[config.runtime.mixed_precision])
    prepared = prepare(config, device)
    if compile_anew:
        training = build.build(config, device, prepared.model, prepared.dataset)
    else:
        graph = _shared_graph(config, device, prepared)
        training = build.plan_run(config, device, prepared.model, prepared.dataset, graph)
    ground = run.restore(config, device, prepared, training)
    compiler = run.step_compiler(config, device, prepared, training)
    outcome = run.train(config, device, prepared, training, compiler, ground, stop)
    return run.publish(config, device, outcome, stop)


def _shared_graph(config: Config, device: Any, prepared: Any) -> Any:
    """The graph of these settings, in the state in which it was built."""
    from mindspore import Tensor, ops

    from flux_db.settings.preserved import is_preserved
    from flux_db.training.build import build_graph

    prior = bool(prepared.dataset.class_examples)
    settings = {name: value for name, value in to_flat_dict(config).items() if name not in _OF_THE_RUN.split()}
    concepts = len(config.data.concepts)
    key = [settings, prior, prepared.dataset.weighted, is_preserved(config), concepts if concepts > 1 else 0]
    key = json.dumps(key, sort_keys=True, default=str)
    if key not in _graphs:
        graph = build_graph(config, device, prepared.model, prior=prior)
        _graphs[key] = graph, [(parameter, parameter.asnumpy().copy()) for parameter in _changing(graph)]
    graph, start = _graphs[key]
    for parameter, value in start:
        ops.assign(parameter, Tensor(value))  # a compiled graph does not see set_data
    return graph


def _changing(graph: Any) -> list[Any]:
    """All parameters that a step changes."""
    step = graph.step
    optimizer = graph.optimizer
    found = [optimizer.weights, *optimizer.parameters, *optimizer.state().values(), graph.dropout_key, step.stop_asked]
    found += [getattr(step, "window", None), getattr(optimizer, "ema", None)]
    found += [graph.scaler.scale_value, graph.scaler.counter] if graph.scaler else []
    return [parameter for parameter in found if parameter is not None]


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


VARYING = ("seconds", "memory_mb")


def without_time(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in VARYING} for row in rows]


def lora_bytes(output: Path) -> bytes:
    return (output / "pytorch_lora_weights.safetensors").read_bytes()


def fill_cache(config: Config) -> None:
    """Store numbers for all that would be encoded, so that a run loads no encoder; each has numbers of its own."""
    from flux_db.data import encode, encode_cache
    from flux_db.data.dataset import read_dataset
    from flux_db.training.build import latent_shape

    model = Path(config.model.pretrained_model_name_or_path)
    cache = encode_cache.open_cache(config, model)
    cache.folder.mkdir(parents=True, exist_ok=True)
    work = encode.missing(config, cache, read_dataset(config)[0])
    channels, side, _ = latent_shape(config, model)
    shrink = config.data.resolution // side

    def numbers(path: Path, *shape: int) -> np.ndarray:
        return np.random.default_rng(list(path.name.encode())).standard_normal(shape).astype(np.float32)

    for prompt in work.prompts:
        file = cache.prompt_file(prompt)
        length = config.data.max_sequence_length
        cache.write(file, {"prompt_embeds": numbers(file, length, 48), "pooled_prompt_embeds": numbers(file, 32)})
    for example, flip in work.pictures:
        file = cache.picture_file(example, flip)
        latent = example.size.height // shrink, example.size.width // shrink
        encode._picture_arrays(cache, example, flip, numbers(file, 2 * channels, *latent))
    if work.tokens:
        encode._store_tokens(model, cache, work.tokens)
