"""Which flags would make a run fit into a device, in the order of their price."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from flux_db.check.device_memory import Model, budget
from flux_db.settings.derived import is_int8
from flux_db.settings.schema import Config


class Remedy(NamedTuple):
    """Flags beside those before, and what each device takes with all of them."""

    flags: str
    price: str
    peak: int


def remedies(config: Config, model: Model, devices: int, card: int) -> list[Remedy]:
    """Flags in the order of their price, one after the other until the run fits; those that save nothing are left
    out."""
    found: list[Remedy] = []
    now = budget(config, model, devices)
    for change in _CHANGES:
        if now.fits(card):
            break
        changed = change(config, devices)
        if changed is None:
            continue
        other, flags, price = changed
        after = budget(other, model, devices)
        if after.peak < now.peak:
            config, now = other, after
            found.append(Remedy(flags, price, now.peak))
    return found


Changed = tuple[Config, str, str]


def _with(config: Config, section: str, **values: Any) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def _recompute(config: Config, _devices: int) -> Changed | None:
    if config.runtime.gradient_checkpointing == "blocks":
        return None
    other = _with(config, "runtime", gradient_checkpointing="blocks")
    return other, "--gradient_checkpointing", "a third more time; the same result"


def _smaller_batch(config: Config, _devices: int) -> Changed | None:
    batch, times = config.optim.train_batch_size, config.optim.gradient_accumulation_steps
    if batch == 1:
        return None
    other = _with(config, "optim", train_batch_size=1, gradient_accumulation_steps=batch * times)
    flags = f"--train_batch_size 1 --gradient_accumulation_steps {batch * times}"
    return other, flags, "some time; the same result"


def _int8(config: Config, _devices: int) -> Changed | None:
    if is_int8(config):
        return None
    return _with(config, "runtime", base_precision="int8"), "--base_precision int8", "a little precision, some time"


def _shard(config: Config, devices: int) -> Changed | None:
    if devices == 1 or config.runtime.shard_base:
        return None
    return _with(config, "runtime", shard_base=True), "--shard_base", "every weight travels twice in a step"


def _resolution(config: Config, _devices: int) -> Changed | None:
    sides = [side for side in (768, 512) if side < config.data.resolution]
    if not sides:
        return None
    return _with(config, "data", resolution=sides[0]), f"--resolution {sides[0]}", "less detail"


def _rank(config: Config, _devices: int) -> Changed | None:
    return (_with(config, "lora", rank=4), "--rank 4", "a smaller LoRA") if config.lora.rank > 4 else None


def _tiles(config: Config, _devices: int) -> Changed | None:
    if config.validation.vae_tiling == "on":
        return None
    return _with(config, "validation", vae_tiling="on"), "--vae_tiling", "samples that differ a little"


_CHANGES: tuple[Callable[[Config, int], Changed | None], ...] = (
    _recompute,
    _smaller_batch,
    _int8,
    _shard,
    _resolution,
    _resolution,
    _rank,
    _tiles,
)
