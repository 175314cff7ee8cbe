"""Differential output preservation: the gate, the loss by the formula, resume, and how a batch is dealt."""

import dataclasses
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from safetensors.numpy import load
from step_formula import ROWS, call, inputs, loss_in_numpy, make, velocity
from world import fill_cache, lora_bytes, metrics, train, without_time

from flux_db.data import encode_cache
from flux_db.data.batches import BatchSource
from flux_db.data.dataset import read_dataset
from flux_db.model import adapter, loading, text_encoder
from flux_db.settings.derived import text_lora
from flux_db.stream import BatchLayout
from flux_db.train_step import TrainStepForFluxDevDB

LAYERS = "attn.to_q,norm.linear"
RUN = {
    "preserve_class": "dog",
    "preserve_weight": 3.0,
    "lora_layers": "single_transformer_blocks.0.attn.to_q",
    "lora_dropout": 0.2,
    "caption_dropout": 0.5,
    "max_train_steps": 4,
    "checkpointing_steps": 2,
}


@pytest.fixture(scope="module")
def base(cpu, world):
    return loading.load_transformer(world.model, ms.float32)


@pytest.fixture
def gated(cpu, world, tmp_path):
    """Transformer with a LoRA that takes part and gates, settings, optimizer."""
    transformer, settings, optimizer, _ = make(cpu, world, tmp_path, layers=LAYERS)
    adapter.add_row_gates(transformer)
    return transformer, dataclasses.replace(settings, preserve_weight=3.0), optimizer


def test_where_the_gate_is_off_is_the_base_bit_for_bit(gated, base):
    """In layers whose input is a row of tokens, and in those whose input is one vector."""
    transformer, settings, _ = gated
    values = inputs(48, 32, rows=3 * ROWS)
    expected = velocity(base, settings, values)
    found = velocity(transformer.set_train(True), settings, values)
    assert found[2 * ROWS :].tobytes() == expected[2 * ROWS :].tobytes()
    assert (found[: 2 * ROWS] != expected[: 2 * ROWS]).mean() > 0.9
    drawn = velocity(transformer.set_train(False), settings, values)
    assert drawn[: 2 * ROWS].tobytes() == found[: 2 * ROWS].tobytes()
    assert (drawn[2 * ROWS :] != expected[2 * ROWS :]).mean() > 0.9, "samples and validation have the LoRA in all rows"


def test_the_gate_of_clip(cpu, world, tmp_path):
    config = world.config(tmp_path, train_text_encoder=True)
    ids = Tensor(np.random.default_rng(3).integers(1, 400, (3, 77)).astype(np.int32))
    clip = loading.load_clip(world.model, ms.float32)
    expected = text_encoder.Pooled(clip)(ids).asnumpy()
    adapter.inject_text_encoder(clip, text_lora(config), seed=0)
    for name, parameter in adapter.parameters(clip).items():
        if name.endswith("lora_B"):
            parameter.set_data(Tensor(np.full(parameter.shape, 0.05, np.float32)))
    adapter.add_row_gates(clip)
    text_encoder.set_training(clip)
    pooled = text_encoder.Pooled(clip)
    found = pooled(ids).asnumpy()
    assert found[2].tobytes() == expected[2].tobytes() and np.abs(found[:2] - expected[:2]).max() > 1e-4
    assert np.abs(pooled.of(ids.asnumpy()[2]) - expected[2]).max() > 1e-4, "drawn with the LoRA"


def test_the_loss_and_its_gradient_are_the_formula(gated, base):
    """MSE(v(x_t, c), target) + w MSE(v(x_t, c'), v_base(x_t, c')); the mask is of the first term only."""
    transformer, settings, optimizer = gated
    both = inputs(48, 32, rows=2 * ROWS)
    texts = ("prompt_embeds", "pooled", "dropout_key")
    rows = {name: value[:ROWS] if value.ndim and name not in texts else value for name, value in both.items()}
    own = {**rows, **{name: both[name][:ROWS] for name in texts}}
    own["mask"] = np.random.default_rng(5).random((ROWS, 1, 4, 4)).astype(np.float32)
    of_class = {**rows, **{name: both[name][ROWS:] for name in texts}}
    answer = velocity(base, settings, of_class)

    def formula():
        subject = loss_in_numpy(settings, own, velocity(transformer, settings, own), np.ones_like)
        return subject + 3.0 * np.mean((velocity(transformer, settings, of_class) - answer) ** 2)

    transformer.set_train(False)
    expected = formula()
    start = optimizer.weights.asnumpy().copy()
    step = TrainStepForFluxDevDB(transformer, optimizer, settings).set_train(True)
    loss, norm, applied, *_ = call(step, {**rows, "mask": own["mask"]})
    assert loss == pytest.approx(expected, rel=2e-6) and applied == 1
    # after the first update the mean is a tenth of the clipped gradient: its slope by differences of the formula
    gradient = optimizer.exp_avg.asnumpy() / 0.1 * max(1.0, float(norm))
    transformer.set_train(False)
    ends = []
    for move in (-1, 1):
        optimizer._put_in_layers(split(optimizer, start + move * 1e-3 * gradient / norm))
        ends.append(formula())
    assert (ends[1] - ends[0]) / 2e-3 == pytest.approx(float(norm), rel=2e-2)


def split(optimizer, vector):
    pieces = np.split(vector.astype(np.float32), optimizer.starts[1:])
    return [piece.reshape(shape) for piece, shape in zip(pieces, optimizer.shapes, strict=True)]


@pytest.fixture(scope="module")
def whole(cpu, world, tmp_path_factory):
    output = tmp_path_factory.mktemp("preserved") / "run"
    config = world.config(output, **RUN, encode_cache_dir=str(output.parent / "cache"))
    fill_cache(config)
    assert train(config) == 0
    return config, output


def test_the_prompts_of_the_class_are_encoded_and_dealt_with_their_pictures(whole, cpu):
    config, _ = whole
    cache = encode_cache.open_cache(config, Path(config.model.pretrained_model_name_or_path))
    dataset, _ = read_dataset(config)

    def batches(**layout):
        source = BatchSource(
            config=config, dataset=dataset, cache=cache, layout=BatchLayout(**layout), latent_shape=(16, 4, 4),
            learning_rates=np.zeros(4, np.float32), sigmas=np.linspace(1.0, 0.001, 1000),
        )  # fmt: skip
        return [source[i] for i in range(4)]

    of_class = cache.read(cache.prompt_file("a photo of dog"))
    (one, *_), (first, second, *_) = batches(batch=2), batches(batch=1, accumulation=2)
    assert one.pictures.shape[0] == one.index.shape[0] == 2
    for name in ("prompt_embeds", "pooled_prompt_embeds", "dropout_key"):
        whole_batch, parts = getattr(one, name), [getattr(part, name) for part in (first, second)]
        assert whole_batch.shape[0] == 4
        np.testing.assert_array_equal(whole_batch[2:], np.concatenate([part[1:] for part in parts]))
        np.testing.assert_array_equal(whole_batch[:2], np.concatenate([part[:1] for part in parts]))
    assert (one.prompt_embeds[2:] == of_class["prompt_embeds"]).all(), "also where the caption is dropped"
    assert len(np.unique(one.dropout_key, axis=0)) == 4


def test_a_resume_is_exact(whole, tmp_path):
    config, output = whole
    start = str(output / "checkpoint-2")
    changed = dataclasses.replace(config.output, output_dir=str(tmp_path / "run"), resume_from_checkpoint=start)
    assert train(dataclasses.replace(config, output=changed)) == 0
    assert lora_bytes(tmp_path / "run") == lora_bytes(output)
    state = "checkpoint-4/optimizer.safetensors"
    assert (tmp_path / "run" / state).read_bytes() == (output / state).read_bytes()
    assert without_time(metrics(tmp_path / "run"))[-1] == without_time(metrics(output))[-1]


@pytest.mark.parametrize("optimizer", ["adamw", "prodigy"])
def test_the_lora_does_not_depend_on_how_a_batch_is_dealt(cpu, world, tmp_path, optimizer):
    found = []
    for batch, accumulation in ((2, 1), (1, 2)):
        config = world.config(
            tmp_path / str(batch), **RUN, encode_cache_dir=str(tmp_path / "cache"), optimizer=optimizer,
            train_batch_size=batch, gradient_accumulation_steps=accumulation, learning_rate=1e-3,
        )  # fmt: skip
        fill_cache(config)
        assert train(config) == 0
        found.append(load(lora_bytes(tmp_path / str(batch))))
    for name, value in found[0].items():
        np.testing.assert_allclose(value, found[1][name], atol=2e-6, err_msg=name)
