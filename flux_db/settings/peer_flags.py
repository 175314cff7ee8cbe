"""Flags of diffusers' and mindone's scripts that are no settings here, and for which values the result is the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flux_db.problem import Problem
from flux_db.settings.raw_values import NO_VALUE
from flux_db.settings.schema import Config
from flux_db.settings.secrets import LOGIN


@dataclass(frozen=True)
class PeerFlag:
    """One flag of theirs. Without `ignored_if` no value of it changes the result here."""

    reason: str
    ignored_if: Callable[[str, Config], bool] = lambda value, config: True
    when: str = "always"
    """`ignored_if` in words."""
    instead: str = "leave the flag out"
    """What to do if it is not ignored."""


def _keeps_prodigy(value: str, config: Config) -> bool:
    return config.optim.optimizer != "prodigy" or value in ("true", "1")


def _is_prodigys_beta3(value: str, config: Config) -> bool:
    optim = config.optim
    try:
        return optim.optimizer != "prodigy" or math.isclose(float(value), math.sqrt(optim.adam_beta2), rel_tol=1e-4)
    except ValueError:
        return value == "none"


def _is_training_precision(value: str, config: Config) -> bool:
    wanted = "no" if value == "fp32" else value
    return not config.data.with_prior_preservation or wanted == config.runtime.mixed_precision


_PRODIGY = PeerFlag(
    "Prodigy always has decoupled decay, bias correction and safeguarded warm-up",
    _keeps_prodigy,
    "with true, or without Prodigy",
)
_ATTENTION = PeerFlag("the device chooses the attention kernel")

PEER_FLAGS = {
    "use_8bit_adam": PeerFlag("a LoRA's optimizer state is small and stays in float32"),
    "allow_tf32": PeerFlag("neither Ascend nor the CPU computes in TF32"),
    "local_rank": PeerFlag("msrun gives each process its rank"),
    "mindspore_mode": PeerFlag("training always runs in graph mode"),
    "enable_mindspore_data_sink": PeerFlag("threads prepare batches ahead, and handing one over takes 2 ms"),
    "enable_xformers_memory_efficient_attention": _ATTENTION,
    "enable_npu_flash_attention": _ATTENTION,
    "zero_stage": PeerFlag(
        "a LoRA's gradients and optimizer state are small and not sharded",
        lambda value, config: value in ("0", "1", "2"),
        "with 0, 1 and 2",
        "for stage 3 use --shard_base, which shards the frozen transformer",
    ),
    "prior_generation_precision": PeerFlag(
        "class pictures are drawn in the training precision",
        _is_training_precision,
        "with the precision of --mixed_precision, or without --with_prior_preservation",
        "use --mixed_precision",
    ),
    "prodigy_decouple": _PRODIGY,
    "prodigy_use_bias_correction": _PRODIGY,
    "prodigy_safeguard_warmup": _PRODIGY,
    "prodigy_beta3": PeerFlag(
        "Prodigy's beta3 is always the square root of --adam_beta2",
        _is_prodigys_beta3,
        "with that value or None, or without Prodigy",
    ),
    "hub_token": PeerFlag(
        "a token is no setting and is never stored",
        lambda value, config: False,
        "never",
        LOGIN,
    ),
}


def judge(name: str, label: str, raw: Any, config: Config) -> str | Problem:
    """The note about a flag that is ignored, or the problem of one that would change the result."""
    flag = PEER_FLAGS[name]
    if flag.ignored_if("" if raw is NO_VALUE else str(raw).lower(), config):
        return f"{label} is ignored: {flag.reason}"
    return Problem(f"{label}: not used here: {flag.reason}; {flag.instead}")
