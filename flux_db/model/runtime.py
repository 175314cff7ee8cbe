"""The device: which one and why, graph mode, precision, and this process's place among the devices."""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import flux_db.model.late_scipy  # before MindSpore

# isort: split
import mindspore as ms
import numpy as np
import psutil
from mindspore import Tensor, ops
from mindspore.communication import get_group_size, get_rank, init

import flux_db
from flux_db import garbage, releases
from flux_db.console import say
from flux_db.errors import UserError
from flux_db.model import compile_cache, compile_hook, compile_watch, cpu_conv, device, operators
from flux_db.model.quiet import quiet
from flux_db.settings.schema import RuntimeConfig

DTYPES = {"no": ms.float32, "fp16": ms.float16, "bf16": ms.bfloat16}


class LargestMemory(NamedTuple):
    """Bytes at most so far."""

    host: int
    """Of this process."""
    device: int | None
    """None on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What the rest of the program needs to know of the machine."""

    device: str
    dtype: ms.Type
    """Precision of the frozen models."""
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def has_turn(self, number: int) -> bool:
        """Whether a piece of work that is shared out in turns is this rank's."""
        return number % self.world_size == self.rank

    def share(self, count: int, *, even: bool = False) -> list[int]:
        """The numbers of this rank's pieces of work; `even`: filled up with others', so that all ranks have as many."""
        mine = [number for number in range(count) if self.has_turn(number)]
        missing = -(-count // self.world_size) - len(mine) if even else 0
        return mine + [0] * missing

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Float32 values summed over the ranks, on every rank; with one process they come back as they are."""
        values = np.asarray(values, np.float32)
        if self.world_size == 1:
            return values
        return ops.AllReduce()(Tensor(values)).asnumpy()

    def differing(self, contents: Mapping[str, bytes]) -> list[str]:
        """What is not the same on all ranks, as `name (rank 1, 3)`; the same answer on every rank."""
        digests = [np.frombuffer(hashlib.sha256(content).digest(), np.uint8) for content in contents.values()]
        table = np.zeros((self.world_size, len(digests), 32), np.float32)
        table[self.rank] = digests
        table = self.sum(table)
        others = {
            name: [r for r in range(self.world_size) if (table[r, n] != table[0, n]).any()]
            for n, name in enumerate(contents)
        }
        return [f"{name} (rank {', '.join(map(str, ranks))})" for name, ranks in others.items() if ranks]

    def largest_memory(self) -> LargestMemory:
        # Linux counts in kB, macOS in bytes
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return LargestMemory(host, int(ms.runtime.max_memory_allocated()) if self.device == "Ascend" else None)

    def memory_mb(self) -> dict[str, float]:
        """Of this process now, and on Ascend of its device at most, in MB; by the names in metrics.jsonl."""
        found = {"memory_mb": round(psutil.Process().memory_info().rss / 1e6, 1)}
        if self.device == "Ascend":
            found["device_memory_mb"] = round(ms.runtime.max_memory_allocated() / 1e6, 1)
        return found

    def barrier(self) -> None:
        """Wait for the other ranks; a one-element sum, because the CPU backend has no barrier."""
        self.sum(np.ones(1))


def start(config: RuntimeConfig, *, alone: bool = False) -> Runtime:
    """Set up MindSpore for this process. Call it once, before any model is built.

    `alone`: for work that one process does for all of them, before they start.
    """
    if problem := compile_cache.environment_problem(os.environ):
        raise UserError(problem)
    facts = device.ascend_facts()
    name, reason = device.choose(config.device, facts)
    if problem := device.precision_problem(name, "", config.mixed_precision):
        raise UserError(f"{problem} ({reason})")
    if name == "Ascend":
        _start_ascend(config)
    else:
        ms.set_device(name)
        ms.set_context(mode=ms.GRAPH_MODE)
    rank, world_size = (0, 1) if alone else _join(config)
    with quiet():
        operators.install(name)
    is_storing = compile_cache.is_on(config.compile_cache, name, os.environ)
    compile_cache.use(graph_store(config, facts, [name, rank, world_size]) if is_storing else None)
    compile_hook.install(compile_watch.watching, compile_cache.storing)
    garbage.search_as_usual()
    if rank == 0:
        devices = f", {world_size} processes" if world_size > 1 else ""
        say(f"device {name} ({reason}), graph mode, precision {config.mixed_precision}{devices}")
        if warning := releases.warning(ms.__version__):
            say(f"warning: {warning}")
        if name == "Ascend":
            _tell_device(facts)
    return Runtime(device=name, dtype=DTYPES[config.mixed_precision], rank=rank, world_size=world_size)


def graph_store(config: RuntimeConfig, facts: device.AscendFacts, place: list[object]) -> compile_cache.GraphStore:
    """Compiled graphs for this place: device, rank and number of ranks."""
    folder = Path(config.compile_cache_dir or compile_cache.default_folder(os.environ)).expanduser().absolute()
    surroundings = {
        "format": 2,
        "sources": compile_cache.sources_digest(Path(flux_db.__file__).parent),
        "versions": compile_cache.versions(facts),
        "variables": compile_cache.variables(os.environ),
        "device": [*place, device.soc_name(), config.mixed_precision, config.jit_level, config.deterministic],
        "convolution": cpu_conv.chosen(),
    }
    return compile_cache.GraphStore(folder, surroundings)


def _start_ascend(config: RuntimeConfig) -> None:
    # msrun gives each worker its device by DEVICE_ID
    ms.set_device("Ascend", int(os.environ.get("DEVICE_ID", "0")))
    problems = (
        device.precision_problem("Ascend", device.soc_name(), config.mixed_precision),
        device.overflow_problem("Ascend", os.environ),
    )
    if found := [problem for problem in problems if problem]:
        raise UserError(found)
    if config.deterministic:
        # the same bits in every run, or nothing could be resumed exactly
        ms.set_deterministic(True)
    else:
        # ranks must stay equal in any case; MindSpore's switch would unset this one too
        os.environ["HCCL_DETERMINISTIC"] = "true"
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": config.jit_level})
    # an operator that waits for another rank counts as running; MindSpore's own limit is 900 s
    ms.device_context.ascend.op_debug.execute_timeout(device.PATIENCE_SECONDS)


def _tell_device(facts: device.AscendFacts) -> None:
    ops.add(Tensor([1.0], ms.float32), 1.0).asnumpy()  # MindSpore knows the memory only after a first operator
    say(f"  {device.describe(device.ascend_device(), facts)}")
    if warning := device.cann_warning(facts):
        say(f"warning: {warning}")


def choose_device(wanted: str) -> tuple[str, str]:
    """The device to use, and the reason in words."""
    return device.choose(wanted, device.ascend_facts())


def _join(config: RuntimeConfig) -> tuple[int, int]:
    if not device.is_one_of_several():
        if config.distributed:
            raise UserError("--distributed: msrun did not start this process; use scripts/train_multi.sh, or no flag")
        return 0, 1
    init()
    return get_rank(), get_group_size()
