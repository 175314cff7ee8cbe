"""Our formulations, put in the place of mindone's; on the CPU and on Ascend, once, before any model is built.

Each place is found by name and compared with what it was when this was written. A mindone or MindSpore that has moved
or changed one is refused: running some layers by one formulation and some by another would be a silent difference.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flux_db import releases
from flux_db.errors import UserError
from flux_db.model import cpu_conv, cpu_layers, dinov2, formulations
from flux_db.model import device_kernels as kernels

_FLUX = "mindone.diffusers.models.transformers.transformer_flux"
_NORMS = "mindone.diffusers.models.normalization"
_VAE_ATTENTION = "mindone.diffusers.models.attention_processor:Attention"
_LORA = "mindone.peft.tuners.lora.layer:Linear"
_DINOV2 = "mindone.transformers.models.dinov2.modeling_dinov2"


@dataclass(frozen=True)
class Place:
    """`owner` is `module` or `module:Class`; `name` its function or method."""

    owner: str
    name: str
    replacement: Callable[..., Any]
    is_new: bool = False
    """A method that the class does not have yet, for what differs between devices."""

    def find(self) -> Any:
        module, _, cell = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, cell) if cell else found

    def problem(self, owner: Any) -> str | None:
        """Why this is not the place that it was, or None."""
        current = getattr(owner, self.name, None)
        if current is self.replacement:
            return None
        if self.is_new:
            return f"{self.owner} has a method {self.name!r} of its own" if current is not None else None
        if current is None:
            return f"{self.owner} has no {self.name!r}"
        theirs, ours = _parameters(current), _parameters(self.replacement)
        # mint's functions take more than what FLUX's models give them; some are built in and do not tell
        if theirs and theirs[: len(ours)] != ours:
            return f"{self.owner}.{self.name} takes ({', '.join(theirs)}), not ({', '.join(ours)})"
        return None


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind not in variable]


# The same on both devices.
_EVERYWHERE = (
    Place("mindspore.mint.nn:Linear", "construct", formulations.linear_construct),
    Place("mindspore.mint.nn:LayerNorm", "construct", formulations.layer_norm_construct),
    Place("mindspore.mint.nn:SiLU", "construct", formulations.silu_construct),
    Place(f"{_NORMS}:AdaLayerNormZero", "construct", formulations.ada_layer_norm_zero_construct),
    Place(f"{_NORMS}:AdaLayerNormZeroSingle", "construct", formulations.ada_layer_norm_zero_single_construct),
    Place(f"{_NORMS}:AdaLayerNormContinuous", "construct", formulations.ada_layer_norm_continuous_construct),
    Place(f"{_FLUX}:FluxPosEmbed", "construct", formulations.flux_pos_embed_construct),
    Place(f"{_FLUX}:FluxAttention", "construct", formulations.flux_attention_construct),
    Place(f"{_FLUX}:FluxTransformerBlock", "construct", formulations.DoubleBlock.construct),
    Place(f"{_FLUX}:FluxSingleTransformerBlock", "construct", formulations.SingleBlock.construct),
    Place(f"{_FLUX}:FluxTransformer2DModel", "construct", formulations.Transformer.construct),
    Place("mindone.diffusers.models.embeddings:Timesteps", "construct", formulations.timesteps_construct),
    Place("mindone.transformers.models.t5.modeling_t5:T5Attention", "compute_bias", formulations.t5_compute_bias),
    Place(_VAE_ATTENTION, "scaled_dot_product_attention", formulations.vae_attention),
    Place(_LORA, "construct", formulations.lora_linear_construct),
    Place(f"{_DINOV2}:Dinov2PatchEmbeddings", "construct", dinov2.patches_construct),
    Place(f"{_DINOV2}:Dinov2Embeddings", "construct", dinov2.embeddings_construct),
    Place(f"{_DINOV2}:Dinov2Embeddings", "interpolate_pos_encoding", dinov2.positions),
    Place(f"{_DINOV2}:Dinov2SelfAttention", "construct", dinov2.attention_construct),
    Place(f"{_DINOV2}:Dinov2SwiGLUFFN", "construct", dinov2.swiglu_construct),
)


def _by_device(
    queries_and_keys: Any, attend: Any, rms_norm: Any, activate: Any, split_tokens: Any
) -> tuple[Place, ...]:
    return (
        Place(f"{_FLUX}:FluxAttention", "queries_and_keys", queries_and_keys, is_new=True),
        Place(f"{_FLUX}:FluxAttention", "attend", attend, is_new=True),
        Place(f"{_FLUX}:FluxAttention", "split_tokens", split_tokens, is_new=True),
        Place(f"{_FLUX}:FluxTransformer2DModel", "split_tokens", split_tokens, is_new=True),
        Place(f"{_NORMS}:RMSNorm", "construct", rms_norm),
        Place(f"{_FLUX}:FluxTransformerBlock", "activate", activate, is_new=True),
        Place(f"{_FLUX}:FluxSingleTransformerBlock", "activate", activate, is_new=True),
    )


_MINT = ("arange", "split", "chunk", "outer", "stack", "full", "zeros", "ones", "linspace", "randn")
_CPU_LAYERS = ("repeated", "as_argument", "add_bias", "layer_norm", "modulated_norm", "gatherable")
_ON_CPU = (
    *_by_device(
        cpu_layers.queries_and_keys_together,
        cpu_layers.attend,
        cpu_layers.rms_norm,
        kernels.activate_on_cpu,
        kernels.split_tokens_on_cpu,
    ),
    *(Place("flux_db.model.formulations", name, getattr(cpu_layers, name)) for name in _CPU_LAYERS),
    *(Place("mindspore.mint", name, getattr(kernels, name)) for name in _MINT),
    Place("mindspore.mint.nn.functional", "layer_norm", cpu_layers.layer_norm),
    Place("mindspore.mint.nn.functional", "group_norm", kernels.group_norm),
    Place("mindspore.mint.nn.functional", "gelu", kernels.gelu),
    Place("mindspore.mint.nn:GroupNorm", "construct", kernels.group_norm_construct),
    Place("mindspore.mint.nn:Conv2d", "construct", cpu_conv.construct),
)
_ON_ASCEND = _by_device(
    formulations.queries_and_keys,
    kernels.attend_on_ascend,
    kernels.rms_norm_on_ascend,
    kernels.activate_on_ascend,
    kernels.split_tokens_on_ascend,
)

_originals: dict[tuple[Any, str], Any] = {}


def install(device: str) -> None:
    """Put everything in place for "CPU" or "Ascend". A second call with another device changes over to that."""
    _restore()
    # first those of mint, because importing mindone already runs some of its functions
    for place in sorted(places(device), key=lambda place: not place.owner.startswith("mindspore")):
        _put(place)


def places(device: str) -> tuple[Place, ...]:
    """Everything that is replaced on a device."""
    return _EVERYWHERE + (_ON_CPU if device == "CPU" else _ON_ASCEND)


def _put(place: Place) -> None:
    try:
        owner = place.find()
    except (ImportError, AttributeError) as error:
        raise _moved(f"{place.owner} is not there ({error})") from error
    if problem := place.problem(owner):
        raise _moved(problem)
    _originals[owner, place.name] = None if place.is_new else getattr(owner, place.name)
    setattr(owner, place.name, place.replacement)


def _restore() -> None:
    while _originals:
        (owner, name), original = _originals.popitem()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _moved(problem: str) -> UserError:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mindspore", "mindone"))
    return UserError(
        f"{versions}: {problem}. This program replaces that layer by its own formulation and knows mindspore "
        f"{' or '.join(releases.TRIED)} and mindone {releases.MINDONE}: install these versions"
    )
