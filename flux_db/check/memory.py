"""Host memory: what loading the networks takes on this machine, compared with what it has."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flux_db.check.device_memory import ITEM_BYTES, transformer_bytes
from flux_db.data.dataset import number_of_devices
from flux_db.data.encode_cache import text_precision
from flux_db.errors import UserError
from flux_db.model.expected_weights import Shapes, expected_weights
from flux_db.model.model_folder import read_config
from flux_db.problem import Problem
from flux_db.settings.schema import Config

LOCAL_DEVICES = "FLUX_DB_LOCAL_DEVICES"
"""Environment variable: how many of the devices are on this server. Without it, all of them."""

MEMINFO = Path("/proc/meminfo")

# Of a process with MindSpore and mindone that has no weights yet: 0.5 GB on the CPU, and some for the trainer.
PROGRAM_BYTES = 700_000_000


class Memory(NamedTuple):
    """Bytes of the machine."""

    total: int
    available: int
    """Without pushing other programs out."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Processes that load a network at the same time."""

    network: str
    processes: int
    each: int
    """Bytes of one process."""

    @property
    def total(self) -> int:
        return self.processes * self.each

    def __str__(self) -> str:
        if self.processes == 1:
            return f"{_gigabytes(self.each)} in one process for {self.network}"
        return f"{self.processes} processes x {_gigabytes(self.each)} = {_gigabytes(self.total)} for {self.network}"


def memory_problems(config: Config, folder: Path | None = None) -> list[Problem]:
    """A transformer that this machine can never load for its devices.

    `folder`: of the model, where it is not the one in the settings because it comes from the hub.
    """
    machine, need = _machine(), _transformer(config, folder)
    if machine is None or need is None or need.total <= machine.total:
        return []
    text = f"host memory: loading takes {need}, and this machine has {_gigabytes(machine.total)}; {_remedy(config)}"
    return [Problem(text, also=("shard_base", "mixed_precision"))]


def fit_together(config: Config, folder: Path) -> bool:
    """Whether transformer and text encoders may be in memory at the same time, with as much again left free."""
    machine = _machine()
    needs = [need.total for need in (_transformer(config, folder), _t5(config, folder)) if need is not None]
    return machine is not None and 2 * sum(needs) <= machine.available


def memory_warnings(config: Config, folder: Path | None = None) -> list[str]:
    """Networks that do not fit into what is free at the moment."""
    machine = _machine()
    if machine is None:
        return []
    return [
        f"host memory: loading takes {need}, and {_gigabytes(machine.available)} are available now; if no other "
        f"program ends before, the system may kill this one ({_remedy(config)})"
        for need in (_transformer(config, folder), _t5(config, folder))
        if need is not None and need.total > machine.available
    ]


def memory_lines(config: Config) -> list[str]:
    """What each network takes, for a plan of the run, and what there is."""
    machine = _machine()
    lines = [str(need) for need in (_transformer(config, None), _t5(config, None)) if need is not None]
    if clip := clip_bytes(config):
        lines.append(f"CLIP, which is trained, takes {clip / 1e9:.2f} GB of that, and as much on each device")
    if machine is not None and lines:
        lines.append(f"{_gigabytes(machine.available)} of {_gigabytes(machine.total)} are available now")
    return lines


def _remedy(config: Config) -> str:
    runtime, ways = config.runtime, []
    if number_of_devices() > 1:
        ways += ["use fewer devices"] + ([] if runtime.shard_base else ["add --shard_base"])
    if runtime.mixed_precision == "no":
        ways.append("use --mixed_precision bf16 or fp16")
    return " or ".join([*ways, "use a machine with more memory"])


def _transformer(config: Config, folder: Path | None) -> Need | None:
    """None if the model is not here yet, or its settings make no sense: both are reported elsewhere."""
    shapes = _shapes(config, folder, "transformer")
    if shapes is None:
        return None
    devices = number_of_devices()
    size = transformer_bytes(config, shapes, devices)
    clip = clip_bytes(config, folder)
    each = size + clip + PROGRAM_BYTES
    network = "the transformer and CLIP" if clip else "the transformer"
    return Need(network=network, processes=_processes_here(devices), each=each)


def clip_bytes(config: Config, folder: Path | None = None) -> int:
    """What CLIP takes in every process that trains it; 0 if it is not trained, or not here yet."""
    shapes = _shapes(config, folder, "text_encoder") if config.text_encoder.train_text_encoder else None
    return sum(map(math.prod, (shapes or {}).values())) * ITEM_BYTES[text_precision(config)]


def _t5(config: Config, folder: Path | None) -> Need | None:
    shapes = _shapes(config, folder, "text_encoder_2")
    if shapes is None:
        return None
    each = sum(map(math.prod, shapes.values())) * ITEM_BYTES[text_precision(config)] + PROGRAM_BYTES
    return Need(network="T5, if there is something to encode", processes=1, each=each)


def _shapes(config: Config, folder: Path | None, part: str) -> Shapes | None:
    folder = folder or Path(config.model.pretrained_model_name_or_path)
    try:
        return expected_weights(part, read_config(folder, part)) if os.path.isdir(folder) else None
    except (UserError, ValueError):
        return None


def _processes_here(devices: int) -> int:
    number = os.environ.get(LOCAL_DEVICES, "")
    return min(devices, int(number)) if re.fullmatch("[1-9][0-9]{0,5}", number) else devices


def _machine() -> Memory | None:
    """None where the system does not tell."""
    try:
        found = dict(re.findall(r"^(MemTotal|MemAvailable): +([0-9]+) kB$", MEMINFO.read_text(), re.MULTILINE))
        return Memory(int(found["MemTotal"]) * 1024, int(found["MemAvailable"]) * 1024)
    except (OSError, KeyError):
        return None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
