"""--init_lora: the weights of a LoRA file put in the place of fresh ones."""

from __future__ import annotations

import numpy as np
from mindspore import nn

from flux_db.console import say
from flux_db.lora import init_lora, layer_names
from flux_db.model import adapter
from flux_db.settings.derived import text_lora
from flux_db.settings.schema import Config


def take_over(
    config: Config, transformer: nn.Cell, clip: nn.Cell | None, values: list[np.ndarray], *, is_main: bool
) -> list[np.ndarray]:
    """Put the file's weights into the networks. Returns them in fp32, in the order of `values`, the fresh ones."""
    layers, result = init_lora.read(config), []
    parts = [(transformer, config.lora, adapter.TRANSFORMER, "")]
    if clip is not None:
        parts.append((clip, text_lora(config), adapter.TEXT_ENCODER, layer_names.TEXT_ENCODER))
    for network, lora, prefix, begin in parts:
        names = list(adapter.parameters(network))
        own = {name.removeprefix(begin): layer for name, layer in layers.items() if name.startswith(begin)}
        start = init_lora.start_weights(own, lora, names, values[len(result) : len(result) + len(names)])
        tensors = {f"{prefix}.{name}.weight": value for name, value in zip(names, start.values, strict=True)}
        result += adapter.load_state_dict(network, tensors, prefix)
        if is_main:
            _report(config, start, len(names) // 2, prefix)
    return result


def _report(config: Config, start: init_lora.StartWeights, count: int, prefix: str) -> None:
    where = "" if prefix == adapter.TRANSFORMER else " of CLIP"
    line = f"LoRA to start from: {config.lora.init_lora}, {start.taken} of {count} layers{where}"
    if start.taken < count:
        line += ", the others afresh"
    if start.resized:
        line += f"; {start.resized} brought to another rank, relative error {start.error:.3g}"
    say(line)
