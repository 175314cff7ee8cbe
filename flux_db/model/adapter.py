"""The LoRA: put into a network, started the same on every machine, and named as the community names it.

The network is the transformer, or CLIP's text model with a LoRA of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from flux_db.errors import UserError
from flux_db.model.dropout import NUMBERS, StepDropout
from flux_db.model.preservation import RowGate
from flux_db.model.quiet import quiet
from flux_db.settings import lora_layers
from flux_db.settings.schema import LoraConfig
from flux_db.stream import Purpose, generator

ADAPTER = "default"

# Of the layers' names in files.
TRANSFORMER, TEXT_ENCODER = "transformer", "text_encoder"

# Dropout masks are a function of the layer's number; the text encoder's begin here, beyond those of any transformer.
FIRST_TEXT_LAYER = 100_000


def inject(
    transformer: nn.Cell, config: LoraConfig, seed: int, samples: int = 1, dtype: ms.Type = ms.float32
) -> Parameter | None:
    """Give the transformer a trainable LoRA that computes in `dtype`. Returns the dropout keys of a batch, or None."""
    with quiet():
        transformer.add_adapter(_peft_config(transformer, config), ADAPTER)
    _start(transformer, config, seed, dtype)
    if config.lora_dropout == 0:
        return None
    key = Parameter(Tensor(np.zeros((samples, NUMBERS)), ms.float32), name="dropout_key", requires_grad=False)
    _add_dropout(transformer, config.lora_dropout, key)
    return key


def inject_text_encoder(
    text_encoder: nn.Cell, config: LoraConfig, seed: int, dtype: ms.Type = ms.float32, key: Parameter | None = None
) -> None:
    """Give CLIP a trainable LoRA that computes in `dtype`, with the dropout keys that the transformer's has."""
    with quiet():
        from mindone.peft import inject_adapter_in_model

        inject_adapter_in_model(_peft_config(text_encoder, config), text_encoder, ADAPTER)
    _start(text_encoder, config, seed, dtype)
    if key is not None:
        _add_dropout(text_encoder, config.lora_dropout, key, FIRST_TEXT_LAYER)


def _peft_config(network: nn.Cell, config: LoraConfig) -> Any:
    from mindone.peft import LoraConfig as PeftConfig

    layers = lora_layers.chosen(config, linear_layers(network))
    ranks = {name: lora_layers.rank_of(config, name) for name in layers}
    others = [name for name, rank in ranks.items() if rank != config.rank]
    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        init_lora_weights="gaussian",
        target_modules=layers,
        rank_pattern={f"^{re.escape(name)}": ranks[name] for name in others},
        alpha_pattern={f"^{re.escape(name)}": lora_layers.alpha_of(config, name) for name in others},
    )


def linear_layers(network: nn.Cell) -> list[str]:
    """Names of the cells with a matrix of weights."""
    return [
        name.removesuffix(".weight")
        for name, parameter in network.parameters_and_names()
        if name.endswith(".weight") and len(parameter.shape) == 2
    ]


def _start(network: nn.Cell, config: LoraConfig, seed: int, dtype: ms.Type) -> None:
    _forget_compiled(network)
    for value, parameter in zip(start_values(network, config, seed), parameters(network).values(), strict=True):
        parameter.set_dtype(dtype)
        parameter.set_data(Tensor(value).astype(dtype))
        parameter.requires_grad = True


def start_values(network: nn.Cell, config: LoraConfig, seed: int) -> list[np.ndarray]:
    """The LoRA's first weights in fp32, in the order of `parameters`."""
    return [_start_value(name, p.shape, seed) for name, p in parameters(network).items()]


def parameters(network: nn.Cell) -> dict[str, Parameter]:
    """The LoRA's parameters by module name: `transformer_blocks.0.attn.to_q.lora_A`, in a fixed order."""
    found = {
        name.removesuffix(f".{ADAPTER}.weight"): parameter
        for name, parameter in network.parameters_and_names()
        if ".lora_A." in name or ".lora_B." in name
    }
    return dict(sorted(found.items()))


@contextmanager
def strength(networks: Sequence[nn.Cell], factor: float) -> Iterator[None]:
    """Use the LoRA of the networks with a factor on its strength; afterwards its weights are bitwise what they were."""
    if factor == 1:
        yield
        return
    ups = [p for network in networks for name, p in parameters(network).items() if name.endswith("lora_B")]
    values = [p.astype(ms.float32).asnumpy().copy() for p in ups]
    try:
        _assign(ups, [value * np.float32(factor) for value in values])
        yield
    finally:
        _assign(ups, values)


def _assign(own: Sequence[Parameter], values: Sequence[np.ndarray]) -> None:
    for parameter, value in zip(own, values, strict=True):
        # assign, because a compiled graph does not see set_data
        ops.assign(parameter, Tensor(value).astype(parameter.dtype))


def remove(transformer: nn.Cell) -> None:
    """Take the LoRA out again. Not for a transformer inside a training step: that has compiled it in."""
    with quiet():
        transformer.delete_adapters(ADAPTER)
    _forget_compiled(transformer)


def _forget_compiled(network: nn.Cell) -> None:
    """Make the next call compile anew: a graph does not see that layers came or went since its first call."""
    network.compile_cache.clear()


def _start_value(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """B is zero, A [rank, inputs] is normal with deviation 1/rank; keyed by name: every device starts the same."""
    if name.endswith("lora_B"):
        return np.zeros(shape, np.float32)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return generator(seed, key, Purpose.LORA).standard_normal(shape, np.float32) / np.float32(shape[0])


# --- files -------------------------------------------------------------------------------------------------------


def to_state_dict(
    network: nn.Cell,
    config: LoraConfig,
    values: Sequence[np.ndarray] | None = None,
    prefix: str = TRANSFORMER,
    *,
    alphas: bool | None = None,
) -> dict[str, np.ndarray]:
    """The LoRA under diffusers' names, fp32. With alpha != rank, or several ranks, each module carries its alpha: all
    loaders read it. `alphas` decides that instead, because they are for all layers of a file or for none.

    `values` are the optimizer's own, in the order of `parameters`; the layers may hold them in half precision only.
    """
    own = parameters(network)
    if values is None:
        values = [p.astype(ms.float32).asnumpy().copy() for p in own.values()]
    tensors = {f"{prefix}.{name}.weight": value for name, value in zip(own, values, strict=True)}
    if lora_layers.needs_alphas(config) if alphas is None else alphas:
        modules = sorted({name.rsplit(".", 1)[0] for name in own})
        values = {module: lora_layers.alpha_of(config, module) for module in modules}
        tensors |= {f"{prefix}.{module}.alpha": np.array(alpha, np.float32) for module, alpha in values.items()}
    return tensors


def load_state_dict(network: nn.Cell, tensors: Mapping[str, np.ndarray], prefix: str = TRANSFORMER) -> list[np.ndarray]:
    """Put saved weights in place; a graph that is compiled already uses them too. Returns them in fp32, in order."""
    wanted = {f"{prefix}.{name}.weight": parameter for name, parameter in parameters(network).items()}
    weights = {name: value for name, value in tensors.items() if not name.endswith(".alpha")}
    if wanted.keys() != weights.keys():
        missing, foreign = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
        raise UserError(f"the LoRA weights do not fit the model: missing {missing[:3]}, unexpected {foreign[:3]}")
    values = []
    for name, parameter in wanted.items():
        if tuple(weights[name].shape) != tuple(parameter.shape):
            raise UserError(f"the LoRA weights do not fit: {name} is {weights[name].shape}, not {parameter.shape}")
        values.append(np.ascontiguousarray(weights[name], np.float32))
        # assign, because a compiled graph does not see set_data
        ops.assign(parameter, Tensor(values[-1]).astype(parameter.dtype))
    return values


# --- dropout -----------------------------------------------------------------------------------------------------


def _add_dropout(network: nn.Cell, p: float, key: Parameter, first: int = 0) -> None:
    from mindone.peft.tuners.lora import LoraLayer

    layers = [cell for _, cell in network.cells_and_names() if isinstance(cell, LoraLayer)]
    for number, layer in enumerate(layers, first):
        layer.lora_dropout[ADAPTER] = StepDropout(p, number, key)


def add_row_gates(network: nn.Cell) -> None:
    """For --preserve_class: while training, the LoRA is off in the last third of a batch's rows. After `inject`."""
    from mindone.peft.tuners.lora import LoraLayer

    for layer in [cell for _, cell in network.cells_and_names() if isinstance(cell, LoraLayer)]:
        layer.lora_dropout[ADAPTER] = RowGate(layer.lora_dropout[ADAPTER]).set_train(network.training)


def set_dropout(network: nn.Cell, on: bool) -> None:
    """Switch the dropout of the LoRA, and its gates, alone: the network's own layers stay as they are."""
    for _, cell in network.cells_and_names():
        if isinstance(cell, StepDropout | RowGate):
            cell.set_train(on)
