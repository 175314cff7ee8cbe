"""The parts of a FLUX.1 folder, and the networks that score its samples, loaded one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from flux_db.errors import UserError
from flux_db.model import int8_linear, parts, scoring_folder
from flux_db.model.empty_network import empty_network
from flux_db.model.filling import fill
from flux_db.model.part_weights import Chosen, choose, some
from flux_db.model.quiet import quiet
from flux_db.weight_file import WHOLE, Share

# The VAE is small, and half precision shows in pictures.
VAE_DTYPE = ms.float32

# What mindone and transformers raise on a file that makes no sense. Anything else is a bug, or the machine's failure.
_FAULTS = (OSError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError)


def _load(
    kind: str,
    folder: Path,
    part: str,
    dtype: ms.Type,
    variant: str | None,
    share: Share = WHOLE,
    *,
    is_int8: bool = False,
) -> nn.Cell:
    if problems := parts.part_problems(folder / part, variant):
        raise UserError([f"{folder}: {problem}" for problem in problems])
    return _fill(kind, folder / part, choose(folder / part, variant), dtype, share, is_int8=is_int8)


def _fill(
    kind: str, part: Path, chosen: Chosen, dtype: ms.Type, share: Share = WHOLE, *, is_int8: bool = False
) -> nn.Cell:
    # a local folder must never cause a network call
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with quiet(), _blame(part):
        network = empty_network(kind, part, dtype)
    if is_int8:
        int8_linear.convert(network)
    # whatever the checks before have found, the network itself is asked what it needs
    if missing := fill(network, chosen, dtype, share):
        raise UserError(f"{chosen.file}: {kind} lacks weights that mindone did not find in it: {some(missing)}")
    for parameter in network.get_parameters():
        parameter.requires_grad = False
    return network.set_train(False)


@contextmanager
def _blame(path: Path) -> Iterator[None]:
    """Turns what the libraries raise on a file they cannot make sense of into a UserError that names it."""
    try:
        yield
    except _FAULTS as error:
        lines = str(error).splitlines() or [""]
        raise UserError(
            f"{path}: cannot be loaded ({type(error).__name__}: {lines[0][:300]}); fetch it again"
        ) from error


def load_transformer(
    folder: Path, dtype: ms.Type, variant: str | None = None, share: Share = WHOLE, *, is_int8: bool = False
) -> nn.Cell:
    """`share`: of every layer that `sharding.shard_base` spreads over the devices, only this part is read and kept.
    `is_int8`: the matrices of its blocks are stored as int8, quantised while they are read."""
    return _load("FluxTransformer2DModel", folder, "transformer", dtype, variant, share, is_int8=is_int8)


def load_vae(folder: Path, dtype: ms.Type, variant: str | None = None) -> nn.Cell:
    return _load("AutoencoderKL", folder, "vae", dtype, variant)


def load_clip(folder: Path, dtype: ms.Type, variant: str | None = None) -> nn.Cell:
    return _load("CLIPTextModel", folder, "text_encoder", dtype, variant)


def load_t5(folder: Path, dtype: ms.Type, variant: str | None = None) -> nn.Cell:
    return _load("T5EncoderModel", folder, "text_encoder_2", dtype, variant)


def load_dinov2(folder: Path, dtype: ms.Type) -> nn.Cell:
    return _load_scoring("Dinov2Model", folder, "dinov2", dtype)


def load_whole_clip(folder: Path, dtype: ms.Type) -> nn.Cell:
    """Both halves, for pictures and for texts."""
    return _load_scoring("CLIPModel", folder, "clip", dtype)


def _load_scoring(kind: str, folder: Path, network: str, dtype: ms.Type) -> nn.Cell:
    if problems := scoring_folder.problems(folder, network):
        raise UserError([f"{folder}: {problem}" for problem in problems])
    return _fill(kind, folder, choose(folder, None, network), dtype)


def load_clip_tokenizer(folder: Path) -> Any:
    with quiet():
        from transformers import CLIPTokenizer

        with _blame(folder):
            return CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)


def load_scheduler(folder: Path) -> Any:
    with quiet():
        from mindone.diffusers import FlowMatchEulerDiscreteScheduler

        with _blame(folder / "scheduler"):
            return FlowMatchEulerDiscreteScheduler.from_pretrained(str(folder), subfolder="scheduler")


def load_tokenizers(folder: Path) -> tuple[Any, Any]:
    """(CLIP's, T5's)"""
    with quiet():
        from transformers import T5TokenizerFast

        clip = load_clip_tokenizer(folder / "tokenizer")
        with _blame(folder / "tokenizer_2"):
            return clip, T5TokenizerFast.from_pretrained(str(folder / "tokenizer_2"), local_files_only=True)


def training_table(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(sigmas, timesteps), each [T] in 0..1: the noise levels that training draws from, as the scheduler has them."""
    scheduler = load_scheduler(folder)
    count = scheduler.config.num_train_timesteps
    sigmas = np.asarray(scheduler.sigmas.asnumpy(), np.float32)[:count]
    timesteps = np.asarray(scheduler.timesteps.asnumpy(), np.float32) / np.float32(count)
    return sigmas, timesteps
