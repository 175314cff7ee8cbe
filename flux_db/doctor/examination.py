"""`doctor`: all checks in order, and the table."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from flux_db.console import stage
from flux_db.doctor import links, machine, operators, step, table
from flux_db.model import device, runtime
from flux_db.settings.schema import RuntimeConfig


def examine(wanted: str, devices: int, megabytes: int, *, json: bool) -> int:
    """Check everything and print the results; returns the exit code."""
    facts = device.ascend_facts()
    name, _ = device.choose(wanted, facts)
    # before this process takes a device for itself
    with stage(f"Checking the links between {devices} devices") if devices > 1 else nullcontext():
        rows = links.check_all(devices, name, megabytes)
    here = runtime.start(RuntimeConfig(device=wanted, compile_cache="off"), alone=True)
    rows = machine.check_all(facts, name, device.ascend_device() if name == "Ascend" else None) + rows
    with stage("Checking operators against numpy"):
        rows += operators.check_all(here)
    with stage("Checking a training step of two blocks"):
        rows += step.check_all(here)
    print(table.as_json(rows, name) if json else table.as_text(rows, name))
    return 0 if table.is_healthy(rows) else 1


def work(wanted: str, megabytes: int, file: Path) -> int:
    """In a worker that msrun started."""
    links.work(runtime.start(RuntimeConfig(device=wanted, distributed=True, compile_cache="off")), megabytes, file)
    return 0
