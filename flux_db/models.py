"""The parts of a FLUX.1 folder: found, fingerprinted, loaded one at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from flux_db.config import ModelConfig
from flux_db.console import stage
from flux_db.errors import UserError
from flux_db.runtime import quiet

# The VAE is small, and half precision shows in pictures.
VAE_DTYPE = ms.float32

_WHOLE_FILE_BYTES = 64 * 2**20
_PIECE_BYTES = 2**20


def locate(config: ModelConfig) -> Path:
    """The model's folder on this machine; downloaded first, if the name is one of the hub."""
    folder = Path(config.pretrained_model_name_or_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with stage(f"Fetching {config.pretrained_model_name_or_path} from the hub"):
        try:
            return Path(
                snapshot_download(
                    config.pretrained_model_name_or_path,
                    revision=config.revision,
                    cache_dir=config.cache_dir,
                    allow_patterns=["model_index.json", *(f"{part}/*" for part in PARTS)],
                )
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
            raise UserError(
                f"--pretrained_model_name_or_path {config.pretrained_model_name_or_path}: is not a folder here, and "
                f"cannot be fetched from the hub ({type(problem).__name__}); give a local folder, or log in and retry"
            ) from problem


PARTS = ("scheduler", "vae", "transformer", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


def fingerprint(folder: Path, parts: Iterable[str]) -> str:
    """Hash of the named parts' files; of large files the size and samples, since hashing T5 whole takes a minute."""
    digest = hashlib.sha256()
    for path in sorted(p for part in parts for p in (folder / part).rglob("*") if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
                continue
            for offset in range(0, size, size // 16):
                file.seek(offset)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def read_config(folder: Path, part: str) -> dict[str, Any]:
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    return json.loads((folder / part / name).read_text())


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
