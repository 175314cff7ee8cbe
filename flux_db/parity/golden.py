"""What is compared with diffusers on torch: the inputs, as functions of a seed, and the stored reference results.

Neither MindSpore nor torch is imported here: `scripts/make_golden.py` computes the reference from these inputs with
torch, and `compare.py` computes the same with MindSpore.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save_file

from flux_db.demo.tiny_model import weights_of, write_tiny_model
from flux_db.errors import UserError
from flux_db.stream import Purpose, generator

FOLDER = Path(__file__).with_name("reference")
ARRAYS, FACTS = "reference.safetensors", "reference.json"

SEED = 20240801

# --- settings ----------------------------------------------------------------------------------------------------

PROMPTS = (
    "a photo of sks dog",
    "An oil painting of THREE small robots, zażółć gęślą jaźń 123, near a river; high quality, " + "very fluffy " * 60,
)
TEXT_LENGTH = 512
"""Tokens that T5 sees: distances up to 511 meet every relative-position bucket."""

PIXELS = 64
CHANNELS, SIDE = 16, 8  # of the tiny model's latent at that size
T5_WIDTH, CLIP_WIDTH = 48, 32

SCHEMES = ("none", "sigma_sqrt", "logit_normal", "mode", "cosmap")
DENSITY = {"logit_mean": 0.2, "logit_std": 1.1, "mode_scale": 1.29}
GUIDANCE = 3.5
PRIOR_WEIGHT = 0.7

RANK, ALPHA = 4, 6.0
BATCH, TOKENS, STEPS = 4, 24, 20
OPTIMIZER = {
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_weight_decay": 1e-2,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 0.9,
}

TEXT_ENCODER = {
    "train_text_encoder": True,
    "text_encoder_rank": 3,
    "text_encoder_layers": "all",
    "text_encoder_lr": 5e-4,
    "adam_weight_decay_text_encoder": 2e-2,
}
TEXT_ALPHA = ALPHA * TEXT_ENCODER["text_encoder_rank"] / RANK

SCHEDULE_STEPS = 100
SCHEDULES = (
    {"lr_scheduler": "constant"},
    {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 10},
    {"lr_scheduler": "linear", "lr_warmup_steps": 7},
    {"lr_scheduler": "cosine", "lr_warmup_steps": 10},
    {"lr_scheduler": "cosine_with_restarts", "lr_warmup_steps": 10, "lr_num_cycles": 3},
    {"lr_scheduler": "polynomial", "lr_warmup_steps": 5, "lr_power": 2.0},
)

SAMPLINGS = ((4, 16), (28, 1024), (50, 4096))
"""(steps, image tokens): the noise levels of sampling depend on both."""
PICTURE_STEPS = 4


# --- inputs ------------------------------------------------------------------------------------------------------


def normal(name: str, *shape: int) -> np.ndarray:
    """Standard normal numbers that belong to a name."""
    return _generator(name).standard_normal(shape, np.float32)


def _generator(name: str) -> np.random.Generator:
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return generator(SEED, key, Purpose.SAMPLE)


def pixels() -> np.ndarray:
    """[2, 3, H, W] in -1..1"""
    return np.clip(0.5 * normal("pixels", 2, 3, PIXELS, PIXELS), -1.0, 1.0)


def latents() -> np.ndarray:
    """[1, C, h, w] as the VAE decodes them."""
    return normal("latents", 1, CHANNELS, SIDE, SIDE)


def batch(number: int) -> dict[str, np.ndarray]:
    """Batch of training step `number`, in the order that the step takes them."""
    name = f"batch {number}"
    shape = (BATCH, CHANNELS, SIDE, SIDE)
    mean, logvar = normal(f"{name} mean", *shape), normal(f"{name} logvar", *shape)
    return {
        "pictures": np.concatenate([3.0 * mean, logvar - 4.0], axis=1),
        "eps": normal(f"{name} eps", *shape),
        "noise": normal(f"{name} noise", *shape),
        "index": _generator(f"{name} index").integers(0, 1000, BATCH).astype(np.int32),
        "prompt_embeds": normal(f"{name} prompt_embeds", BATCH, TOKENS, T5_WIDTH),
        "pooled": normal(f"{name} pooled", BATCH, CLIP_WIDTH),
    }


def token_rows(ids: np.ndarray) -> np.ndarray:
    """CLIP's token ids of a training batch, from those of PROMPTS: [2, 77] -> [BATCH, 77]."""
    return ids[[0, 1, 1, 0]]


def picture_noise() -> np.ndarray:
    """[C, h, w] where the sampled picture starts; drawn as `sample.py` draws it for picture 0."""
    return generator(SEED, 0, Purpose.SAMPLE).standard_normal((CHANNELS, SIDE, SIDE), np.float32)


def lora_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """A LoRA by file key. B is not zero, so that every tensor has a gradient."""
    scale = {"A": 1.0 / RANK, "B": 0.1}
    return {
        key: np.float32(scale["B" if ".lora_B." in key else "A"]) * normal(key, *shape) for key, shape in shapes.items()
    }


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Tells whether another machine or numpy draws the same inputs."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def all_inputs() -> list[np.ndarray]:
    batches = [value for number in range(STEPS) for value in batch(number).values()]
    return [pixels(), latents(), picture_noise(), *batches]


WIDE = {
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "axes_dims_rope": [16, 56, 56],
    "num_layers": 1,
    "num_single_layers": 1,
}
"""FLUX.1's own heads: kernels of the attention are chosen by their size."""


def write_models(folder: Path) -> tuple[Path, Path, Path]:
    """The tiny model; the same without guidance embedding, as FLUX.1-schnell is; and one with heads of size 128."""
    with_guidance, without, wide = folder / "dev", folder / "schnell", folder / "wide"
    write_tiny_model(with_guidance, "tiny")
    shutil.copytree(with_guidance, without)
    config = without / "transformer" / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) | {"guidance_embeds": False}
    config.write_text(json.dumps(content), encoding="utf-8")
    weights = without / "transformer" / "diffusion_pytorch_model.safetensors"
    kept = {name: value for name, value in load_file(weights).items() if "guidance_embedder" not in name}
    save_file(kept, weights, {"format": "pt"})
    shutil.copytree(with_guidance, wide)
    config = wide / "transformer" / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) | WIDE
    config.write_text(json.dumps(content), encoding="utf-8")
    (wide / "transformer" / weights.name).write_bytes(weights_of("transformer", content, "tiny", SEED))
    return with_guidance, without, wide


# --- measures ----------------------------------------------------------------------------------------------------


def max_abs_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - wanted).max())


def max_relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) / wanted - 1.0).max())


MEASURES: dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], float]]] = {
    "CLIP pooled": ("clip", max_abs_error),
    "T5": ("t5", max_abs_error),
    "VAE moments": ("vae.moments", max_abs_error),
    "VAE decoded": ("vae.decoded", max_abs_error),
    "transformer": ("transformer.dev", max_abs_error),
    "transformer, no guidance": ("transformer.schnell", max_abs_error),
    "transformer with LoRA": ("transformer.lora", max_abs_error),
    "transformer, head size 128": ("transformer.wide", max_abs_error),
    "loss, 20 cases": ("losses", max_relative_error),
    "gradient norm, 20 steps": ("adamw.norm", max_relative_error),
    "AdamW loss, 20 steps": ("adamw.loss", max_relative_error),
    "picture, 4 steps": ("picture", max_abs_error),
    "CLIP pooled with LoRA": ("clip.lora", max_abs_error),
    "gradient norm, CLIP trained": ("clip.adamw.norm", max_relative_error),
    "AdamW loss, CLIP trained": ("clip.adamw.loss", max_relative_error),
    "picture, LoRA of CLIP": ("clip.picture", max_abs_error),
}
"""Quantity: the array, and how its distance from the reference is measured."""
GRADIENTS = {
    "gradient.": "LoRA gradients",
    "wide_gradient.": "LoRA gradients, head size 128",
    "clip.gradient.": "LoRA gradients, CLIP",
}
"""The start of an array's name -> the quantity that it is a part of."""


def distances(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Distance of every quantity that is computed in floating point and is in `got`."""
    found = {
        quantity: measure(got[name], wanted[name]) for quantity, (name, measure) in MEASURES.items() if name in got
    }
    for prefix, quantity in GRADIENTS.items():
        gradients = {name: g for name, g in wanted.items() if name.startswith(prefix)}
        if any(name in got for name in gradients):
            # each tensor by its own largest gradient
            found[quantity] = max(max_abs_error(got[name], g) / float(np.abs(g).max()) for name, g in gradients.items())
    return found


# --- reference ---------------------------------------------------------------------------------------------------

SAME = 1e-5
"""Most that an array made on another processor may differ, by its largest value: the last bits are the processor's."""
SAME_DRIFT = 2.0
"""Most that the rounding errors of half precision, which are about such bits, may grow or shrink."""


@dataclass(frozen=True)
class Reference:
    """What diffusers on torch computed."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]

    def rounded_to(self, precision: str) -> dict[str, np.ndarray]:
        """The arrays; those of the transformer computed with its weights, timesteps and guidance in that precision."""
        return self.arrays | self.part(f"{precision}/")

    def part(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays whose names start so, by the rest of their names."""
        found = {name: value for name, value in self.arrays.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): value for name, value in found.items()}


def processor() -> str:
    """The processor by its name and its abilities: one that has both the same computes the same bits."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    entries = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    abilities = " ".join(sorted(entries.get("flags", "").split()))
    name = entries.get("model name") or platform.machine()
    return f"{name}, {hashlib.sha256(abilities.encode()).hexdigest()[:12]}"


def differences(made: Reference, kept: Reference) -> list[str]:
    """Where a reference that was made again is not the one that is kept, a line each.

    On the processor that made the kept one every bit must be the same; on any other, and where it is not noted, floats
    may differ by SAME.
    """
    exact = "processor" in kept.facts and made.facts.get("processor") == kept.facts["processor"]
    found = [f"{name}: is only in one of them" for name in sorted(made.arrays.keys() ^ kept.arrays.keys())]
    for name in sorted(made.arrays.keys() & kept.arrays.keys()):
        found += _differs(name, made.arrays[name], kept.arrays[name], exact)
    for name in ("versions", "inputs", "parameter_names", "lora_keys", "text_lora_keys"):
        found += [f"{name}: not the same"] if made.facts[name] != kept.facts[name] else []
    for precision, errors in kept.facts["drift"].items():
        for quantity, error in errors.items():
            found_now = made.facts["drift"][precision][quantity]
            ratio = 1.0 if found_now == error else found_now / error if error else np.inf
            if not (ratio == 1.0 if exact else 1 / SAME_DRIFT <= ratio <= SAME_DRIFT):
                found.append(f"drift of {quantity} in {precision}: {ratio:.3g} times as large")
    return found


def _differs(name: str, made: np.ndarray, kept: np.ndarray, exact: bool) -> list[str]:
    if (made.shape, made.dtype) != (kept.shape, kept.dtype):
        return [f"{name}: {made.dtype}{list(made.shape)} instead of {kept.dtype}{list(kept.shape)}"]
    if made.tobytes() == kept.tobytes():
        return []
    if exact or not np.issubdtype(kept.dtype, np.floating):
        return [f"{name}: not the same bits"]
    error = max_abs_error(made, kept) / float(np.abs(kept).max())
    return [] if error <= SAME else [f"{name}: differs by {error:.1e} of its largest value, more than {SAME:.0e}"]


def read(folder: Path = FOLDER) -> Reference:
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        return Reference(load((folder / ARRAYS).read_bytes()), facts)
    except (OSError, SafetensorError, ValueError) as problem:
        raise UserError(
            f"{folder}: the reference results are not there or damaged ({problem}); they are part of the source tree: "
            "run this in a checkout of the repository"
        ) from problem
