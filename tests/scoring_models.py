"""Small DINOv2 and CLIP folders with random weights, pictures and prompts; the same for MindSpore and for torch.

As a program it runs where torch is, and makes the file that tests/score compares with:
    PYTHONPATH=. .venv-interop/bin/python tests/scoring_models.py tests/score/torch_features.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from flux_db.demo.tiny_model import clip_vocabulary
from flux_db.model.expected_weights import expected_weights

DINO = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_ratio": 2,
    "image_size": 56,
    "patch_size": 14,
}
"""Pictures of 28 px: the position embeddings of 4 x 4 patches are resized to 2 x 2."""
GATED = {**DINO, "use_swiglu_ffn": True, "qkv_bias": False, "image_size": 28}
"""As DINOv2-giant has it; the position embeddings stay as they are."""
WIDE = {**DINO, "image_size": 28}
"""The position embeddings are resized to more, as height and width differ."""
DINO_PICTURES = {"size": {"shortest_edge": 32}, "crop_size": {"height": 28, "width": 28}, "resample": 3}
WIDE_PICTURES = {"size": {"height": 42, "width": 56}, "do_center_crop": False, "resample": 2}

WORDS = ["a", "photo", "of", "dog", "cat", "on", "the", "beach", "in", "snow"]
CLIP_PICTURES = {"size": 32, "crop_size": 32, "resample": 3}
PROMPTS = ["a photo of dog on the beach", "a cat", "a photo of dog in snow " * 4]


def clip_config(vocab_size: int) -> dict[str, Any]:
    both = {"num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"hidden_size": 24, "intermediate_size": 48, "vocab_size": vocab_size, "max_position_embeddings": 16}
    vision = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    ids = {"bos_token_id": vocab_size - 2, "eos_token_id": vocab_size - 1, "pad_token_id": vocab_size - 1}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": 16,
        "text_config": {"model_type": "clip_text_model", **both, **text, **ids},
        "vision_config": {"model_type": "clip_vision_model", **both, **vision},
    }


def write_dino(folder: Path, config: dict[str, Any] = DINO, pictures: dict[str, Any] | None = None) -> Path:
    return _write(folder, "dinov2", config, DINO_PICTURES if pictures is None else pictures)


def write_clip(folder: Path) -> Path:
    vocabulary, merges = clip_vocabulary(WORDS)
    _write(folder, "clip", clip_config(len(vocabulary)), CLIP_PICTURES)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return folder


def _write(folder: Path, network: str, config: dict[str, Any], pictures: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    weights = {name: _weight(name, shape) for name, shape in expected_weights(network, config).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """By its name, so that swapped and forgotten ones show; of norms around 1."""
    draw = np.random.Generator(np.random.Philox(zlib.crc32(name.encode()))).standard_normal(shape, np.float32)
    if "norm" in name and name.endswith("weight"):
        return np.asarray(1.0 + 0.2 * draw, np.float32)
    return np.asarray(draw * (0.5 if len(shape) < 2 else 1.5 / np.sqrt(shape[-1])), np.float32)


def pictures() -> list[Image.Image]:
    """Of several shapes and sizes, larger and smaller than what the networks see."""
    sizes = [(40, 64), (64, 40), (30, 30), (20, 90), (100, 80)]
    return [_picture(number, *size) for number, size in enumerate(sizes)]


def _picture(number: int, width: int, height: int) -> Image.Image:
    values = np.random.Generator(np.random.Philox(number)).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.NEAREST)


NETWORKS = {
    "dino": (DINO, DINO_PICTURES),
    "gated": (GATED, DINO_PICTURES),
    "wide": (WIDE, WIDE_PICTURES),
}


def torch_features(folder: Path) -> dict[str, Any]:
    """What torch and transformers make of the pictures and prompts."""
    import torch
    import transformers
    from transformers import BitImageProcessor, CLIPImageProcessor, CLIPModel, CLIPTokenizer, Dinov2Model

    found: dict[str, Any] = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    with torch.no_grad():
        for name, (config, processing) in NETWORKS.items():
            place = write_dino(folder / name, config, processing)
            pixels = BitImageProcessor.from_pretrained(place)(pictures(), return_tensors="pt")
            network = Dinov2Model.from_pretrained(place, attn_implementation="eager").eval()
            found[name] = network(**pixels).pooler_output.tolist()
        place = write_clip(folder / "clip")
        network = CLIPModel.from_pretrained(place, attn_implementation="eager").eval()
        pixels = CLIPImageProcessor.from_pretrained(place)(pictures(), return_tensors="pt")
        found["clip"] = network.get_image_features(**pixels).tolist()
        tokenizer = CLIPTokenizer.from_pretrained(place)
        ids = tokenizer(PROMPTS, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
        found["texts"] = network.get_text_features(**ids).tolist()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        Path(sys.argv[1]).write_text(json.dumps(torch_features(Path(temporary))) + "\n")
