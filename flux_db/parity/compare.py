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

from flux_db.console import stage
from flux_db.data import encode, encode_cache
from flux_db.data.timesteps import loss_weights, timestep_fraction, timestep_index
from flux_db.model import adapter, flow, loading, optim, text_encoder
from flux_db.model.optim import SecondPart
from flux_db.model.runtime import DTYPES, Runtime
from flux_db.model.sampler import Request, Sampler, SampleSettings, sampling_schedule
from flux_db.model.text_encoder import Pooled
from flux_db.parity import golden
from flux_db.parity.golden import Reference
from flux_db.settings.derived import text_lora
from flux_db.settings.schema import Config, OptimConfig, from_flat_dict
from flux_db.size import Size
from flux_db.stream import DROPOUT_NUMBERS
from flux_db.train_step import StepSettings, TrainStepForFluxDevDB
from flux_db.training.build import step_settings

EXACT = 0.0

# How far MindSpore in float32 may be from torch in float32, on the CPU. What is not listed has to be equal.
FLOAT32: dict[str, float] = {
    "timestep densities": 1e-6,
    "learning rates": 1e-7,
    "CLIP pooled": 1e-5,
    "T5": 2e-4,
    "VAE moments": 2e-5,
    "VAE decoded": 5e-5,
    "transformer": 5e-4,
    "transformer, no guidance": 5e-4,
    "transformer with LoRA": 5e-4,
    "loss, 20 cases": 1e-5,
    "transformer, head size 128": 5e-4,
    "LoRA gradients": 5e-4,
    "LoRA gradients, head size 128": 5e-4,
    "gradient norm, 20 steps": 1e-4,
    "AdamW loss, 20 steps": 1e-5,
    "picture, 4 steps": 2e-4,
    "CLIP pooled with LoRA": 1e-5,
    "LoRA gradients, CLIP": 5e-4,
    "gradient norm, CLIP trained": 1e-4,
    "AdamW loss, CLIP trained": 1e-5,
    "picture, LoRA of CLIP": 2e-4,
}
# In half precision torch itself is some way from what float32 arithmetic gives with the same rounded weights; the
# reference files hold how far. Another order of roundings ends as far off in another direction: so many times that
# distance is allowed.
MARGIN = 3.0

TEXT_ENCODERS = {"CLIP pooled", "T5", "CLIP pooled with LoRA"}
VAE = {"VAE moments", "VAE decoded"}


def tolerance(quantity: str, reference: Reference, device: str, precision: str) -> float:
    if quantity in TEXT_ENCODERS:
        computed_in = "bf16" if precision == "bf16" else "no"  # T5 overflows in fp16
    elif quantity in VAE:
        # float32 everywhere, but Ascend's convolutions round their inputs to HF32: as many digits as fp16
        computed_in = "fp16" if device == "Ascend" else "no"
    elif quantity in reference.facts["drift"]["fp16"]:
        # Ascend's flash attention computes in half precision also for float32 inputs
        computed_in = "fp16" if device == "Ascend" and precision == "no" else precision
    else:
        computed_in = "no"
    if computed_in == "no":
        return FLOAT32.get(quantity, EXACT)
    return MARGIN * reference.facts["drift"][computed_in][quantity]


@dataclass(frozen=True, kw_only=True)
class Row:
    quantity: str
    tolerance: float
    measured: float

    @property
    def passed(self) -> bool:
        return bool(self.measured <= self.tolerance)  # not for NaN


def compare(runtime: Runtime, precision: str) -> list[Row]:
    """Compute everything with MindSpore and measure it against the reference."""
    reference = golden.read()
    with tempfile.TemporaryDirectory(prefix="flux_db-selftest-") as folder:
        dev, schnell, wide = golden.write_models(Path(folder))
        measured = _tables(reference, dev)
        arrays: Arrays = {}
        with stage("Computing with the text encoders and the VAE"):
            arrays |= _encoders(reference, dev, precision)
        for model in (dev, schnell):
            with stage(f"Computing answers and losses of the {model.name} transformer"):
                arrays |= _answer_and_losses(reference, runtime, model)
        arrays["losses"] = np.stack([arrays.pop("losses.dev"), arrays.pop("losses.schnell")])
        adapted, config = _with_lora(runtime, dev)
        measured |= _names(reference, adapted, config)
        with stage("Computing with a LoRA, and drawing a picture"):
            arrays |= _answer_and_picture(reference, runtime, adapted, config)
        with stage(f"Computing {golden.STEPS} steps of training"):
            arrays |= _train(runtime, adapted, config, precision)
        with stage(f"Computing {golden.STEPS} steps of training with CLIP, and drawing a picture"):
            arrays |= _with_clip(reference, runtime, dev, precision)
        with stage("Computing with heads of size 128"):
            arrays |= _wide(runtime, wide, precision)
    measured |= golden.distances(arrays, reference.rounded_to(precision))
    return [
        Row(
            quantity=quantity,
            tolerance=tolerance(quantity, reference, runtime.device, precision),
            measured=float(value),
        )
        for quantity, value in measured.items()
    ]


Arrays = dict[str, np.ndarray]
Measured = dict[str, float]


def _differing(got: Any, wanted: Any) -> int:
    """How many entries are not equal; all, if the shapes differ."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    return int((got != wanted).sum()) if got.shape == wanted.shape else max(got.size, wanted.size)


# --- numbers that need no model ----------------------------------------------------------------------------------


def _tables(reference: Reference, model: Path) -> Measured:
    return {
        "token ids": _wrong_token_ids(reference, model),
        "position ids, packing": _differing(flow.image_position_ids(12, 8), reference.arrays["position_ids"])
        + _differing(flow.pack(Tensor(golden.latents())).asnumpy(), reference.arrays["packed"]),
        "timesteps, sigmas": _wrong_noise_levels(reference, model),
        "timestep densities": max(_density_error(reference, scheme) for scheme in golden.SCHEMES),
        "learning rates": max(_schedule_error(reference, settings) for settings in golden.SCHEDULES),
    }


def _wrong_token_ids(reference: Reference, model: Path) -> int:
    clip, t5 = loading.load_tokenizers(model)
    clip_ids = encode.token_ids(clip, golden.PROMPTS, 77, "CLIP")
    t5_ids = encode.token_ids(t5, golden.PROMPTS, golden.TEXT_LENGTH, "")
    return _differing(clip_ids, reference.arrays["ids.clip"]) + _differing(t5_ids, reference.arrays["ids.t5"])


def _wrong_noise_levels(reference: Reference, model: Path) -> int:
    arrays = reference.arrays
    sigmas, timesteps = loading.training_table(model)
    wrong = _differing(sigmas, arrays["training.sigmas"][: len(sigmas)])
    wrong += _differing(timesteps, arrays["training.timesteps"] / np.float32(1000))
    for steps, tokens in golden.SAMPLINGS:
        table = _sampling_table(model, steps, tokens)
        wrong += sum(_differing(v, arrays[f"sampling.{steps}.{tokens}.{name}"]) for name, v in table.items())
    return wrong


def _schedule_error(reference: Reference, settings: Mapping[str, Any]) -> float:
    """Relative to the rate after warm-up."""
    base, total = golden.OPTIMIZER["learning_rate"], golden.SCHEDULE_STEPS
    config = OptimConfig(learning_rate=base, **settings)
    rates = np.array([optim.learning_rate(config, step, total) for step in range(total)])
    return golden.max_abs_error(rates, reference.arrays[f"schedule.{config.lr_scheduler}"]) / base


def _sampling_table(model: Path, steps: int, tokens: int) -> dict[str, np.ndarray]:
    timesteps, sigmas = sampling_schedule(loading.load_scheduler(model), steps, tokens)
    return {"sigmas": sigmas, "timesteps": timesteps}


def _density_error(reference: Reference, scheme: str) -> float:
    """Our density on torch's raw random numbers."""
    part = reference.part(f"density.{scheme}.")
    found = []
    for raw in part["raw"]:
        given = SimpleNamespace(normal=lambda mean, std, raw=raw: raw, random=lambda raw=raw: raw)
        found.append(timestep_fraction(given, scheme, **golden.DENSITY))
    return golden.max_abs_error(np.array(found), part["u"])


# --- encoders ----------------------------------------------------------------------------------------------------


class _Method(nn.Cell):
    """One method of a model, compiled."""

    def __init__(self, model: nn.Cell, method: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def construct(self, x):
        return self.method(x)[0]


def _encoders(reference: Reference, model: Path, precision: str) -> Arrays:
    dtype = DTYPES["bf16" if precision == "bf16" else "no"]
    clip_ids, t5_ids = (Tensor(reference.arrays[name]) for name in ("ids.clip", "ids.t5"))
    vae = loading.load_vae(model, loading.VAE_DTYPE)
    return {
        "clip": loading.load_clip(model, dtype)(clip_ids)[1].float().asnumpy(),
        "t5": loading.load_t5(model, dtype)(t5_ids, return_dict=False)[0].float().asnumpy(),
        "vae.moments": _Method(vae, vae.encode).set_train(False)(Tensor(golden.pixels())).asnumpy(),
        "vae.decoded": vae.decode(Tensor(golden.latents()), return_dict=False)[0].asnumpy(),
    }


# --- the loss ----------------------------------------------------------------------------------------------------


class _Loss(nn.Cell):
    """The training step's loss alone, compiled."""

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


def answer_of(transformer: nn.Cell, settings: StepSettings, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """The transformer's output for the noised latents of a batch."""
    index, (height, width) = batch["index"], batch["pictures"].shape[-2:]
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
        txt_ids=Tensor(np.zeros((batch["prompt_embeds"].shape[1], 3), np.float32)),
        img_ids=Tensor(flow.image_position_ids(height, width)),
        return_dict=False,
    )[0]
    return out.float().asnumpy()


def _answer_and_losses(reference: Reference, runtime: Runtime, model: Path) -> Arrays:
    """What the transformer answers; and the loss by scheme, without and with prior preservation: [scheme, prior]"""
    config = _settings(model, rank=golden.RANK, lora_layers="attn.to_q")
    settings = step_settings(config, runtime, model, prior=False)
    answer = answer_of(loading.load_transformer(model, runtime.dtype), settings, golden.batch(0))
    # a fresh LoRA has no effect yet: the step only wants something to train
    transformer = loading.load_transformer(model, runtime.dtype)
    adapter.inject(transformer, config.lora, seed=0, dtype=runtime.dtype)
    optimizer = optim.build_optimizer(list(adapter.parameters(transformer).values()), config.optim)
    columns = []
    for prior in (None, golden.PRIOR_WEIGHT):
        changed = dataclasses.replace(_all_schemes(settings), prior_loss_weight=prior)
        loss = _Loss(TrainStepForFluxDevDB(transformer, optimizer, changed)).set_train(False)
        columns.append([float(loss(*_tensors(batch)).asnumpy()) for batch in _scheme_batches(reference)])
    return {f"transformer.{model.name}": answer, f"losses.{model.name}": np.array(columns).T}


def _all_schemes(settings: StepSettings) -> StepSettings:
    """The tables of all schemes end to end, so that one compiled graph serves them all. Scheme s starts at s * T."""
    return dataclasses.replace(
        settings,
        sigmas=np.tile(settings.sigmas, len(golden.SCHEMES)),
        timesteps=np.tile(settings.timesteps, len(golden.SCHEMES)),
        weights=np.concatenate([loss_weights(scheme, settings.sigmas) for scheme in golden.SCHEMES]),
    )


def _scheme_batches(reference: Reference) -> Iterator[dict[str, np.ndarray]]:
    for number, scheme in enumerate(golden.SCHEMES):
        u = reference.arrays[f"density.{scheme}.u"][: golden.BATCH]
        index = [timestep_index(float(value), 1000) + 1000 * number for value in u]
        yield golden.batch(0) | {"index": np.array(index, np.int32)}


# --- the LoRA ----------------------------------------------------------------------------------------------------


def _with_lora(runtime: Runtime, model: Path, changes: Mapping[str, Any] | None = None) -> tuple[nn.Cell, Config]:
    """The transformer with the reference's LoRA in the default layers."""
    precision = {dtype: name for name, dtype in DTYPES.items()}[runtime.dtype]
    config = _settings(model, rank=golden.RANK, lora_alpha=golden.ALPHA, mixed_precision=precision, **(changes or {}))
    transformer = loading.load_transformer(model, runtime.dtype)
    adapter.inject(transformer, config.lora, seed=0, dtype=runtime.dtype)
    adapter.load_state_dict(transformer, _lora_weights(transformer))
    return transformer, config


def _lora_weights(network: nn.Cell, prefix: str = adapter.TRANSFORMER) -> Arrays:
    return golden.lora_weights({_key(name, prefix): p.shape for name, p in adapter.parameters(network).items()})


def _key(name: str, prefix: str = adapter.TRANSFORMER) -> str:
    return f"{prefix}.{name}.weight"


def _names(reference: Reference, transformer: nn.Cell, config: Config) -> Measured:
    weights = _lora_weights(transformer)
    inputs = golden.digest([*golden.all_inputs(), *(weights[key] for key in sorted(weights))])
    names = {name for name, _ in transformer.parameters_and_names()}
    keys = {key for key in adapter.to_state_dict(transformer, config.lora) if not key.endswith(".alpha")}
    return {
        "inputs drawn": int(inputs != reference.facts["inputs"]),
        "parameter names": len(names ^ set(reference.facts["parameter_names"])),
        "LoRA file keys": len(keys ^ set(reference.facts["lora_keys"])),
    }


def _with_clip(reference: Reference, runtime: Runtime, model: Path, precision: str) -> Arrays:
    """Both LoRAs: CLIP's vectors, a picture with them, and the training of both."""
    transformer, config = _with_lora(runtime, model, golden.TEXT_ENCODER)
    text_dtype = DTYPES[encode_cache.text_precision(config)]
    clip, weights = _clip_with_lora(config, model, text_dtype, text_dtype)
    pooled = np.stack([Pooled(clip).of(ids) for ids in reference.arrays["ids.clip"]])
    picture = _picture(reference, runtime, transformer, config, pooled[0])
    # trained as the program does it: the LoRA in the transformer's precision
    clip, weights = _clip_with_lora(config, model, text_dtype, runtime.dtype)
    if sorted(weights) != reference.facts["text_lora_keys"]:
        raise ValueError("the LoRA of CLIP has other keys than diffusers'")
    ids = golden.token_rows(reference.arrays["ids.clip"])
    trained = _train(runtime, transformer, config, precision, clip=clip, ids=ids)
    return {"clip.lora": pooled, "clip.picture": picture, **{f"clip.{name}": value for name, value in trained.items()}}


def _clip_with_lora(config: Config, model: Path, dtype: ms.Type, lora_dtype: ms.Type) -> tuple[nn.Cell, Arrays]:
    clip = loading.load_clip(model, dtype)
    adapter.inject_text_encoder(clip, text_lora(config), seed=0, dtype=lora_dtype)
    weights = _lora_weights(clip, adapter.TEXT_ENCODER)
    adapter.load_state_dict(clip, weights, adapter.TEXT_ENCODER)
    return clip, weights


def _answer_and_picture(reference: Reference, runtime: Runtime, transformer: nn.Cell, config: Config) -> Arrays:
    model = Path(config.model.pretrained_model_name_or_path)
    answer = answer_of(transformer, step_settings(config, runtime, model, prior=False), golden.batch(0))
    picture = _picture(reference, runtime, transformer, config, reference.arrays["clip"][0])
    return {"transformer.lora": answer, "picture": picture}


def _picture(
    reference: Reference, runtime: Runtime, transformer: nn.Cell, config: Config, pooled: np.ndarray
) -> np.ndarray:
    request = Request(prompt_embeds=reference.arrays["t5"][0], pooled_prompt_embeds=pooled, seed=golden.SEED, number=0)
    settings = SampleSettings(size=Size.square(golden.PIXELS), steps=golden.PICTURE_STEPS, guidance=golden.GUIDANCE)
    model = Path(config.model.pretrained_model_name_or_path)
    pixels = Sampler(model, transformer, runtime.dtype).pixels([request], settings)[0]
    return np.clip(pixels / 2.0 + 0.5, 0.0, 1.0)


def _wide(runtime: Runtime, model: Path, precision: str) -> Arrays:
    transformer, config = _with_lora(runtime, model)
    answer = answer_of(transformer, step_settings(config, runtime, model, prior=False), golden.batch(0))
    trained = _train(runtime, transformer, config, precision, steps=1)
    gradients = {f"wide_{name}": value for name, value in trained.items() if name.startswith("gradient.")}
    return {"transformer.wide": answer, **gradients}


def _train(
    runtime: Runtime,
    transformer: nn.Cell,
    config: Config,
    precision: str,
    steps: int = golden.STEPS,
    *,
    clip: nn.Cell | None = None,
    ids: np.ndarray | None = None,
) -> Arrays:
    """The training step as the program runs it. Its first gradient is read from Adam's first moment.

    `clip`: trained too, on batches with these token ids in the place of its vectors.
    """
    parameters = {_key(name): p for name, p in adapter.parameters(transformer).items()}
    values = list(_lora_weights(transformer).values())
    second = None
    if clip is not None:
        own = {_key(name, adapter.TEXT_ENCODER): p for name, p in adapter.parameters(clip).items()}
        second = SecondPart(len(own), config.text_encoder.adam_weight_decay_text_encoder)
        parameters |= own
        values += list(_lora_weights(clip, adapter.TEXT_ENCODER).values())
    optimizer = optim.build_optimizer(list(parameters.values()), config.optim, values, second)
    settings = step_settings(config, runtime, Path(config.model.pretrained_model_name_or_path), prior=False)
    # small enough that no step is skipped for an overflow
    scaler = DynamicLossScaler(2.0**10, 2, 2000) if precision == "fp16" else None
    step = TrainStepForFluxDevDB(transformer, optimizer, settings, text_encoder=clip, loss_scaler=scaler)
    step.set_train(True)
    if clip is not None:
        text_encoder.set_training(clip)
    lr = optim.learning_rates(config.optim, steps, 1.0, None if clip is None else config.text_encoder)[0]
    text = {} if ids is None else {"pooled": ids}
    key = np.zeros((golden.BATCH, DROPOUT_NUMBERS), np.float32)
    rest = _tensors({"dropout_key": key, "lr": lr, "boundary": np.array(True)})
    course = [step(*_tensors(golden.batch(0) | text), *rest).asnumpy()]
    clip = min(1.0, config.optim.max_grad_norm / (course[0][1] + 1e-6))
    first = optimizer.exp_avg.asnumpy() / (1.0 - config.optim.adam_beta1) / clip
    gradients = np.split(first, optimizer.starts[1:])
    course += [step(*_tensors(golden.batch(number) | text), *rest).asnumpy() for number in range(1, steps)]
    losses, norms, *_ = np.array(course).T
    named = zip(parameters.items(), gradients, strict=True)
    return {
        **{f"gradient.{key}": gradient.reshape(p.shape) for (key, p), gradient in named},
        "adamw.loss": losses,
        "adamw.norm": norms,
    }


# --- the table ---------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Markdown, which reads well on a terminal too."""
    lines = [f"| {'quantity':29} | tolerance | measured | result |", f"|{'-' * 31}|-----------|----------|--------|"]
    lines += [
        f"| {row.quantity:29} | {_number(row.tolerance, 'exact'):9} | {_number(row.measured, '0'):8} "
        f"| {'pass' if row.passed else 'FAIL':6} |"
        for row in rows
    ]
    return "\n".join(lines)


def _number(value: float, zero: str) -> str:
    return zero if value == 0 else f"{value:.1e}"


def run(runtime: Runtime, precision: str) -> int:
    """Print the table; the exit code is 0 if every row passes, otherwise 1."""
    rows = compare(runtime, precision)
    print(table(rows))
    failed = [row.quantity for row in rows if not row.passed]
    print(f"{len(rows) - len(failed)} of {len(rows)} pass" + (f"; not: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0
