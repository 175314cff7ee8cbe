"""Does this machine compute what diffusers on torch computes? The golden comparison, as a table of numbers."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.amp import DynamicLossScaler

from flux_db import encode, flow, golden, lora, models, optim
from flux_db.build import step_settings
from flux_db.config import Config, OptimConfig, from_flat_dict
from flux_db.console import stage
from flux_db.golden import Reference
from flux_db.runtime import DTYPES, Runtime
from flux_db.sample import Request, Sampler, SampleSettings
from flux_db.train_step import TrainStepForFluxDevDB

EXACT = 0.0

# How far a quantity may be from torch's float32 result, by the precision of what computes it. See README, "Parity".
TOLERANCES: dict[str, dict[str, float]] = {
    # quantity: measure | float32 | fp16 | bf16
    "inputs drawn": {},
    "token ids": {},
    "position ids, packing": {},
    "timesteps, sigmas": {},
    "parameter names": {},
    "LoRA file keys": {},
    "timestep densities": {"no": 1e-6, "fp16": 1e-6, "bf16": 1e-6},
    "learning rates": {"no": 1e-7, "fp16": 1e-7, "bf16": 1e-7},
    "CLIP pooled": {"no": 1e-5, "fp16": 1e-5, "bf16": 1e-1},
    "T5": {"no": 2e-4, "fp16": 2e-4, "bf16": 2e-1},
    "VAE moments": {"no": 2e-5, "fp16": 2e-5, "bf16": 2e-5},
    "VAE decoded": {"no": 5e-5, "fp16": 5e-5, "bf16": 5e-5},
    "transformer": {"no": 5e-4, "fp16": 2e-2, "bf16": 2e-1},
    "transformer, no guidance": {"no": 5e-4, "fp16": 2e-2, "bf16": 2e-1},
    "transformer with LoRA": {"no": 5e-4, "fp16": 2e-2, "bf16": 2e-1},
    "loss, 20 cases": {"no": 1e-5, "fp16": 1e-3, "bf16": 1e-2},
    "LoRA gradients": {"no": 5e-4, "fp16": 3e-2, "bf16": 2.5e-1},
    "gradient norm, 20 steps": {"no": 1e-4, "fp16": 5e-3, "bf16": 4e-2},
    "AdamW loss, 20 steps": {"no": 1e-5, "fp16": 1e-3, "bf16": 1e-2},
    "picture, 4 steps": {"no": 2e-4, "fp16": 2e-2, "bf16": 2e-1},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    quantity: str
    tolerance: float
    measured: float

    @property
    def passed(self) -> bool:
        return bool(self.measured <= self.tolerance)  # not for NaN


def compare(runtime: Runtime, precision: str) -> Iterator[Row]:
    """Compute everything with MindSpore; a row of the table as soon as it is known."""
    reference = golden.read()
    with tempfile.TemporaryDirectory(prefix="flux_db-selftest-") as folder:
        dev, schnell = golden.write_models(Path(folder))
        for measure in (
            lambda: _tables(reference, dev),
            lambda: _encoders(reference, dev, precision),
            lambda: _losses(reference, runtime, dev, schnell),
            lambda: _lora(reference, runtime, dev, precision),
        ):
            for quantity, measured in measure():
                tolerance = TOLERANCES[quantity].get(precision, EXACT)
                yield Row(quantity=quantity, tolerance=tolerance, measured=float(measured))


Measured = Iterator[tuple[str, float]]


# --- measures ----------------------------------------------------------------------------------------------------


def _differing(got: Any, wanted: Any) -> int:
    """How many entries are not equal; all, if the shapes differ."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    return int((got != wanted).sum()) if got.shape == wanted.shape else max(got.size, wanted.size)


def _furthest(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - wanted).max())


def _furthest_relative(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) / wanted - 1.0).max())


# --- numbers that need no model ----------------------------------------------------------------------------------


def _tables(reference: Reference, model: Path) -> Measured:
    arrays = reference.arrays
    clip_tokenizer, t5_tokenizer = models.load_tokenizers(model)
    clip = [encode.token_ids(clip_tokenizer, prompt, 77, "CLIP") for prompt in golden.PROMPTS]
    t5 = [encode.token_ids(t5_tokenizer, prompt, golden.TEXT_LENGTH, "") for prompt in golden.PROMPTS]
    wrong = _differing(np.concatenate(clip), arrays["ids.clip"]) + _differing(np.concatenate(t5), arrays["ids.t5"])
    yield "token ids", wrong

    packed = flow.pack(Tensor(golden.latents())).asnumpy()
    wrong = _differing(packed, arrays["packed"])
    yield "position ids, packing", wrong + _differing(flow.image_position_ids(12, 8), arrays["position_ids"])

    sigmas, timesteps = models.training_table(model)
    wrong = _differing(sigmas, arrays["training.sigmas"][: len(sigmas)])
    wrong += _differing(timesteps, arrays["training.timesteps"] / np.float32(1000))
    for steps, tokens in golden.SAMPLINGS:
        table = _sampling_table(model, steps, tokens)
        wrong += sum(_differing(v, arrays[f"sampling.{steps}.{tokens}.{name}"]) for name, v in table.items())
    yield "timesteps, sigmas", wrong

    yield "timestep densities", max(_density_error(reference, scheme) for scheme in golden.SCHEMES)

    base = golden.OPTIMIZER["learning_rate"]
    errors = []
    for settings in golden.SCHEDULES:
        config = OptimConfig(learning_rate=base, **settings)
        total = golden.SCHEDULE_STEPS
        rates = np.array([optim.learning_rate(config, step, total) for step in range(total)])
        errors.append(_furthest(rates, arrays[f"schedule.{config.lr_scheduler}"]) / base)
    yield "learning rates", max(errors)


def _sampling_table(model: Path, steps: int, tokens: int) -> dict[str, np.ndarray]:
    from mindone.diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

    scheduler = models.load_scheduler(model)
    c = scheduler.config
    mu = calculate_shift(tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
    retrieve_timesteps(scheduler, steps, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return {"sigmas": scheduler.sigmas.asnumpy(), "timesteps": scheduler.timesteps.asnumpy()}


def _density_error(reference: Reference, scheme: str) -> float:
    """Our density on torch's raw random numbers."""
    part = reference.part(f"density.{scheme}.")
    found = []
    for raw in part["raw"]:
        given = SimpleNamespace(normal=lambda mean, std, raw=raw: raw, random=lambda raw=raw: raw)
        found.append(flow.timestep_fraction(given, scheme, **golden.DENSITY))
    return _furthest(np.array(found), part["u"])


# --- encoders ----------------------------------------------------------------------------------------------------


class _Method(nn.Cell):
    """One method of a model, compiled."""

    def __init__(self, model: nn.Cell, method: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def construct(self, x):
        return self.method(x)[0]


def _encoders(reference: Reference, model: Path, precision: str) -> Measured:
    arrays = reference.arrays
    dtype = DTYPES["bf16" if precision == "bf16" else "no"]
    with stage("Comparing the text encoders and the VAE"):
        clip = models.load_clip(model, dtype)(Tensor(arrays["ids.clip"]))[1].float().asnumpy()
        t5 = models.load_t5(model, dtype)(Tensor(arrays["ids.t5"]), return_dict=False)[0].float().asnumpy()
        vae = models.load_vae(model, models.VAE_DTYPE)
        moments = _Method(vae, vae.encode).set_train(False)(Tensor(golden.pixels())).asnumpy()
        decoded = vae.decode(Tensor(golden.latents()), return_dict=False)[0].asnumpy()
    yield "CLIP pooled", _furthest(clip, arrays["clip"])
    yield "T5", _furthest(t5, arrays["t5"])
    yield "VAE moments", _furthest(moments, arrays["vae.moments"])
    yield "VAE decoded", _furthest(decoded, arrays["vae.decoded"])


# --- the loss ----------------------------------------------------------------------------------------------------


class _Answer(nn.Cell):
    """What the step's transformer answers to a batch, in the step's own words, and the step's loss."""

    def __init__(self, step: TrainStepForFluxDevDB) -> None:
        super().__init__()
        self.step = step

    def construct(self, pictures, eps, noise, index, prompt_embeds, pooled):
        return self.step.forward(pictures, eps, noise, index, prompt_embeds, pooled)[1]


def _settings(model: Path, **changes: Any) -> Config:
    return from_flat_dict(
        {
            "pretrained_model_name_or_path": str(model),
            "instance_data_dir": "",
            "instance_prompt": golden.PROMPTS[0],
            "guidance_scale": golden.GUIDANCE,
            **golden.OPTIMIZER,
            **changes,
        }
    )


def _tensors(batch: Mapping[str, np.ndarray]) -> list[Tensor]:
    return [Tensor(value) for value in batch.values()]


def _answer(transformer: nn.Cell, settings: Any, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """The transformer's output for the noised latents of a batch."""
    index = batch["index"]
    x_0 = flow.latents_from_moments(
        Tensor(batch["pictures"]), Tensor(batch["eps"]), settings.vae_shift, settings.vae_scale
    )
    x_t = flow.add_noise(x_0, Tensor(batch["noise"]), Tensor(settings.sigmas[index]))
    guidance = None
    if settings.guidance_scale is not None:
        guidance = Tensor(np.full(len(index), settings.guidance_scale, np.float32))
    out = transformer(
        hidden_states=flow.pack(x_t).astype(settings.dtype),
        timestep=Tensor(settings.timesteps[index]),
        guidance=guidance,
        pooled_projections=Tensor(batch["pooled"]).astype(settings.dtype),
        encoder_hidden_states=Tensor(batch["prompt_embeds"]).astype(settings.dtype),
        txt_ids=Tensor(np.zeros((golden.TOKENS, 3), np.float32)),
        img_ids=Tensor(flow.image_position_ids(golden.SIDE, golden.SIDE)),
        return_dict=False,
    )[0]
    return out.float().asnumpy()


def _losses(reference: Reference, runtime: Runtime, dev: Path, schnell: Path) -> Measured:
    """Every weighting scheme, with and without prior preservation, on a model with and without guidance."""
    wanted = reference.arrays["losses"]
    errors = []
    quantities = {"dev": "transformer", "schnell": "transformer, no guidance"}
    for model, of_model in zip((dev, schnell), wanted, strict=True):
        # a LoRA in one kind of layer, still without effect: the step wants something to train
        config = _settings(model, rank=golden.RANK, lora_layers="attn.to_q")
        with stage(f"Comparing the transformer and its losses ({model.name})"):
            transformer = models.load_transformer(model, runtime.dtype)
            settings = step_settings(config, runtime, model, prior=False)
            answer = _answer(transformer, settings, golden.batch(0))
            transformer = models.load_transformer(model, runtime.dtype)
            lora.inject(transformer, config.lora, seed=0)
            optimizer = optim.build_optimizer(list(lora.parameters(transformer).values()), config.optim)
            settings = _all_schemes(settings)
            for place, prior in enumerate((None, golden.PRIOR_WEIGHT)):
                settings = dataclasses.replace(settings, prior_loss_weight=prior)
                loss = _Answer(TrainStepForFluxDevDB(transformer, optimizer, settings)).set_train(False)
                found = [float(loss(*_tensors(batch)).asnumpy()) for batch in _scheme_batches(reference)]
                errors.append(_furthest_relative(np.array(found), of_model[:, place]))
        yield quantities[model.name], _furthest(answer, reference.arrays[f"transformer.{model.name}"])
    yield "loss, 20 cases", max(errors)


def _all_schemes(settings: Any) -> Any:
    """The tables of all schemes end to end, so that one compiled graph serves them all: scheme s begins at row s * T."""
    return dataclasses.replace(
        settings,
        sigmas=np.tile(settings.sigmas, len(golden.SCHEMES)),
        timesteps=np.tile(settings.timesteps, len(golden.SCHEMES)),
        weights=np.concatenate([flow.loss_weights(scheme, settings.sigmas) for scheme in golden.SCHEMES]),
    )


def _scheme_batches(reference: Reference) -> Iterator[dict[str, np.ndarray]]:
    for number, scheme in enumerate(golden.SCHEMES):
        u = reference.arrays[f"density.{scheme}.u"][: golden.BATCH]
        index = [flow.timestep_index(float(value), 1000) + 1000 * number for value in u]
        yield golden.batch(0) | {"index": np.array(index, np.int32)}


# --- the LoRA ----------------------------------------------------------------------------------------------------


def _lora(reference: Reference, runtime: Runtime, model: Path, precision: str) -> Measured:
    arrays = reference.arrays
    config = _settings(model, rank=golden.RANK, lora_alpha=golden.ALPHA)
    transformer = models.load_transformer(model, runtime.dtype)
    lora.inject(transformer, config.lora, seed=0)
    keys = {f"transformer.{name}.weight": p.shape for name, p in lora.parameters(transformer).items()}
    weights = golden.lora_weights(keys)
    inputs = golden.digest([*golden.all_inputs(), *(weights[key] for key in sorted(weights))])
    yield "inputs drawn", int(inputs != reference.facts["inputs"])
    names = {name for name, _ in transformer.parameters_and_names()}
    yield "parameter names", len(names ^ set(reference.facts["parameter_names"]))
    tensors = lora.to_state_dict(transformer, config.lora)
    yield "LoRA file keys", len({k for k in tensors if not k.endswith(".alpha")} ^ set(reference.facts["lora_keys"]))

    lora.load_state_dict(transformer, weights)
    settings = step_settings(config, runtime, model, prior=False)
    with stage("Comparing the transformer with LoRA, and a picture"):
        answer = _answer(transformer, settings, golden.batch(0))
        picture = _picture(reference, runtime, model, transformer)
    yield "transformer with LoRA", _furthest(answer, arrays["transformer.lora"])
    yield "picture, 4 steps", _furthest(picture, arrays["picture"])

    with stage("Comparing gradients and 20 steps of training"):
        trained = _train(transformer, config, settings, precision)
    gradients = reference.part("gradient.")
    errors = [_furthest(trained.gradients[key], g) / np.abs(g).max() for key, g in gradients.items()]
    yield "LoRA gradients", max(errors) if trained.gradients.keys() == gradients.keys() else np.inf
    yield "gradient norm, 20 steps", _furthest_relative(trained.norms, arrays["adamw.norm"])
    yield "AdamW loss, 20 steps", _furthest_relative(trained.losses, arrays["adamw.loss"])


def _picture(reference: Reference, runtime: Runtime, model: Path, transformer: nn.Cell) -> np.ndarray:
    request = Request(
        prompt_embeds=reference.arrays["t5"][0],
        pooled_prompt_embeds=reference.arrays["clip"][0],
        seed=golden.SEED,
        number=0,
    )
    settings = SampleSettings(
        height=golden.PIXELS, width=golden.PIXELS, steps=golden.PICTURE_STEPS, guidance=golden.GUIDANCE
    )
    pixels = Sampler(model, transformer, runtime.dtype).pixels([request], settings)[0]
    return np.clip(pixels / 2.0 + 0.5, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class _Trained:
    gradients: dict[str, np.ndarray]
    """Of the first step, by file key."""
    losses: np.ndarray
    norms: np.ndarray


def _train(transformer: nn.Cell, config: Config, settings: Any, precision: str) -> _Trained:
    """The training step as the program runs it. Its first gradient is read from Adam's first moment."""
    parameters = lora.parameters(transformer)
    optimizer = optim.build_optimizer(list(parameters.values()), config.optim)
    # small enough that no step is skipped for an overflow
    scaler = DynamicLossScaler(2.0**10, 2, 2000) if precision == "fp16" else None
    step = TrainStepForFluxDevDB(transformer, optimizer, settings, loss_scaler=scaler).set_train(True)
    lr = np.array(config.optim.learning_rate, np.float32)
    rest = _tensors({"dropout_key": np.zeros(golden.BATCH, np.int32), "lr": lr, "boundary": np.array(True)})
    course = []
    for number in range(golden.STEPS):
        course.append(step(*_tensors(golden.batch(number)), *rest).asnumpy())
        if number == 0:
            clip = min(1.0, config.optim.max_grad_norm / (course[0][1] + 1e-6))
            flat = optimizer.exp_avg.asnumpy() / (1.0 - config.optim.adam_beta1) / clip
    pieces = np.split(flat, optimizer.starts[1:])
    gradients = {
        f"transformer.{name}.weight": piece.reshape(p.shape)
        for (name, p), piece in zip(parameters.items(), pieces, strict=True)
    }
    losses, norms, *_ = np.array(course).T
    return _Trained(gradients=gradients, losses=losses, norms=norms)


# --- the table ---------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Markdown, which reads well on a terminal too."""
    lines = [f"| {'quantity':25} | tolerance | measured | result |", f"|{'-' * 27}|-----------|----------|--------|"]
    lines += [
        f"| {row.quantity:25} | {_number(row.tolerance, 'exact'):9} | {_number(row.measured, '0'):8} "
        f"| {'pass' if row.passed else 'FAIL':6} |"
        for row in rows
    ]
    return "\n".join(lines)


def _number(value: float, zero: str) -> str:
    return zero if value == 0 else f"{value:.1e}"


def run(runtime: Runtime, precision: str) -> int:
    """Print the table; the exit code is 0 if every row passes, otherwise 1."""
    rows = sorted(compare(runtime, precision), key=lambda row: list(TOLERANCES).index(row.quantity))
    print(table(rows))
    failed = [row.quantity for row in rows if not row.passed]
    print(f"{len(rows) - len(failed)} of {len(rows)} pass" + (f"; not: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0
