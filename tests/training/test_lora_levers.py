"""Layers, ranks and learning rates by name, and a LoRA to start from: trained, resumed and written."""

import dataclasses
import json
import re

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import load_file
from world import lora_bytes, metrics, train

from flux_db.errors import UserError
from flux_db.lora import convert, init_lora, lora_file
from flux_db.model import adapter, loading
from flux_db.settings import lora_layers
from flux_db.settings.schema import LoraConfig
from flux_db.weight_file import open_weights, to_bytes

Q, OUT = "single_transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_out"
LORA = "pytorch_lora_weights.safetensors"
RUN = {
    "lora_layers": "attn.to_q,proj_out,single:0",
    "lora_rank_pattern": (r"proj_(mlp|out)=2",),
    "lora_lr_pattern": ("attn.to_q=3",),
    "loraplus_ratio": 4.0,
    "lora_dropout": 0.1,
    "gradient_accumulation_steps": 2,
    "checkpointing_steps": 2,
}


@pytest.mark.parametrize("text", [None, "all", "attention,double:1", "proj_out,single:1", "proj_out"])
def test_the_layers_that_are_chosen_are_those_with_a_lora(cpu, whole_world, text):
    transformer = loading.load_transformer(whole_world.model, ms.float32)
    lora = LoraConfig(rank=3, lora_layers=text, lora_rank_pattern=("proj_out=2", r".*\.1\.attn\.to_q=1"))
    wanted = lora_layers.chosen(lora, adapter.linear_layers(transformer))
    adapter.inject(transformer, lora, seed=0)
    ranks = {
        name.rpartition(".")[0]: p.shape[0] for name, p in adapter.parameters(transformer).items() if name[-1] == "A"
    }
    assert ranks == {name: lora_layers.rank_of(lora, name) for name in wanted} and len(ranks) > 0
    assert ("proj_out" in ranks) == (text == "proj_out"), "the last layer of all has this name too"


@pytest.fixture(scope="module")
def mixed(cpu, world, tmp_path_factory):
    """Four steps with two ranks and four learning rates."""
    output = tmp_path_factory.mktemp("mixed") / "run"
    assert train(world.config(output, **RUN)) == 0
    return output


def tensors(output):
    return load_file(output / LORA)


def test_only_the_chosen_layers_are_trained_each_with_its_rank(mixed):
    found = tensors(mixed)
    assert {name: value.shape[0] for name, value in found.items() if name.endswith("lora_A.weight")} == {
        f"transformer.{Q}.lora_A.weight": 4,
        f"transformer.{OUT}.lora_A.weight": 2,
    }
    assert {float(found[f"transformer.{n}.alpha"]) for n in (Q, OUT)} == {4.0, 2.0}
    assert all(np.abs(value).max() > 0 for value in found.values())
    file = lora_file.read(mixed)
    assert {name: (layer.rank, layer.scale) for name, layer in file.layers.items()} == {Q: (4, 1.0), OUT: (2, 1.0)}
    assert file.metadata["rank_pattern"] == "proj_(mlp|out)=2" and file.problems == ()
    card = (mixed / "README.md").read_text()
    assert "other ranks: `proj_(mlp/out)=2`" in card and "LoRA+ ratio 4" in card and "`single:0`" in card


@pytest.mark.parametrize("format_", ["kohya", "comfyui"])
def test_several_ranks_there_and_back_in_every_format(mixed, tmp_path, format_):
    there = tmp_path / "there.safetensors"
    there.write_bytes(to_bytes(*convert.convert(lora_file.read(mixed), format_)))
    back, _ = convert.convert(lora_file.read(there), "diffusers")
    own = tensors(mixed)
    assert back.keys() == own.keys() and all(np.array_equal(back[name], value) for name, value in own.items())
    for name, layer in convert.parts(lora_file.read(there)).items():
        np.testing.assert_array_equal(layer.delta(), lora_file.read(mixed).layers[name].delta())


def test_a_resume_with_ranks_and_rates_is_exact(mixed, world, tmp_path):
    more = world.config(tmp_path / "run", **RUN, resume_from_checkpoint=str(mixed / "checkpoint-2"))
    assert train(more) == 0
    assert lora_bytes(tmp_path / "run") == lora_bytes(mixed)
    state = "checkpoint-4/optimizer.safetensors"
    assert (tmp_path / "run" / state).read_bytes() == (mixed / state).read_bytes()


def test_factors_are_on_the_learning_rate(mixed, world, tmp_path):
    """AdamW's first step is the learning rate, whatever the gradient: for B 4 times that, for to_q 3 times."""
    changes = {"max_train_steps": 1, "checkpointing_steps": 1000, "learning_rate": 1e-5}
    assert train(world.config(tmp_path / "run", **RUN | changes)) == 0
    found = tensors(tmp_path / "run")
    up = {name: np.abs(found[f"transformer.{name}.lora_B.weight"]).max() for name in (Q, OUT)}
    assert up[Q] == pytest.approx(3 * 4 * 1e-5, rel=1e-3) and up[OUT] == pytest.approx(4 * 1e-5, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora_rank_pattern": ("proj_out=3",)}, f"--lora_rank_pattern: the weights of {OUT} in .* are of rank 2"),
        (
            {"lora_layers": "attn.to_q,single:0", "lora_rank_pattern": ()},
            f"--lora_layers: .* has weights for {OUT} too",
        ),
        ({"lora_layers": "attn.to_q,proj_out,single:0,double:0"}, "--lora_layers: .* has no weights for double:0"),
        ({"loraplus_ratio": 8.0}, "loraplus_ratio: 4.0 in the checkpoint, 8.0 now"),
        ({"lora_lr_pattern": ("attn.to_q=2",)}, "lora_lr_pattern: .*=3.* in the checkpoint, .*=2.* now"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(mixed, world, tmp_path, changes, text):
    allowed = tuple(name for name in changes if name in ("lora_layers", "lora_rank_pattern"))
    settings = RUN | changes | {"allow_changed": allowed, "resume_from_checkpoint": str(mixed / "checkpoint-2")}
    with pytest.raises(UserError) as caught:
        train(world.config(tmp_path / "run", **settings))
    assert re.search(text, str(caught.value))


# --- a LoRA to start from ----------------------------------------------------------------------------------------


def warm(world, output, file, **changes):
    """The settings of a run that starts from the file, as the program resolves them."""
    given = {"lora_dropout": 0.1, "gradient_accumulation_steps": 2, "checkpointing_steps": 2, **changes}
    config = world.config(output, **given | {"init_lora": str(file)})
    return init_lora.taken_over(config, init_lora.read(config), changes)


@pytest.fixture(scope="module")
def started(mixed, world, tmp_path_factory):
    """Two steps, then two more, from the run with two ranks."""
    output = tmp_path_factory.mktemp("started") / "run"
    config = warm(world, output, mixed)
    assert config.lora.rank in (2, 4) and len(config.lora.lora_rank_pattern) == 1
    assert init_lora.problems(config, init_lora.read(config)) == []
    assert train(config) == 0
    return output


def test_a_run_starts_from_the_files_weights(mixed, world, tmp_path):
    """At a rate that moves nothing, the file comes out again."""
    config = warm(world, tmp_path / "run", mixed, learning_rate=1e-30, adam_weight_decay=0.0, max_train_steps=1)
    assert train(config) == 0
    old, new = tensors(mixed), tensors(tmp_path / "run")
    assert old.keys() == new.keys() and all(np.array_equal(new[name], value) for name, value in old.items())


def test_the_start_is_noted(mixed, started):
    content = init_lora.fingerprint(dataclasses.replace(_config(mixed)))["init_lora_fingerprint"]
    noted = open_weights(started / LORA).metadata["init_lora"]
    assert noted == f"run, sha256 {content}" and f"| Started from | `{noted}` |" in (started / "README.md").read_text()
    assert "init_lora" not in open_weights(mixed / LORA).metadata
    state = json.loads((started / "checkpoint-2" / "state.json").read_text())
    assert state["fingerprints"]["init_lora_fingerprint"] == content
    losses = [row["loss"] for row in metrics(started) if "loss" in row]
    assert len(losses) == 4


def _config(file):
    from flux_db.settings.schema import from_flat_dict

    needed = {"pretrained_model_name_or_path": "m", "instance_data_dir": "p", "instance_prompt": "a dog"}
    return from_flat_dict({**needed, "init_lora": str(file)})


def test_a_resume_after_a_warm_start_is_exact(mixed, started, world, tmp_path):
    more = warm(world, tmp_path / "run", mixed, resume_from_checkpoint=str(started / "checkpoint-2"))
    assert train(more) == 0
    assert lora_bytes(tmp_path / "run") == lora_bytes(started)


def test_a_resume_with_another_start_is_refused(mixed, started, world, tmp_path):
    checkpoint = str(started / "checkpoint-2")
    other = warm(world, tmp_path / "run", mixed / "checkpoint-2", resume_from_checkpoint=checkpoint)
    with pytest.raises(UserError, match="these change the result") as caught:
        train(other)
    assert "init_lora: " in str(caught.value)
    none = dataclasses.replace(other, lora=dataclasses.replace(other.lora, init_lora=None))
    with pytest.raises(UserError, match="these change the result") as caught:
        train(none)
    assert "init_lora: " in str(caught.value)
