"""diffusers on torch at the other end of the live comparison: `python torch_side.py COMMAND MODEL INPUTS OUTPUTS`.

Runs in the second environment. Arrays go in and out as safetensors files; settings are in the metadata.
"""

# ruff: noqa: E402
import json
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch_reference as reference  # first: it decides how torch computes

# isort: split
import numpy as np
import torch
from diffusers import FluxPipeline
from diffusers.training_utils import _collate_lora_metadata
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from flux_db.parity import golden


class Remarks(logging.Handler):
    """Everything that diffusers and peft warn about: among it missing and unexpected keys."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        for name in ("diffusers", "peft"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        # that the file has nothing for the text encoders is as it should be
        if "prefix='text_encoder'" not in record.getMessage():
            self.texts.append(record.getMessage())


def draw(model: Path, arrays: dict, settings: dict) -> tuple[dict, dict]:
    """A picture without and with a LoRA file."""
    pipe = reference.pipeline(model, reference.load_transformer(model))
    given = (arrays["prompt_embeds"], arrays["pooled_prompt_embeds"], arrays["noise"], 4, golden.GUIDANCE)
    pictures = {"bare": reference.draw(pipe, *given)}
    remarks = Remarks()
    file = Path(settings["lora"])
    pipe.load_lora_weights(file.parent, weight_name=file.name, adapter_name="default")
    pictures["with_lora"] = reference.draw(pipe, *given)
    state = get_peft_model_state_dict(pipe.transformer)
    loaded = {f"loaded/transformer.{name}": value.numpy() for name, value in state.items()}
    return pictures | loaded, {"remarks": remarks.texts}


def draw_prompts(model: Path, arrays: dict, settings: dict) -> tuple[dict, dict]:
    """Pictures [N, 3, H, W] by a pipeline that was loaded as a user loads it."""
    remarks = Remarks()
    pipe = FluxPipeline.from_pretrained(model, torch_dtype=torch.float32)
    noise = torch.from_numpy(arrays["noise"])
    _, _, h, w = noise.shape
    pictures = pipe(
        settings["prompts"],
        latents=FluxPipeline._pack_latents(noise, *noise.shape),
        height=h * pipe.vae_scale_factor,
        width=w * pipe.vae_scale_factor,
        num_inference_steps=settings["steps"],
        guidance_scale=settings["guidance"],
        max_sequence_length=settings["tokens"],
        output_type="pt",
    ).images
    return {"pictures": pictures.numpy()}, {"remarks": remarks.texts}


def make_lora(model: Path, _: dict, settings: dict) -> tuple[dict, dict]:
    """A LoRA file by diffusers, and what the transformer answers with it."""
    trainee = reference.Trainee(model)
    reference.add_lora(trainee.transformer, settings["layers"], settings["rank"], settings["alpha"])
    shapes = {key: tuple(value.shape) for key, value in reference.lora_state(trainee.transformer).items()}
    reference.set_lora(trainee.transformer, golden.lora_weights(shapes))
    FluxPipeline.save_lora_weights(
        settings["save_to"],
        transformer_lora_layers=get_peft_model_state_dict(trainee.transformer),
        **_collate_lora_metadata({"transformer": trainee.transformer}),
    )
    with torch.no_grad():
        return {"answer": trainee.predict(golden.batch(0), golden.GUIDANCE)[0].numpy()}, {}


def apply_lora(model: Path, arrays: dict, settings: dict) -> tuple[dict, dict]:
    """What each layer of a LoRA file, as diffusers reads it, makes of the given input: B A x alpha / rank."""
    remarks = Remarks()
    file = Path(settings["lora"])
    state, alphas = FluxPipeline.lora_state_dict(file.parent, weight_name=file.name, return_alphas=True)
    answers = {}
    for key, down in state.items():
        if key.endswith(".lora_A.weight"):
            module = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
            x = torch.from_numpy(arrays["x"][: down.shape[1]])
            y = state[key.replace("lora_A", "lora_B")].float() @ (down.float() @ x)
            scale = float(alphas[f"transformer.{module}.alpha"]) / down.shape[0] if alphas else 1.0
            answers[module] = (scale * y).numpy()
    return answers, {"remarks": remarks.texts}


def train(model: Path, arrays: dict, settings: dict) -> tuple[dict, dict]:
    """The given batches from the given start."""
    trainee = reference.Trainee(model)
    reference.add_lora(trainee.transformer, settings["layers"], settings["rank"], settings["alpha"])
    reference.set_lora(trainee.transformer, part(arrays, "start/"))
    batches = [part(arrays, f"{number}/") for number in range(settings["steps"])]
    course = np.array(trainee.train(batches, settings["optimizer"], **settings["loss"]))
    weights = {name: value.detach().numpy() for name, value in reference.lora_state(trainee.transformer).items()}
    return {"loss": course[:, 0], "norm": course[:, 1], **weights}, {}


def train_both(model: Path, arrays: dict, settings: dict) -> tuple[dict, dict]:
    """The given batches with token ids from the given start of both LoRAs; saved as diffusers' script saves them."""
    trainee = reference.Trainee(model, with_clip=True)
    for network, prefix in ((trainee.transformer, "transformer"), (trainee.clip, "text_encoder")):
        own = settings[prefix]
        reference.add_lora(network, own["layers"], own["rank"], own["alpha"])
        reference.set_lora(network, part(arrays, f"start/{prefix}/"), prefix)
    batches = [part(arrays, f"{number}/") for number in range(settings["steps"])]
    course = np.array(trainee.train(batches, settings["optimizer"], **settings["loss"]))
    FluxPipeline.save_lora_weights(
        settings["save_to"],
        transformer_lora_layers=get_peft_model_state_dict(trainee.transformer),
        text_encoder_lora_layers=get_peft_model_state_dict(trainee.clip),
        **_collate_lora_metadata({"transformer": trainee.transformer, "text_encoder": trainee.clip}),
    )
    weights = reference.lora_state(trainee.clip, "text_encoder") | reference.lora_state(trainee.transformer)
    weights = {f"weights/{name}": value.detach().numpy() for name, value in weights.items()}
    return {"loss": course[:, 0], "norm": course[:, 1], **weights}, {}


@torch.no_grad()
def draw_both(model: Path, arrays: dict, settings: dict) -> tuple[dict, dict]:
    """CLIP's vector and a picture without and with a LoRA file that has layers of CLIP."""
    pipe = reference.pipeline(model, reference.load_transformer(model))
    pipe.register_modules(text_encoder=reference.load_clip(model))

    def results(name: str) -> dict:
        pooled = pipe.text_encoder(torch.tensor(arrays["ids"]).long()).pooler_output[0].numpy()
        given = (arrays["prompt_embeds"], pooled, arrays["noise"], 4, golden.GUIDANCE)
        return {f"{name}/pooled": pooled, f"{name}/picture": reference.draw(pipe, *given)}

    found = results("bare")
    remarks, file = Remarks(), Path(settings["lora"])
    pipe.load_lora_weights(file.parent, weight_name=file.name, adapter_name="default")
    loaded = get_peft_model_state_dict(pipe.text_encoder, adapter_name="default")
    loaded = {f"loaded/text_encoder.{name}": value.numpy() for name, value in loaded.items()}
    return found | results("with_lora") | loaded, {"remarks": remarks.texts}


def part(arrays: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def main(command: str, model: str, inputs: str, outputs: str) -> None:
    reference.start()
    with safe_open(inputs, "numpy") as file:
        settings = json.loads(file.metadata()["settings"])
    commands = {"draw": draw, "make_lora": make_lora, "apply_lora": apply_lora, "train": train}
    commands |= {"train_both": train_both, "draw_both": draw_both, "draw_prompts": draw_prompts}
    results, facts = commands[command](Path(model), load_file(inputs), settings)
    save_file({name: np.ascontiguousarray(v) for name, v in results.items()}, outputs, {"facts": json.dumps(facts)})


if __name__ == "__main__":
    main(*sys.argv[1:])
