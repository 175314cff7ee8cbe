"""The step's loss by the formula in numpy, and that bad gradients never reach the weights."""

import json
import shutil

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import load_file, save_file
from step_formula import ROWS, SIDE, call, inputs, loss_in_numpy, make, velocity

from flux_db.model import adapter, loading, optim
from flux_db.settings.schema import LoraConfig, OptimConfig
from flux_db.train_step import StepSettings, TrainStepForFluxDevDB
from flux_db.training.build import step_settings


@pytest.mark.parametrize(
    ("scheme", "weight_of", "prior", "masked"),
    [
        ("sigma_sqrt", lambda s: s**-2.0, 0.7, False),
        ("cosmap", lambda s: 2 / (np.pi * (1 - 2 * s + 2 * s * s)), None, True),
    ],
)
def test_loss_is_the_formula(cpu, world, tmp_path, scheme, weight_of, prior, masked):
    transformer, settings, optimizer, _ = make(cpu, world, tmp_path, scheme=scheme, prior_loss_weight=prior)
    values = inputs(48, 32)
    if masked:
        values["mask"] = np.random.default_rng(5).random((ROWS, 1, SIDE, SIDE)).astype(np.float32)
    expected = loss_in_numpy(settings, values, velocity(transformer, settings, values), weight_of)
    step = TrainStepForFluxDevDB(transformer, optimizer, settings).set_train(True)
    loss, norm, applied, scale, stop = call(step, values)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert applied == 1 and norm > 0 and scale == 1 and stop == 0
    # the step is a function of its inputs, and it learns: the same batch again has a lower loss
    step.ask_to_stop()
    again = call(step, values)
    assert again[0] < loss and again[4] == 1


@pytest.mark.parametrize(
    ("flags", "error_of", "prior"),
    [
        (
            {"loss": "huber", "huber_delta": 0.2},
            lambda d, s: 2 * 0.2**s * (np.sqrt(d * d + 0.2 ** (2 * s)) - 0.2**s),
            0.7,
        ),
        (
            {"loss": "smooth_l1", "huber_delta": 0.3, "huber_schedule": "constant"},
            lambda d, s: 2 * (np.sqrt(d * d + 0.3**2) - 0.3),
            None,
        ),
    ],
    ids=["huber", "smooth_l1"],
)
def test_robust_loss_is_the_formula(cpu, world, tmp_path, flags, error_of, prior):
    """With masks, weights by scheme and prior preservation, which apply to it as to the squares."""
    transformer, settings, optimizer, _ = make(
        cpu, world, tmp_path, scheme="cosmap", prior_loss_weight=prior, flags=flags
    )
    values = inputs(48, 32)
    values["mask"] = np.random.default_rng(5).random((ROWS, 1, SIDE, SIDE)).astype(np.float32)
    weight_of = lambda s: 2 / (np.pi * (1 - 2 * s + 2 * s * s))  # noqa: E731
    expected = loss_in_numpy(settings, values, velocity(transformer, settings, values), weight_of, error_of)
    step = TrainStepForFluxDevDB(transformer, optimizer, settings).set_train(True)
    loss, norm, applied, *_ = call(step, values)
    assert loss == pytest.approx(expected, rel=1e-6) and applied == 1 and norm > 0
    assert call(step, values)[0] < loss, "it learns"


def test_a_model_without_guidance(cpu, world, tmp_path):
    model = tmp_path / "schnell"
    shutil.copytree(world.model, model)
    file = model / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"guidance_embeds": False}))
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    kept = {name: value for name, value in load_file(weights).items() if "guidance_embedder" not in name}
    save_file(kept, weights, {"format": "pt"})
    settings = step_settings(world.config(tmp_path), cpu, model, prior=False)
    assert settings.guidance_scale is None
    transformer, settings, optimizer, _ = make(cpu, world, tmp_path, model=model, guidance_scale=None)
    values = inputs(48, 32)
    expected = loss_in_numpy(settings, values, velocity(transformer, settings, values), np.ones_like)
    step = TrainStepForFluxDevDB(transformer, optimizer, settings).set_train(True)
    assert call(step, values)[0] == pytest.approx(expected, rel=1e-6)


def snapshot(step):
    return [p.asnumpy().tobytes() for p in (*step.optimizer.parameters, *step.optimizer.state().values())]


@pytest.mark.parametrize("fp16", [False, True], ids=["fp32", "fp16"])
def test_bad_gradients_never_reach_the_weights(cpu, world, tmp_path, fp16):
    dtype = ms.float16 if fp16 else ms.float32
    transformer, settings, optimizer, _ = make(cpu, world, tmp_path, dtype=dtype, accumulation=2)
    scaler = ms.amp.DynamicLossScaler(2.0**10, 2, 1) if fp16 else None
    step = TrainStepForFluxDevDB(transformer, optimizer, settings, loss_scaler=scaler).set_train(True)
    good = inputs(48, 32)
    bad = {
        **good,
        "noise": np.where(np.arange(good["noise"].size).reshape(good["noise"].shape) == 5, np.nan, good["noise"]),
    }
    first, last = {"boundary": np.array(False)}, {"boundary": np.array(True)}

    before = snapshot(step)
    assert call(step, {**bad, **first}).tolist() == [0, 0, 0, 0, 0]
    result = call(step, {**good, **last})
    assert result[2] == 0 and not np.isfinite(result[1])
    assert snapshot(step) == before
    if fp16:
        assert float(scaler.scale_value.asnumpy()) == 2.0**9

    # the window after it is clean again, and its loss is the mean over both micro-steps
    call(step, {**good, **first})
    other = {**inputs(48, 32, seed=1), **last}
    loss, norm, applied, *_ = call(step, other)
    assert applied == 1 and np.isfinite(norm)
    assert snapshot(step) != before
    assert all(np.isfinite(p.asnumpy()).all() for p in optimizer.parameters)
    assert np.isfinite(loss) and loss > 0
    if fp16:
        assert float(scaler.scale_value.asnumpy()) == 2.0**10


def test_clipping_bounds_the_step_and_reports_the_norm_before(cpu):
    """Through a model of one weight: gradient 2 * (w - 3) = -6 at 0."""

    class Line(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w = ms.Parameter(Tensor([0.0], ms.float32), name="w")

        def construct(self, x):
            return self.w * x

    class Step(TrainStepForFluxDevDB):
        def forward(self, pictures, eps, noise, index, prompt_embeds, pooled):
            loss = ((self.model(pictures) - eps) ** 2).sum()
            return self.loss_scaler.scale(loss), loss

    line = Line()
    optimizer = optim.build_optimizer([line.w], OptimConfig(adam_beta1=0.0, adam_weight_decay=0.0))
    table = np.ones(1, np.float32)
    settings = StepSettings(
        sigmas=table, timesteps=table, weights=table, vae_shift=0.0, vae_scale=1.0, guidance_scale=None,
        prior_loss_weight=None, max_grad_norm=0.5,
    )  # fmt: skip
    step = Step(line, optimizer, settings).set_train(True)
    one = np.ones(1, np.float32)
    loss, norm, applied, *_ = step(
        *(Tensor(v) for v in (one, 3 * one, one, one, one, one, one, np.float32(0.1), np.array(True)))
    ).asnumpy()
    assert (loss, norm, applied) == (9.0, 6.0, 1.0)
    assert optimizer.exp_avg.asnumpy()[0] == pytest.approx(-0.5, rel=1e-5)  # clipped from -6
    assert line.w.asnumpy()[0] == pytest.approx(0.1, rel=1e-4)


def test_lora_names_are_the_communitys_and_alpha_travels(cpu, whole_world):
    transformer = loading.load_transformer(whole_world.model, ms.float32)
    config = LoraConfig(rank=4, lora_alpha=8, lora_layers="attn.to_q,ff.net.0.proj")
    adapter.inject(transformer, config, seed=0)
    tensors = adapter.to_state_dict(transformer, config)
    assert tensors["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"].shape == (4, 32)
    assert tensors["transformer.single_transformer_blocks.1.attn.to_q.lora_B.weight"].shape == (32, 4)
    assert tensors["transformer.transformer_blocks.1.ff.net.0.proj.alpha"] == 8
    assert len(tensors) == (2 + 2 + 2) * 3
