"""The parts of a FLUX.1 folder, loaded one at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from flux_db.runtime import quiet

# The VAE is small, and half precision shows in pictures.
VAE_DTYPE = ms.float32


def _load(kind: str, folder: Path, part: str, dtype: ms.Type, variant: str | None) -> nn.Cell:
    with quiet():
        if kind in ("CLIPTextModel", "T5EncoderModel"):
            import mindone.transformers as library
        else:
            import mindone.diffusers as library
        # a local folder must never cause a network call
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        model = getattr(library, kind).from_pretrained(
            str(folder), subfolder=part, mindspore_dtype=dtype, variant=variant, local_files_only=True
        )
    for parameter in model.get_parameters():
        parameter.requires_grad = False
    return model.set_train(False)


def load_transformer(folder: Path, dtype: ms.Type, variant: str | None = None) -> nn.Cell:
    return _load("FluxTransformer2DModel", folder, "transformer", dtype, variant)


def load_vae(folder: Path, dtype: ms.Type, variant: str | None = None) -> nn.Cell:
    return _load("AutoencoderKL", folder, "vae", dtype, variant)


def load_clip(folder: Path, dtype: ms.Type, variant: str | None = None) -> nn.Cell:
    return _load("CLIPTextModel", folder, "text_encoder", dtype, variant)


def load_t5(folder: Path, dtype: ms.Type, variant: str | None = None) -> nn.Cell:
    return _load("T5EncoderModel", folder, "text_encoder_2", dtype, variant)


def load_scheduler(folder: Path) -> Any:
    with quiet():
        from mindone.diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler.from_pretrained(str(folder), subfolder="scheduler")


def load_tokenizers(folder: Path) -> tuple[Any, Any]:
    """(CLIP's, T5's)"""
    with quiet():
        from transformers import CLIPTokenizer, T5TokenizerFast

        return (
            CLIPTokenizer.from_pretrained(str(folder / "tokenizer")),
            T5TokenizerFast.from_pretrained(str(folder / "tokenizer_2")),
        )


def training_table(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(sigmas, timesteps), each [T] in 0..1: the noise levels that training draws from, as the scheduler has them."""
    scheduler = load_scheduler(folder)
    count = scheduler.config.num_train_timesteps
    sigmas = np.asarray(scheduler.sigmas.asnumpy(), np.float32)[:count]
    timesteps = np.asarray(scheduler.timesteps.asnumpy(), np.float32) / np.float32(count)
    return sigmas, timesteps
