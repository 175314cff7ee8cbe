"""mindone's networks with settings and no weights: their parameters have a name and a shape, and take no memory yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.nn.utils import no_init_parameters

_OF_TRANSFORMERS = ("CLIPTextModel", "T5EncoderModel", "Dinov2Model", "CLIPModel")


def empty_network(kind: str, part: Path, dtype: ms.Type) -> nn.Cell:
    """The network of a part's config.json, with the attributes that mindone's `from_pretrained` gives it."""
    if kind in _OF_TRANSFORMERS:
        import mindone.transformers as library

        return _transformers_network(getattr(library, kind), part, dtype)
    import mindone.diffusers as library

    return _diffusers_network(getattr(library, kind), part)


def parameter_dtype(network: nn.Cell, name: str, dtype: ms.Type) -> ms.Type:
    """The type of one parameter in a network of this type: in fp16, mindone keeps some of T5's layers in float32."""
    if type(network).__name__ not in _OF_TRANSFORMERS:  # of the others it keeps none
        return dtype
    kept = set(network._keep_in_fp32_modules or ()) if dtype == ms.float16 else set()
    if dtype in (ms.float16, ms.bfloat16):
        kept |= set(network._keep_in_fp32_modules_strict or ())
    return ms.float32 if kept & set(name.split(".")) else dtype


def _diffusers_network(network_class: Any, part: Path) -> nn.Cell:
    config = network_class.load_config(str(part), local_files_only=True)
    config.pop("quantization_config", None)  # it keeps other programs from int8 weights; mindone warns of what it is
    with no_init_parameters():
        network = network_class.from_config(config)
    network.register_to_config(_name_or_path=str(part))
    return network


def _transformers_network(network_class: Any, part: Path, dtype: ms.Type) -> nn.Cell:
    config = network_class.config_class.from_pretrained(str(part), local_files_only=True)
    config.dtype = str(dtype).lower()
    config.name_or_path = str(part)
    with no_init_parameters():
        return network_class(config)
