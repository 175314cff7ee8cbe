"""`dry-run-ascend`: the memory of the configured step as MindSpore computes it, with CANN and without a free device.

A child process compiles the step for Ascend with MS_SIMULATION_LEVEL=1, in which MindSpore runs everything but the
kernels, and calls it once. MindSpore writes the peak into its log when the process ends.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from flux_db import child
from flux_db.console import say, stage
from flux_db.errors import RunError, UserError
from flux_db.model import device
from flux_db.model.device import AscendFacts
from flux_db.settings.command_line import to_yaml
from flux_db.settings.schema import Config

IN_CHILD = "FLUX_DB_SIMULATED"
"""Environment variable: this process is the child."""
# One rank of one; the log is on stderr, with the lines of the level of information.
ENVIRONMENT = {device.SIMULATION: "1", "GLOG_v": "1", "GLOG_logtostderr": "1", "RANK_ID": "0", "RANK_SIZE": "1"}

_LINES = {
    "device": re.compile(r"Device (?:MOC|HBM) memory size: (\d+)M"),
    "usable": re.compile(r"MindSpore Used memory size: (\d+)M"),
    "peak": re.compile(r"Used peak memory usage \(without fragments\): (\d+)M"),
    "peak_with_fragments": re.compile(r"Actual peak memory usage \(with fragments\): (\d+)M"),
}
_LOG_LINE = re.compile(r"\[(INFO|WARNING|DEBUG|VLOG)")
SHOWN_LINES = 15


class SimulatedMemory(NamedTuple):
    """As MindSpore writes it, in MB."""

    device: int | None = None
    usable: int | None = None
    peak: int | None = None
    peak_with_fragments: int | None = None


def problem(config: Config, facts: AscendFacts) -> str | None:
    """Why the step cannot be simulated here; None if it can."""
    if reason := device.why_no_ascend(replace(facts, devices=max(1, facts.devices))):
        return f"dry-run-ascend: {reason}. It needs CANN and MindSpore's Ascend plugin, but no Ascend card"
    if config.runtime.device == "CPU":
        return "--device CPU: dry-run-ascend simulates Ascend; leave the flag out"
    if config.runtime.shard_base or config.runtime.distributed:
        return "--shard_base, --distributed: dry-run-ascend simulates one device alone; leave them out"
    return None


def read_memory(lines: Iterable[str]) -> SimulatedMemory:
    """The largest of each number in MindSpore's log."""
    found: dict[str, int] = {}
    for line in lines:
        if "memory" not in line:
            continue
        for name, pattern in _LINES.items():
            if match := pattern.search(line):
                found[name] = max(int(match[1]), found.get(name, 0))
    return SimulatedMemory(**found)


def describe(memory: SimulatedMemory) -> list[str]:
    """What a person reads."""
    peak = memory.peak_with_fragments or memory.peak
    if not peak:
        return ["MindSpore wrote no peak into its log"]
    lines = [f"peak of the step, as MindSpore computes it: {peak / 1024:.1f} GB"]
    if memory.peak and memory.peak != peak:
        lines.append(f"of which fragments: {(peak - memory.peak) / 1024:.1f} GB")
    if memory.usable:
        fits = "it fits" if peak <= memory.usable else "it does not fit"
        lines.append(f"memory that MindSpore may use on the simulated device: {memory.usable / 1024:.1f} GB; {fits}")
    lines.append("The step alone: drawing samples needs the VAE on top.")
    return lines


def run(config: Config) -> int:
    """Simulate in a child and print what was found; returns the exit code."""
    if reason := problem(config, device.ascend_facts()):
        raise UserError(reason)
    say("MindSpore compiles for Ascend and launches no kernel; this mode was never run by the authors of flux-db")
    with tempfile.TemporaryFile() as file:
        file.write(to_yaml(config).encode())
        file.seek(0)
        words = child.command("dry-run-ascend", "--config", f"/dev/fd/{file.fileno()}")
        with stage("Simulating the step"):
            code, memory, last = watch(words, files=[file.fileno()])
    if code:
        raise RunError("the simulated step failed; its last lines:", last)
    for line in describe(memory):
        print(line)
    return 0 if memory.peak or memory.peak_with_fragments else 1


def watch(words: Sequence[str], files: Sequence[int] = ()) -> tuple[int, SimulatedMemory, list[str]]:
    """Run the child; its exit code, the memory in its log, and its last lines that are not of the log. The log of a
    large model has millions of lines, so none are kept."""
    last: deque[str] = deque(maxlen=SHOWN_LINES)
    environment = child.environment(**ENVIRONMENT, **{IN_CHILD: "1"})
    process = subprocess.Popen(
        words,
        env=environment,
        pass_fds=files,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def lines() -> Iterable[str]:
        for line in process.stdout or ():
            if not _LOG_LINE.match(line) and line.strip():
                last.append(line.rstrip())
            yield line

    memory = read_memory(lines())
    return process.wait(), memory, list(last)
