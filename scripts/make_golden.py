"""Make flux_db/parity/reference: what diffusers on torch computes with the tiny model from fixed inputs.

Runs in an environment with the `interop` extra: `bash scripts/test.sh --interop` makes one in .venv-interop.
    PYTHONPATH=. .venv-interop/bin/python scripts/make_golden.py [FOLDER]
The same versions on the same processor give the same bytes; another processor may differ in the last bits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch_reference as reference  # first: it decides how torch computes

# isort: split
import torch
from diffusers import FluxPipeline
from diffusers.optimization import get_scheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from diffusers.training_utils import compute_density_for_timestep_sampling
from safetensors.numpy import save
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from flux_db.parity import golden
from flux_db.settings.schema import DEFAULT_LAYERS, TEXT_ENCODER_LAYERS

Arrays = dict[str, np.ndarray]


def main(folder: Path) -> None:
    reference.start()
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        models = dev, _, _ = golden.write_models(Path(temporary))
        arrays = {**scheduler_tables(dev), **densities(), **schedules()}
        arrays |= token_ids(dev)
        arrays |= encoders(dev, arrays, torch.float32)
        found, facts = transformers(*models, arrays)
        arrays |= found
        drift = {}
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            half, _ = transformers(*models, arrays, dtype)
            wanted, _ = transformers(*models, arrays, torch.float32, dtype)
            drift[name] = golden.distances(half, wanted) | golden.distances(encoders(dev, arrays, dtype), arrays)
            arrays |= {f"{name}/{key}": value for key, value in wanted.items()}
    about = {"versions": reference.versions(), "processor": golden.processor()}
    write(folder, arrays, {**about, "drift": drift, **facts})


def transformers(dev: Path, schnell: Path, wide: Path, arrays: Arrays, *precision: torch.dtype) -> tuple[Arrays, dict]:
    """Everything that the transformer takes part in. `precision`: the arguments of Trainee."""
    found = losses(dev, schnell, arrays, *precision)
    trainee, _ = with_lora(wide, *precision)
    found["transformer.wide"] = answer(trainee)
    found |= {f"wide_gradient.{name}": value for name, value in first_gradients(trainee).items()}
    trainee, weights = with_lora(dev, *precision)
    found["transformer.lora"] = answer(trainee)
    found["picture"] = picture(dev, trainee, arrays)
    text, text_keys = text_encoder(dev, arrays, *precision)
    facts = {
        "text_lora_keys": text_keys,
        "inputs": golden.digest([*golden.all_inputs(), *(weights[key] for key in sorted(weights))]),
        "parameter_names": sorted(name for name, _ in trainee.transformer.named_parameters()),
        "lora_keys": sorted(weights),
    }
    return found | training(trainee) | text, facts


def with_lora(model: Path, *precision: torch.dtype, with_clip: bool = False) -> tuple[reference.Trainee, Arrays]:
    """A transformer with the reference's LoRA in the default layers, and that LoRA's weights."""
    trainee = reference.Trainee(model, *precision, with_clip=with_clip)
    reference.add_lora(trainee.transformer, DEFAULT_LAYERS, golden.RANK, golden.ALPHA)
    shapes = {key: tuple(value.shape) for key, value in reference.lora_state(trainee.transformer).items()}
    weights = golden.lora_weights(shapes)
    reference.set_lora(trainee.transformer, weights)
    return trainee, weights


def text_encoder(model: Path, arrays: Arrays, *precision: torch.dtype) -> tuple[Arrays, list[str]]:
    """Both LoRAs trained together, CLIP's in all its linear layers; and the keys of that."""
    trainee, _ = with_lora(model, *precision, with_clip=True)
    rank = golden.TEXT_ENCODER["text_encoder_rank"]
    reference.add_lora(trainee.clip, TEXT_ENCODER_LAYERS, rank, golden.TEXT_ALPHA)
    shapes = {key: tuple(v.shape) for key, v in reference.lora_state(trainee.clip, "text_encoder").items()}
    reference.set_lora(trainee.clip, golden.lora_weights(shapes), "text_encoder")
    ids = {"ids": golden.token_rows(arrays["ids.clip"])}
    pooled = trainee.pooled({"ids": arrays["ids.clip"]}).float().numpy()
    found = {"clip.lora": pooled, "clip.picture": picture(model, trainee, arrays | {"clip": pooled})}
    batches = [golden.batch(number) | ids for number in range(golden.STEPS)]
    return found | train_both(trainee, batches), sorted(shapes)


@torch.enable_grad()
def train_both(trainee: reference.Trainee, batches: list[Arrays]) -> Arrays:
    trainee.backward(trainee.loss(batches[0], guidance_scale=golden.GUIDANCE))
    gradients = reference.lora_gradients(trainee.clip, "text_encoder")
    for network in trainee.networks:
        network.zero_grad()
    settings = golden.OPTIMIZER | golden.TEXT_ENCODER
    course = np.array(trainee.train(batches, settings, guidance_scale=golden.GUIDANCE))
    named = {f"clip.gradient.{name}": value for name, value in gradients.items()}
    return named | {"clip.adamw.loss": course[:, 0], "clip.adamw.norm": course[:, 1]}


def write(folder: Path, arrays: Arrays, facts: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # one entry only: the library writes several in an order of its own each time
    about = {"versions": json.dumps(facts["versions"], sort_keys=True)}
    contiguous = {name: np.ascontiguousarray(value) for name, value in sorted(arrays.items())}
    (folder / golden.ARRAYS).write_bytes(save(contiguous, about))
    (folder / golden.FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def token_ids(model: Path) -> Arrays:
    clip = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer")
    t5 = T5TokenizerFast.from_pretrained(model, subfolder="tokenizer_2")
    fill = {"padding": "max_length", "truncation": True, "return_tensors": "np"}
    return {
        "ids.clip": clip(list(golden.PROMPTS), max_length=77, **fill).input_ids.astype(np.int32),
        "ids.t5": t5(list(golden.PROMPTS), max_length=golden.TEXT_LENGTH, **fill).input_ids.astype(np.int32),
    }


def encoders(model: Path, arrays: Arrays, dtype: torch.dtype) -> Arrays:
    clip_ids, t5_ids = (torch.tensor(arrays[name]).long() for name in ("ids.clip", "ids.t5"))
    clip = CLIPTextModel.from_pretrained(model, subfolder="text_encoder", dtype=dtype).eval()
    t5 = T5EncoderModel.from_pretrained(model, subfolder="text_encoder_2", dtype=dtype).eval()
    vae = reference.load_vae(model).to(dtype)
    pixels, latents = torch.tensor(golden.pixels()).to(dtype), torch.tensor(golden.latents()).to(dtype)
    found = {
        "clip": clip(clip_ids, output_hidden_states=False).pooler_output,
        "t5": t5(t5_ids, output_hidden_states=False)[0],
        "vae.moments": vae.encode(pixels).latent_dist.parameters,
        "vae.decoded": vae.decode(latents, return_dict=False)[0],
    }
    return {name: value.float().numpy() for name, value in found.items()}


def scheduler_tables(model: Path) -> Arrays:
    scheduler = reference.load_scheduler(model)
    tables = {
        "training.sigmas": scheduler.sigmas.numpy(),
        "training.timesteps": scheduler.timesteps.numpy(),
        "position_ids": FluxPipeline._prepare_latent_image_ids(1, 6, 4, "cpu", torch.float32).numpy(),
        "packed": FluxPipeline._pack_latents(
            torch.tensor(golden.latents()), 1, golden.CHANNELS, golden.SIDE, golden.SIDE
        ).numpy(),
    }
    for steps, tokens in golden.SAMPLINGS:
        scheduler = reference.load_scheduler(model)
        c = scheduler.config
        mu = calculate_shift(tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
        retrieve_timesteps(scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        tables[f"sampling.{steps}.{tokens}.sigmas"] = scheduler.sigmas.numpy()
        tables[f"sampling.{steps}.{tokens}.timesteps"] = scheduler.timesteps.numpy()
    return tables


def densities() -> Arrays:
    """Per scheme: the raw random numbers, what diffusers makes of them, and the timestep indices of a batch."""
    found: Arrays = {}
    for number, scheme in enumerate(golden.SCHEMES):
        count = 32
        generator = torch.Generator().manual_seed(number)
        if scheme == "logit_normal":
            mean, std = golden.DENSITY["logit_mean"], golden.DENSITY["logit_std"]
            raw = torch.normal(mean, std, (count,), generator=generator)
        else:
            raw = torch.rand((count,), generator=generator)
        u = compute_density_for_timestep_sampling(
            scheme, count, **golden.DENSITY, generator=torch.Generator().manual_seed(number)
        )
        found[f"density.{scheme}.raw"], found[f"density.{scheme}.u"] = raw.numpy(), u.numpy()
        found[f"density.{scheme}.index"] = (u * 1000).long().numpy().astype(np.int32)
    return found


def losses(dev: Path, schnell: Path, arrays: Arrays, *precision: torch.dtype) -> Arrays:
    """[guidance, scheme, prior]"""
    table = np.zeros((2, len(golden.SCHEMES), 2))
    answers = {}
    for row, (name, model) in enumerate({"dev": dev, "schnell": schnell}.items()):
        trainee = reference.Trainee(model, *precision)
        answers[f"transformer.{name}"] = answer(trainee)
        for column, scheme in enumerate(golden.SCHEMES):
            batch = golden.batch(0) | {"index": arrays[f"density.{scheme}.index"][: golden.BATCH]}
            for place, prior in enumerate((None, golden.PRIOR_WEIGHT)):
                table[row, column, place] = trainee.loss(batch, scheme, golden.GUIDANCE, prior).item()
    return answers | {"losses": table}


def answer(trainee: reference.Trainee) -> np.ndarray:
    return trainee.predict(golden.batch(0), golden.GUIDANCE)[0].numpy()


def picture(model: Path, trainee: reference.Trainee, arrays: Arrays) -> np.ndarray:
    pipe = reference.pipeline(model, trainee.transformer)
    hook = reference.round_while_sampling(pipe, trainee.rounding) if trainee.rounding else None
    drawn = reference.draw(
        pipe, arrays["t5"][0], arrays["clip"][0], golden.picture_noise(), golden.PICTURE_STEPS, golden.GUIDANCE
    )
    if hook:
        hook.remove()
    return drawn


@torch.enable_grad()
def first_gradients(trainee: reference.Trainee) -> Arrays:
    trainee.transformer.train()
    trainee.backward(trainee.loss(golden.batch(0), guidance_scale=golden.GUIDANCE))
    gradients = reference.lora_gradients(trainee.transformer)
    trainee.transformer.zero_grad()
    return gradients


@torch.enable_grad()
def training(trainee: reference.Trainee) -> Arrays:
    gradients = first_gradients(trainee)
    batches = [golden.batch(number) for number in range(golden.STEPS)]
    course = np.array(trainee.train(batches, golden.OPTIMIZER, guidance_scale=golden.GUIDANCE))
    return {
        **{f"gradient.{name}": value for name, value in gradients.items()},
        "adamw.loss": course[:, 0],
        "adamw.norm": course[:, 1],
    }


def schedules() -> Arrays:
    found = {}
    for settings in golden.SCHEDULES:
        name, base = settings["lr_scheduler"], golden.OPTIMIZER["learning_rate"]
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=base)
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=settings.get("lr_warmup_steps", 0),
            num_training_steps=golden.SCHEDULE_STEPS,
            num_cycles=settings.get("lr_num_cycles", 1),
            power=settings.get("lr_power", 1.0),
        )
        rates = []
        for _ in range(golden.SCHEDULE_STEPS):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        found[f"schedule.{name}"] = np.array(rates)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else golden.FOLDER)
