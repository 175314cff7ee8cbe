"""The parts of a FLUX.1 folder, loaded one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from flux_db.errors import UserError
from flux_db.model import parts
from flux_db.model.expected_weights import own_name
from flux_db.model.part_weights import Chosen, choose, read_headers, some
from flux_db.model.quiet import quiet

# The VAE is small, and half precision shows in pictures.
VAE_DTYPE = ms.float32


# What mindone and transformers raise on a file that makes no sense. Anything else is a bug, or the machine's failure.
_FAULTS = (OSError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError)

# MindSpore's older layers, which mindone's CLIP is made of, have names of their own for these.
_TORCH_NAMES = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}


def _load(kind: str, folder: Path, part: str, dtype: ms.Type, variant: str | None) -> nn.Cell:
    if problems := parts.part_problems(folder / part, variant):
        raise UserError([f"{folder}: {problem}" for problem in problems])
    chosen = choose(folder / part, variant)
    # a local folder must never cause a network call
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with quiet():
        if kind in ("CLIPTextModel", "T5EncoderModel"):
            import mindone.transformers as library

            precision = {"dtype": dtype}
        else:
            import mindone.diffusers as library

            precision = {"mindspore_dtype": dtype}
        with _blame(folder / part):
            # the part's own folder: given the model's, mindone prefers weights that lie there
            model, info = getattr(library, kind).from_pretrained(
                str(folder / part), variant=chosen.variant, local_files_only=True, output_loading_info=True, **precision
            )
    if wrong := _not_loaded(model, info, chosen):
        raise UserError(f"{chosen.file}: {kind} lacks weights that mindone did not find in it: {some(wrong)}")
    for parameter in model.get_parameters():
        parameter.requires_grad = False
    return model.set_train(False)


def _not_loaded(model: nn.Cell, info: Mapping[str, Any], chosen: Chosen) -> list[str]:
    """Parameters of the network that the files do not hold, which mindone leaves random with no more than a warning.

    The network itself is asked, whatever the checks before have found. With an index, mindone's own report is of what
    the index lists and not of what the files hold.
    """
    part, entries = chosen.file.parent.name, read_headers(chosen).entries
    held = {own_name(part, name): entry.shape for name, entry in entries.items()}
    parameters = {_torch_name(name): parameter for name, parameter in model.parameters_and_names()}
    wrong = [name for name, parameter in parameters.items() if held.get(name) != parameter.shape]
    missing = map(_torch_name, info["missing_keys"])
    # of two names for the same tensor, one suffices
    wrong += [name for name in missing if name in entries or own_name(part, name) not in held]
    return [*dict.fromkeys(wrong), *map(str, info["mismatched_keys"]), *map(str, info["error_msgs"])]


def _torch_name(name: str) -> str:
    owner, _, last = name.rpartition(".")
    return f"{owner}.{_TORCH_NAMES.get(last, last)}"


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

        with _blame(folder / "scheduler"):
            return FlowMatchEulerDiscreteScheduler.from_pretrained(str(folder), subfolder="scheduler")


def load_tokenizers(folder: Path) -> tuple[Any, Any]:
    """(CLIP's, T5's)"""
    with quiet():
        from transformers import CLIPTokenizer, T5TokenizerFast

        with _blame(folder / "tokenizer"):
            clip = CLIPTokenizer.from_pretrained(str(folder / "tokenizer"), local_files_only=True)
        with _blame(folder / "tokenizer_2"):
            return clip, T5TokenizerFast.from_pretrained(str(folder / "tokenizer_2"), local_files_only=True)


def training_table(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(sigmas, timesteps), each [T] in 0..1: the noise levels that training draws from, as the scheduler has them."""
    scheduler = load_scheduler(folder)
    count = scheduler.config.num_train_timesteps
    sigmas = np.asarray(scheduler.sigmas.asnumpy(), np.float32)[:count]
    timesteps = np.asarray(scheduler.timesteps.asnumpy(), np.float32) / np.float32(count)
    return sigmas, timesteps
