"""The device of a run: whether it is here. Found before anything is fetched or encoded."""

from __future__ import annotations

import os

from flux_db.errors import UserError
from flux_db.model import device
from flux_db.model.device import AscendFacts
from flux_db.problem import Problem
from flux_db.settings.schema import Config


def check_device(config: Config) -> list[Problem]:
    """Why this machine cannot compute the run. Imports MindSpore, unless the run is for the CPU."""
    wanted, precision = config.runtime.device, config.runtime.mixed_precision
    # bf16 on the CPU is among the problems of the values; a worker reports its device when it joins the others
    if wanted == "CPU" or device.is_one_of_several():
        return []
    try:
        name, reason = device.choose(wanted, _facts())
    except UserError as error:
        return [Problem(text, flag="device", details=tuple(error.details)) for text in error.problems]
    soc = device.soc_name() if name == "Ascend" else ""
    found = (device.precision_problem(name, soc, precision), device.overflow_problem(name, os.environ))
    return [Problem(f"{text} ({reason})", flag="device", also=("mixed_precision",)) for text in found if text]


def check_processes(config: Config) -> list[Problem]:
    """Whether msrun started this process, if the settings demand several."""
    if not config.runtime.distributed or device.is_one_of_several():
        return []
    text = "--distributed: msrun did not start this process; start with scripts/train_multi.sh, or leave the flag out"
    return [Problem(text, flag="distributed")]


def describe_device(config: Config) -> str:
    """The device that a run here would use, and whether it is here."""
    wanted = config.runtime.device
    if wanted == "CPU":
        return "CPU, here"
    reason = device.why_no_ascend(_facts())
    if reason is None:
        return "Ascend, here"
    return f"CPU, because Ascend is not here: {reason}" if wanted == "auto" else "Ascend, not here"


def _facts() -> AscendFacts:
    import flux_db.model.late_scipy  # noqa: F401  before MindSpore

    return device.ascend_facts()
