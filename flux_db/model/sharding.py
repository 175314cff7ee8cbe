"""The frozen transformer spread over the devices: each keeps a part of every weight and gathers the rest for use.

Done by mindone's ZeRO helper, stage 3, on the frozen weights only. LoRA and optimizer stay whole on every device, so
saved files know nothing of it. A forward is a collective from then on: all ranks must run the same number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindspore import nn
from mindspore.communication import GlobalComm

from flux_db.model.quiet import quiet
from flux_db.model.runtime import Runtime


def shard_base(transformer: nn.Cell, runtime: Runtime) -> tuple[int, int]:
    """Keep this rank's part of the weights. Call it after the LoRA is in. Returns (parameters before, after)."""
    before = _count(transformer)
    if runtime.world_size > 1:
        with quiet(), _hidden_lora(transformer):
            from mindone.trainers.zero import prepare_network

            prepare_network(transformer, 3, GlobalComm.WORLD_COMM_GROUP)
    return before, _count(transformer)


@contextmanager
def _hidden_lora(transformer: nn.Cell) -> Iterator[None]:
    """The helper would wrap the LoRA's layers too, rename their weights and average their gradients in every layer."""
    from mindone.peft.tuners.lora import LoraLayer

    layers = [cell for _, cell in transformer.cells_and_names() if isinstance(cell, LoraLayer)]
    hidden = [(layer, name, layer._cells.pop(name)) for layer in layers for name in ("lora_A", "lora_B")]
    try:
        yield
    finally:
        for layer, name, cell in hidden:
            layer._cells[name] = cell


def _count(transformer: nn.Cell) -> int:
    return sum(parameter.size for parameter in transformer.get_parameters())
