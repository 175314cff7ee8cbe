"""`generate` with LoRAs that make no sense: refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from fuzzing.case import Bench, Case, Plan, plan, refused
from fuzzing.families import loras
from fuzzing.families.loras import NAMES, Change


def plans() -> Iterator[Plan]:
    for about, change in (loras.REFUSED | loras.NOT_FINITE | loras.NOT_PLAIN).items():
        yield plan(about, drawn, change, way="mindspore")


def drawn(bench: Bench, change: Change) -> Case:
    loras.write_changed(bench, change)
    words = ["generate", "--model", bench.world.model, "--lora", "lora.safetensors", "--prompt", "a dog", "-o", "made"]
    case = bench.run(
        refused(*NAMES), *words, "--size", "32x32", "--device", "CPU", "--encode_cache_dir", bench.world.cache
    )
    return case.but(memory_mb=4096, patience=3)
