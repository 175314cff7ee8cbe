"""LoRA files for the small model, in the formats of several programs, and what they add to its weights."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from fuzzing import tensors
from fuzzing.tensors import Raw
from fuzzing.world import World

# A layer of each kind of block, by diffusers' name and by the name of Black Forest Labs. Neither is a fused one.
LAYERS = {
    "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
    "single_transformer_blocks.1.proj_out": "single_blocks.1.linear2",
}
RANK = 4

# Format -> (module's name, of diffusers' name and of the other; names of the two matrices)
FORMATS = {
    "diffusers": ("transformer.{0}", "lora_A", "lora_B"),
    "peft": ("base_model.model.{0}", "lora_A", "lora_B"),
    "kohya": ("lora_unet_{1}", "lora_down", "lora_up"),
    "comfyui": ("diffusion_model.{1}", "lora_down", "lora_up"),
    "onetrainer": ("lora_transformer_{0}", "lora_down", "lora_up"),
    "without prefix": ("{0}", "lora_A", "lora_B"),
}

Tensors = dict[str, Raw]


def module_name(layer: str, format_: str) -> str:
    template = FORMATS[format_][0]
    names = (layer, LAYERS[layer])
    return template.format(*(name.replace(".", "_") if "_{" in template else name for name in names))


def make(
    world: World, rng: random.Random, *, format_: str = "diffusers", dtype: str = "F32", alpha: float | None = None
) -> Tensors:
    """A sound file's tensors. Without alpha the strength is 1."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    found: Tensors = {}
    for layer in LAYERS:
        outputs, inputs = world.weights[f"{layer}.weight"].shape
        module, (_, down, up) = module_name(layer, format_), FORMATS[format_]
        found[f"{module}.{down}.weight"] = tensors.raw(numbers.normal(size=(RANK, inputs)) / 8, dtype)
        found[f"{module}.{up}.weight"] = tensors.raw(numbers.normal(size=(outputs, RANK)) / 8, dtype)
        if alpha is not None:
            found[f"{module}.alpha"] = tensors.raw(np.array(alpha), dtype)
    return found


def deltas(content: Tensors, format_: str) -> dict[str, np.ndarray]:
    """What a sound file adds to each layer's weight."""
    found = {}
    for layer in LAYERS:
        module, (_, down, up) = module_name(layer, format_), FORMATS[format_]
        low, high = (content[f"{module}.{name}.weight"].array().astype(np.float32) for name in (down, up))
        alpha = content.get(f"{module}.alpha")
        found[layer] = high @ low * (1.0 if alpha is None else float(alpha.array()) / low.shape[0])
    return found


def read_deltas(path: Path, format_: str) -> dict[str, np.ndarray]:
    return deltas(tensors.read(path)[0], format_)
