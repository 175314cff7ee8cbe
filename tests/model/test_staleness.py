"""A compiled graph must not go on with what was there at its first call: LoRA layers, LoRA weights, noise."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from flux_db.data import batches
from flux_db.model import adapter, flow, loading
from flux_db.settings.schema import LoraConfig
from flux_db.stream import Purpose, generator

CONFIG = LoraConfig(rank=4, lora_layers="attn.to_q")


def answer(transformer):
    rng = np.random.default_rng(0)
    draw = lambda *shape: Tensor(rng.standard_normal(shape).astype(np.float32))  # noqa: E731
    return transformer(
        hidden_states=draw(1, 4, 64),
        timestep=Tensor([0.5], ms.float32),
        guidance=Tensor([1.0], ms.float32),
        pooled_projections=draw(1, 32),
        encoder_hidden_states=draw(1, 8, 48),
        txt_ids=Tensor(np.zeros((8, 3), np.float32)),
        img_ids=Tensor(flow.image_position_ids(4, 4)),
    )[0].asnumpy()


def weights(transformer, seed):
    return {
        f"transformer.{name}.weight": generator(seed, len(name), Purpose.LORA).standard_normal(p.shape, np.float32)
        for name, p in adapter.parameters(transformer).items()
    }


def test_a_lora_added_loaded_or_removed_after_compilation_is_seen(cpu, world):
    transformer = loading.load_transformer(world.model, ms.float32)
    bare = answer(transformer)
    adapter.inject(transformer, CONFIG, seed=0)
    np.testing.assert_allclose(answer(transformer), bare, atol=1e-6)  # B is still zero

    adapter.load_state_dict(transformer, weights(transformer, 1))
    first = answer(transformer)
    assert np.abs(first - bare).max() > 0.1
    adapter.load_state_dict(transformer, weights(transformer, 2))
    second = answer(transformer)
    assert np.abs(second - first).max() > 0.1

    fresh = loading.load_transformer(world.model, ms.float32)
    adapter.inject(fresh, CONFIG, seed=0)
    adapter.load_state_dict(fresh, weights(fresh, 2))
    np.testing.assert_array_equal(answer(fresh), second)

    adapter.remove(transformer)
    np.testing.assert_array_equal(answer(transformer), bare)


@pytest.fixture(scope="module")
def step_and_inputs(cpu, world, tmp_path_factory):
    from test_train_step import inputs, make

    from flux_db.train_step import TrainStepForFluxDevDB

    transformer, settings, optimizer, _ = make(cpu, world, tmp_path_factory.mktemp("run"))
    return TrainStepForFluxDevDB(transformer, optimizer, settings).set_train(True), inputs(48, 32)


def test_the_compiled_step_uses_loaded_weights_and_fresh_noise(step_and_inputs):
    from test_train_step import call

    step, values = step_and_inputs
    still = {**values, "lr": np.array(0.0, np.float32)}
    start = {f"transformer.{name}.weight": p.asnumpy().copy() for name, p in adapter.parameters(step.model).items()}
    loss = call(step, still)[0]
    assert call(step, still)[0] == loss
    other_noise = {**still, "noise": values["noise"][::-1].copy()}
    assert call(step, other_noise)[0] != loss
    # trained on, then back to the start: the compiled step must follow
    call(step, values)
    assert call(step, still)[0] != loss
    adapter.load_state_dict(step.model, start)
    assert call(step, still)[0] == loss


def test_noise_differs_from_step_to_step(cpu, world, tmp_path):
    """As the loop feeds it: no two samples of a run share noise."""
    from flux_db.stream import BatchLayout
    from flux_db.training import build
    from flux_db.training.prepare import prepare

    config = world.config(tmp_path, max_train_steps=6)
    model, cache, dataset, _ = prepare(config, cpu)
    source = batches.BatchSource(
        config=config,
        dataset=dataset,
        cache=cache,
        layout=BatchLayout(batch=1),
        latent_shape=build.latent_shape(config, model),
        learning_rates=np.ones(6, np.float32),
        sigmas=np.linspace(1.0, 0.001, 1000),
    )
    columns = [source[i]._asdict() for i in range(6)]
    for name in ("noise", "eps"):
        assert len({column[name].tobytes() for column in columns}) == 6
    assert len({int(column["index"][0]) for column in columns}) > 1
    assert all(not np.array_equal(column["noise"], column["eps"]) for column in columns)
