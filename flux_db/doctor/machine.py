"""Checks of what is installed: versions, device, memory, disk. Each is a function of facts."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from flux_db import releases
from flux_db.doctor.result import Row, judged, not_here
from flux_db.model import cpu_conv
from flux_db.model.device import AscendDevice, AscendFacts, cann_warning, first_line, why_no_ascend

# As pyproject.toml pins them; of MindSpore it has a range.
PINNED = {"mindone": releases.MINDONE, "transformers": "4.57.1"}
GB = 2**30
# FLUX.1-dev in bf16 on one device: the transformer, and one file of its weights while it is loaded.
HOST_NEED = {"Ascend": 34 * GB, "CPU": 2 * GB}
DEVICE_NEED = 32 * GB
DISK_NEED = 2 * GB
# A device with less than this share of its memory free is in use by somebody.
FREE_SHARE = 0.9
_PROCESS = re.compile(r"^\|\s*(\d+)\s+\d+\s*\|\s*(\d+)\s*\|\s*(\S+)\s*\|\s*(\d+)\s*\|", re.MULTILINE)


class DeviceProcess(NamedTuple):
    """A process that has memory of a device, as npu-smi lists it."""

    device: int
    pid: int
    name: str
    megabytes: int


# --- facts -----------------------------------------------------------------------------------------------------------


def installed() -> dict[str, str]:
    found = {}
    for name in ("mindspore", *PINNED, "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def npu_smi() -> str | None:
    """What `npu-smi info` prints; None where there is none."""
    program = shutil.which("npu-smi")
    if program is None:
        return None
    try:
        return subprocess.run([program, "info"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None


def device_processes(text: str) -> list[DeviceProcess]:
    """The processes in the last table of `npu-smi info`."""
    tail = text[text.rfind("Process id") :] if "Process id" in text else ""
    return [DeviceProcess(int(device), int(pid), name, int(size)) for device, pid, name, size in _PROCESS.findall(tail)]


# --- checks ----------------------------------------------------------------------------------------------------------


def versions(found: Mapping[str, str]) -> Row:
    detail = ", ".join(f"{name} {version}" for name, version in found.items())
    wrong = [f"{name}=={version}" for name, version in PINNED.items() if found.get(name) != version]
    mindspore = found["mindspore"]
    if releases.numbers(mindspore) < releases.numbers(releases.TRIED[0]):
        wrong.insert(0, f"mindspore=={releases.TRIED[-1]}")
    if not found.get("numpy", "").startswith("1."):
        wrong.append('"numpy<2"')
    detail += f", Python {platform.python_version()}"
    row = judged("versions", not wrong, detail, f"{Path(sys.executable).name} -m pip install {' '.join(wrong)}")
    return row if wrong else row._replace(advice=releases.warning(mindspore) or "")


def plugin(facts: AscendFacts) -> Row:
    """MindSpore's Ascend plugin, and its pair, CANN."""
    check = "MindSpore and CANN"
    reason = why_no_ascend(facts)
    if not facts.loaded:
        details = first_line(facts.error)
        row = judged(check, False, reason or "", details and f"MindSpore reports: {details}")
        # without CANN and without an Ascend card this is a CPU machine, and nothing is broken
        return not_here(check, reason or "") if facts.devices == 0 and facts.cann is None else row
    warning = cann_warning(facts)
    detail = f"CANN {facts.cann or 'of unknown version'}; MindSpore accepts {', '.join(facts.accepted_cann)}"
    return judged(check, warning is None, detail, "install a CANN version that fits")


def driver(facts: AscendFacts) -> Row:
    if facts.driver is None and facts.devices == 0:
        return not_here("Ascend driver", "not installed")
    row = judged("Ascend driver", facts.driver is not None, facts.driver or "not found", "install the driver")
    return row if facts.driver is None else row._replace(advice=releases.driver_warning(facts.cann, facts.driver) or "")


def convolution(device: str) -> Row:
    """Which form of Conv2d the VAE gets."""
    if device != "CPU":
        return not_here("Conv2d", "mindone's own operator on Ascend")
    return Row("Conv2d", "pass", cpu_conv.chosen()[1])


def hardware(facts: AscendFacts, found: AscendDevice | None) -> Row:
    if found is None:
        return not_here("device", why_no_ascend(facts) or "not used")
    detail = f"{found.name or found.soc}, {found.memory / GB:.0f} GB HBM, {facts.devices} in this machine"
    return judged(
        "device", found.memory >= DEVICE_NEED * 0.9, detail, "FLUX.1-dev needs 32 GB with --shard_base, or 64 GB"
    )


def free_memory(found: AscendDevice | None, processes: list[DeviceProcess] | None) -> Row:
    """Free memory of the device, and who else is on it."""
    check = "free HBM"
    if found is None:
        return not_here(check, "no Ascend device in use")
    others = ", ".join(f"{p.name} (process {p.pid}, {p.megabytes} MB on device {p.device})" for p in processes or [])
    detail = f"{found.free / GB:.1f} of {found.memory / GB:.1f} GB" + (f"; in use by {others}" if others else "")
    return judged(check, found.free >= FREE_SHARE * found.memory, detail, "end the other processes, or set DEVICE_ID")


def host_memory(available: int, device: str) -> Row:
    need = HOST_NEED[device]
    detail = f"{available / GB:.1f} GB available; needed about {need / GB:.0f} GB for each process"
    return judged("host memory", available >= need, detail, "end other programs, or take a machine with more memory")


def disk(free: int, folder: Path) -> Row:
    detail = f"{free / GB:.1f} GB free in {folder}"
    return judged("disk", free >= DISK_NEED, detail, "make room, or work in another folder")


def check_all(facts: AscendFacts, device: str, found: AscendDevice | None) -> list[Row]:
    text = npu_smi()
    processes = device_processes(text) if text else None
    folder = Path.cwd()
    return [
        versions(installed()),
        plugin(facts),
        driver(facts),
        hardware(facts, found),
        convolution(device),
        free_memory(found, processes),
        host_memory(psutil.virtual_memory().available, device),
        disk(shutil.disk_usage(folder).free, folder),
    ]
