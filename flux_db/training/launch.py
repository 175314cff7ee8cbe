"""`python -m flux_db launch`: several devices under msrun, looked after from start to end.

msrun starts one process per device and ends them all when one fails. What it lacks is added here: the encoding before
the devices start, the first rank's progress on the terminal, signals passed on to the workers, a short report of the
worker that failed, the true exit code, and no process left behind.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from flux_db import child
from flux_db.check.memory import LOCAL_DEVICES
from flux_db.console import counted, say
from flux_db.data.selection import lacks_class_images
from flux_db.errors import UserError
from flux_db.interrupt import COMMAND, heeded
from flux_db.model.device import PATIENCE_SECONDS
from flux_db.settings.schema import Config
from flux_db.training import patient_msrun, worker_logs

MARK = "FLUX_DB_LAUNCH"
"""Environment variable by which every process of a launch is found again."""


MSRUN = patient_msrun.COMMAND

# A rank may wait this long for another: drawing samples and compiling take their time.
PATIENCE = {"HCCL_CONNECT_TIMEOUT": str(PATIENCE_SECONDS), "HCCL_EXEC_TIMEOUT": str(PATIENCE_SECONDS)}
# On one server msrun itself sees a dead worker at once, so nothing is lost by waiting long for its sign of life. On
# several the default of 30 s stays: it is how the others notice.
ONE_SERVER_PATIENCE = {"MS_NODE_TIMEOUT": str(PATIENCE_SECONDS)}
# Workers of other servers are waited for this long.
CLUSTER_SECONDS = 600
# The scheduler ends by itself after its workers. If one of them failed it waits for minutes, and is stopped.
SCHEDULER_SECONDS, FAILED_SCHEDULER_SECONDS = 60.0, 1.0
# Several servers must agree on one without talking.
DEFAULT_PORT = 8118
# Beyond any server and any cluster.
MOST_DEVICES, MOST_NODES = 256, 10_000


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Where the processes run."""

    devices: int
    """On each server."""
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    port: int | None = None
    """None: a free one is found."""
    bind_core: bool = False
    """msrun ties each worker to CPU cores near its device."""

    @property
    def total(self) -> int:
        return self.devices * self.nodes

    def problems(self) -> list[str]:
        bounds = (
            ("DEVICES", self.devices, MOST_DEVICES),
            ("NODES", self.nodes, MOST_NODES),
            ("PORT", self.port, 65534),
        )
        found = [
            f"{name}={value}: must be from 1 to {most}"
            for name, value, most in bounds
            if value is not None and not 1 <= value <= most
        ]
        if not 0 <= self.node_rank < max(1, self.nodes):
            found.append(f"NODE_RANK={self.node_rank}: with NODES={self.nodes} it is 0 to {self.nodes - 1}")
        if self.nodes > 1 and self.master_addr in ("127.0.0.1", "localhost"):
            found.append("MASTER_ADDR: several servers need the address of the first one")
        return found


def launch(config: Config, flags: Sequence[str], where: Devices, log_dir: Path | None = None) -> int:
    """Prepare, train on all devices, and return the exit code of the run."""
    if problems := where.problems():
        raise UserError(problems)
    log_dir = log_dir or Path(config.output.output_dir, config.output.logging_dir)
    if where.nodes > 1:
        log_dir /= f"server_{where.node_rank}"  # the folder is seen by all of them
    with Supervisor(log_dir) as supervisor:
        devices = {"MS_WORKER_NUM": str(where.total), LOCAL_DEVICES: str(where.devices)}
        if config.output.dry_run:
            return supervisor.run([sys.executable, child.SCRIPT, *flags], **devices)
        if where.total == 1:
            return supervisor.run_logged([sys.executable, child.SCRIPT, *flags])
        # in a process of its own: MindSpore starts threads, and signals are for this one alone
        if code := supervisor.run(child.command("device", *flags)):
            return code
        if lacks_class_images(config):
            if where.node_rank == 0 and (code := supervisor.run(child.command("encode", *flags))):
                return code
            say(f"Drawing class pictures on {where.total} devices")
            if code := supervisor.run_workers([child.MAIN, "class-images", *flags], where, 1):
                return code
        if where.node_rank == 0 and (code := supervisor.run(child.command("prepare", *flags), **devices)):
            return code
        return supervisor.run_workers([child.SCRIPT, *flags], where, 0, uploads=config.hub.push_to_hub)


class Supervisor:
    """Runs one command after the other, and lets none outlive it."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.mark = uuid.uuid4().hex
        self.signal: signal.Signals | None = None
        self._msrun: subprocess.Popen | None = None

    def __enter__(self) -> Supervisor:
        self._before = {number: signal.signal(number, self._on_signal) for number in heeded()}
        return self

    def __exit__(self, *_: object) -> None:
        for process in _marked(self.mark):
            _send(process.pid, signal.SIGKILL)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"\n{self.signal.name}: stopping the run (Ctrl-C again kills it)\n".encode())
            self._pass_on(self.signal)
        elif number == signal.SIGINT:  # a closed terminal or a scheduler may send the others several times
            for process in _marked(self.mark):
                _send(process.pid, signal.SIGKILL)

    def _pass_on(self, number: signal.Signals) -> None:
        processes = list(_marked(self.mark))
        # msrun would kill the workers on Ctrl-C, and leave them alone for ever on SIGTERM: so it is deaf
        workers = [p for p in processes if p.role == "MS_WORKER"]
        if self._msrun and not workers:
            self._msrun.kill()
        for process in workers or processes:
            joining = process.role == "MS_WORKER" and worker_logs.is_silent(self.log_dir, process.rank)
            # MindSpore hears no signal while it waits for the other workers
            _send(process.pid, signal.SIGKILL if joining else number)

    def run(self, command: Sequence[str], **variables: str) -> int:
        """One process, on this terminal; returns its exit code."""
        if self.signal:
            return 128 + self.signal
        environment = child.environment(**{MARK: self.mark}, **variables)
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        return self._wait(process)

    def run_logged(self, command: Sequence[str]) -> int:
        """One process, whose log is shown on the terminal and kept; returns its exit code."""
        worker_logs.keep_old(self.log_dir)
        path = worker_logs.worker(self.log_dir, 0)
        environment = child.environment(**{MARK: self.mark, COMMAND: "bash scripts/train_single.sh"})
        with path.open("wb") as log, worker_logs.follow(path):
            process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log)
            return self._wait(process)

    def run_workers(self, command: Sequence[str], where: Devices, stage: int, *, uploads: bool = False) -> int:
        """The command on every device under msrun; returns the exit code of the worker that failed first, or 0.

        `uploads`: a run still has something to do when its files are written.
        """
        worker_logs.keep_old(self.log_dir)
        port = _port(where, stage)
        if where.node_rank:
            self._wait_for_first_server(where.master_addr, port)
        if self.signal:
            return 128 + self.signal
        msrun = [
            *MSRUN,
            f"--worker_num={where.total}",
            f"--local_worker_num={where.devices}",
            f"--master_addr={where.master_addr}",
            f"--master_port={port}",
            f"--log_dir={self.log_dir}",
            f"--cluster_time_out={CLUSTER_SECONDS}",
            "--join=True",
            f"--tail_worker_log={where.total}",  # none: the first one's log is shown here
        ]
        if where.nodes > 1:
            msrun.append(f"--node_rank={where.node_rank}")
        if where.bind_core:
            msrun.append("--bind_core=True")
        say(f"Starting {counted(where.devices, 'worker')}; logs are in {self.log_dir}")
        shown = worker_logs.follow(worker_logs.worker(self.log_dir, 0)) if where.node_rank == 0 else nullcontext()
        with (self.log_dir / worker_logs.MSRUN).open("wb") as output, shown:
            words = child.tied([*msrun, *command])
            self._msrun = subprocess.Popen(
                words, env=self._environment(where), start_new_session=True, stdout=output, stderr=output
            )
            if self.signal:
                self._pass_on(self.signal)
            self._watch(self._msrun)
        code = self._exit_code(self._msrun.returncode)
        self._msrun = None
        if code == 0 or self.signal:
            return code
        if not uploads and worker_logs.crashed_when_done(self.log_dir):
            say("note: MindSpore crashed while it shut down; the run was complete, and all its files are written")
            return 0
        return worker_logs.report_failure(self.log_dir)

    def _environment(self, where: Devices) -> dict[str, str]:
        # msrun starts plain `python`
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        patience = PATIENCE | ({} if where.nodes > 1 else ONE_SERVER_PATIENCE)
        given = {MARK: self.mark, COMMAND: launched_as(where), LOCAL_DEVICES: str(where.devices)}
        return {**patience, **child.environment(PATH=path, **given)}

    def _wait(self, process: subprocess.Popen) -> int:
        if self.signal:  # it came before the process was there
            self._pass_on(self.signal)
        return self._exit_code(process.wait())

    def _watch(self, msrun: subprocess.Popen) -> None:
        """Wait for msrun, and help it to an end when its workers are gone."""
        alone_since = None
        while msrun.poll() is None:
            time.sleep(0.2)
            workers = any(p.role == "MS_WORKER" and p.parent == msrun.pid for p in _marked(self.mark))
            if workers or not worker_logs.ranks(self.log_dir):
                alone_since = None
                continue
            alone_since = alone_since or time.monotonic()
            failed = worker_logs.has_failed(self.log_dir)
            if time.monotonic() - alone_since > (FAILED_SCHEDULER_SECONDS if failed else SCHEDULER_SECONDS):
                for process in _marked(self.mark):
                    if process.role == "MS_SCHED":
                        _send(process.pid, signal.SIGKILL)

    def _wait_for_first_server(self, address: str, port: int) -> None:
        say(f"Waiting for the first server at {address}:{port}, which encodes before it starts its devices")
        while not self.signal:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5):
                return
            time.sleep(2)

    def _exit_code(self, code: int) -> int:
        if self.signal and code:
            return 128 + self.signal
        return 128 - code if code < 0 else code


# --- processes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    role: str
    rank: int


def _marked(mark: str) -> Iterator[Process]:
    """All processes that carry the mark in their environment, whoever their parent is by now."""
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            variables = process.environ()
            if variables.get(MARK) != mark:
                continue
            parent = process.ppid()
        except (psutil.Error, OSError):
            continue  # it has just ended, or belongs to someone else
        yield Process(process.pid, parent, variables.get("MS_ROLE", ""), int(variables.get("RANK_ID", "0")))


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _port(where: Devices, stage: int) -> int:
    """The port of the scheduler; on several servers each stage has its own, so that none joins the wrong one."""
    if where.port is not None or where.nodes > 1:
        return (where.port or DEFAULT_PORT) + stage
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launched_as(where: Devices) -> str:
    """The words that start the same launch again, but for the trainer's flags."""
    bound = ["BIND_CORE=1"] if where.bind_core else []
    if where.nodes > 1:
        return shlex.join(
            [
                "env",
                *bound,
                f"NODES={where.nodes}",
                f"NODE_RANK={where.node_rank}",
                f"MASTER_ADDR={where.master_addr}",
                f"DEVICES={where.devices}",
                "bash",
                "scripts/train_nodes.sh",
            ]
        )
    return shlex.join(["env", *bound, f"DEVICES={where.devices}", "bash", "scripts/train_multi.sh"])
