"""The frozen transformer spread over the devices: each keeps a part of every weight and gathers the rest for use.

Done by mindone's ZeRO helper, stage 3, on the frozen weights only. LoRA and optimizer stay whole on every device, so
saved files know nothing of it. A forward is a collective from then on: all ranks must run the same number of them.

The helper would split weights that are whole. Here a rank has read only its part of them from the files
(`loading.load_transformer`), so the helper is given layers that gather and do not split.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mindspore import mint, nn
from mindspore.communication import GlobalComm

from flux_db.model.int8_linear import Int8Linear
from flux_db.model.quiet import quiet
from flux_db.model.runtime import Runtime
from flux_db.weight_file import Share


def share_of(runtime: Runtime) -> Share:
    """The part of every weight that this rank keeps."""
    return Share(runtime.rank, runtime.world_size)


def divisible_parameters(transformer: nn.Cell) -> set[str]:
    """Names of the parameters that can be spread over the devices: those of the linear layers."""
    linear = [name for name, cell in transformer.cells_and_names() if type(cell) in (mint.nn.Linear, Int8Linear)]
    return {f"{name}.{kind}" for name in linear for kind in ("weight", "bias", "weight_scale")}


def shard_base(transformer: nn.Cell, runtime: Runtime) -> tuple[int, int]:
    """Make the layers gather what this rank does not keep. Call it after the LoRA is in.

    Returns the numbers of parameters (in all, on this device).
    """
    if runtime.world_size > 1:
        with quiet(), _hidden_lora(transformer):
            from mindone.trainers.zero import prepare_network

            from flux_db.model.gathered_linear import GatheredInt8Linear, GatheredLinear

            # it names each weight that is not split, which is every norm
            logging.getLogger(prepare_network.__module__).setLevel(logging.ERROR)
            layers = {mint.nn.Linear: GatheredLinear, Int8Linear: GatheredInt8Linear}
            prepare_network(transformer, 3, GlobalComm.WORLD_COMM_GROUP, layers)
    parameters = list(transformer.get_parameters())
    whole = sum(p.size * (runtime.world_size if p.sliced else 1) for p in parameters)
    return whole, sum(p.size for p in parameters)


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
