"""`flux-db plan`: what a run takes in memory, on disk and in time to compile, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flux_db.check import device_memory
from flux_db.check.compile_time import expected_time
from flux_db.check.device_memory import Budget, Model
from flux_db.check.disk import disk
from flux_db.check.memory import PROGRAM_BYTES
from flux_db.check.remedies import remedies
from flux_db.settings.schema import Config

NAME_WIDTH, COLUMN_WIDTH = 30, 16


def lines(config: Config, model: Model, devices: int, card: int) -> Iterator[str]:
    budget = device_memory.budget(config, model, devices)
    yield f"Sizes: {_source(config, model)}. Computed, not measured."
    yield ""
    yield f"Memory of each of {devices} Ascend devices, in GB" if devices > 1 else "Memory of the Ascend device, in GB"
    yield from _table(budget)
    yield ""
    yield f"A card with {card} GB: {device_memory.answer(budget, card)}, {budget.peak / 1e9:.1f} GB at most"
    if not budget.fits(card):
        yield from _remedies(config, model, devices, card)
    yield ""
    each, t5 = host(config, model, devices)
    yield f"Host memory   {devices} x {each / 1e9:.1f} GB to load the transformer; {t5 / 1e9:.1f} GB to encode, before"
    files = disk(config, model)
    yield (
        f"Disk          {files.prompt / 1e6:.1f} MB for each prompt, {files.picture / 1e6:.2f} MB for each picture, "
        f"{files.checkpoint / 1e6:.0f} MB for each checkpoint, {files.lora / 1e6:.0f} MB for the LoRA"
    )
    yield f"Compiling     {compiling(model)} for each size of pictures"


def _source(config: Config, model: Model) -> str:
    name = config.model.pretrained_model_name_or_path
    return f"those of {Path(name)}" if model.is_here else "FLUX.1-dev's, because the model is not a folder here"


def _table(budget: Budget) -> Iterator[str]:
    stages = budget.stages
    yield "  " + "".ljust(NAME_WIDTH) + "".join(stage.rjust(COLUMN_WIDTH) for stage in stages)
    for name in dict.fromkeys(item.name for item in budget.items):
        cells = [sum(item.bytes for item in budget.of(stage) if item.name == name) for stage in stages]
        yield _row(name, cells)
    yield _row("sum", [budget.total(stage) for stage in stages])


def _row(name: str, cells: list[int]) -> str:
    shown = [f"{cell / 1e9:.2f}" if cell else "" for cell in cells]
    return ("  " + name.ljust(NAME_WIDTH) + "".join(text.rjust(COLUMN_WIDTH) for text in shown)).rstrip()


def _remedies(config: Config, model: Model, devices: int, card: int) -> Iterator[str]:
    found = remedies(config, model, devices, card)
    yield "  each with those before:" if found else "  no flag saves enough"
    for remedy in found:
        yield f"  {remedy.flags:<46} {remedy.peak / 1e9:5.1f} GB   price: {remedy.price}"
    if found and found[-1].peak > card * 10**9:
        yield "  these do not suffice: more devices, or larger ones"


def host(config: Config, model: Model, devices: int) -> tuple[int, int]:
    """(bytes of each process that loads the transformer, bytes of the one that encodes)"""
    transformer = device_memory.transformer_bytes(config, model.shapes["transformer"], devices)
    return transformer + PROGRAM_BYTES, device_memory.text_encoder_bytes(config, model) + PROGRAM_BYTES


def compiling(model: Model) -> str:
    return expected_time(model.blocks("double") + model.blocks("single"), "Ascend") or "under a minute"


def as_json(config: Config, model: Model, devices: int, card: int) -> dict[str, Any]:
    """In bytes."""
    budget = device_memory.budget(config, model, devices)
    each, t5 = host(config, model, devices)
    return {
        "sizes_of": config.model.pretrained_model_name_or_path if model.is_here else "FLUX.1-dev",
        "devices": devices,
        "card_gb": card,
        "memory": {stage: {item.name: item.bytes for item in budget.of(stage)} for stage in budget.stages},
        "peak": budget.peak,
        "worst_stage": budget.worst,
        "fits": budget.fits(card),
        "remedies": [remedy._asdict() for remedy in remedies(config, model, devices, card)],
        "host": {"loading_each": each, "encoding": t5},
        "disk": disk(config, model)._asdict(),
        "compiling": compiling(model),
    }
