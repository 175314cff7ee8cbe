"""How to draw with a LoRA as its run drew its samples: for the report, the model card and the end of a run."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Mapping
from typing import Any

from flux_db.console import printable
from flux_db.lora import drawn_with
from flux_db.output_folder import LORA_FILE
from flux_db.settings.derived import instance_prompt, validation_prompts
from flux_db.settings.schema import Config

# That the small model knows as well.
PLACES = ("in the forest", "in the city", "in the desert", "in a meadow")


def command(lora: str, prompt: str, output: str, model: str | None = None) -> str:
    """The command line of generate; without a model it takes that of the LoRA's run."""
    words = ["python", "-m", "flux_db", "generate", *(("--model", model) if model else ()), "--lora", lora]
    return printable(shlex.join([*words, "--prompt", prompt, "-o", output]))


def next_command(config: Config) -> str:
    """What to type after a run: pictures from a prompt that its samples do not have, in a folder that is not there."""
    samples, folder = validation_prompts(config), f"{config.output.output_dir.rstrip('/')}-pictures"
    place = next((place for place in PLACES if not any(place in prompt for prompt in samples)), PLACES[0])
    folders = itertools.chain([folder], (f"{folder}-{number}" for number in itertools.count(2)))
    free = next(name for name in folders if not os.path.lexists(name))
    return command(config.output.output_dir, f"{instance_prompt(config)} {place}", free)


def diffusers(settings: Mapping[str, Any], model: str, lora: str, prompt: str) -> str:
    return f"""import torch
from diffusers import FluxPipeline

pipe = FluxPipeline.from_pretrained({json.dumps(model)}, torch_dtype=torch.bfloat16).to("cuda")
{_draw(settings, lora, prompt)}.images[0]
image.save("sample.png")"""


def mindone(settings: Mapping[str, Any], model: str, lora: str, prompt: str) -> str:
    return f"""import mindspore as ms
from mindone.diffusers import FluxPipeline

pipe = FluxPipeline.from_pretrained({json.dumps(model)}, mindspore_dtype=ms.bfloat16)
{_draw(settings, lora, prompt)}[0][0]
image.save("sample.png")"""


def _draw(settings: Mapping[str, Any], lora: str, prompt: str) -> str:
    known = drawn_with.DEFAULTS | drawn_with.of_settings(settings)
    height, width = known["size"]
    # the very text of the prompt; what cannot be seen is written as an escape
    return f"""pipe.load_lora_weights({json.dumps(lora)}, weight_name={json.dumps(LORA_FILE)})
image = pipe(
    {printable(json.dumps(prompt, ensure_ascii=False))},
    height={height},
    width={width},
    num_inference_steps={known["steps"]},
    guidance_scale={known["guidance"]:g},
    max_sequence_length={known["max_sequence_length"]},
)"""
