"""The device: which one and why, graph mode, precision, and this process's place among the devices."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
import psutil
from mindspore import Tensor, ops
from mindspore.communication import get_group_size, get_rank, init

from flux_db.console import say
from flux_db.errors import UserError
from flux_db.model import lazy_mindone, operators
from flux_db.settings.schema import RuntimeConfig

# every module that imports mindone imports this one first
lazy_mindone.install()

DTYPES = {"no": ms.float32, "fp16": ms.float16, "bf16": ms.bfloat16}


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

    def memory_mb(self) -> dict[str, float]:
        """Of this process now, and on Ascend of its device at most, in MB; by the names in metrics.jsonl."""
        found = {"memory_mb": round(psutil.Process().memory_info().rss / 1e6, 1)}
        if self.device == "Ascend":
            found["device_memory_mb"] = round(ms.hal.max_memory_allocated() / 1e6, 1)
        return found

    def barrier(self) -> None:
        """Wait for the other ranks; a one-element sum, because the CPU backend has no barrier."""
        self.sum(np.ones(1))


def start(config: RuntimeConfig, *, alone: bool = False) -> Runtime:
    """Set up MindSpore for this process. Call it once, before any model is built.

    `alone`: for work that one process does for all of them, before they start.
    """
    device, reason = choose_device(config.device)
    if device == "CPU" and config.mixed_precision == "bf16":
        raise UserError(
            f"--mixed_precision bf16: not on {device} ({reason}), which has no bf16 kernels; use no or fp16"
        )
    if device == "Ascend":
        # msrun gives each worker its device by DEVICE_ID
        ms.set_device(device, int(os.environ.get("DEVICE_ID", "0")))
        # the same bits in every run and on every rank, or nothing could be resumed exactly
        ms.set_deterministic(True)
        ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": config.jit_level})
    else:
        ms.set_device(device)
        ms.set_context(mode=ms.GRAPH_MODE)
    rank, world_size = (0, 1) if alone else _join(config)
    with quiet():
        operators.install(device)
    if rank == 0:
        devices = f", {world_size} processes" if world_size > 1 else ""
        say(f"device {device} ({reason}), graph mode, precision {config.mixed_precision}{devices}")
    return Runtime(device=device, dtype=DTYPES[config.mixed_precision], rank=rank, world_size=world_size)


def choose_device(wanted: str) -> tuple[str, str]:
    """The device to use, and the reason in words."""
    with quiet():
        available = ms.hal.is_available("Ascend")
    if wanted == "Ascend" and not available:
        raise UserError(
            "--device Ascend: MindSpore sees no Ascend device here; check npu-smi and CANN, or use --device CPU"
        )
    if wanted != "auto":
        return wanted, "asked for by --device"
    return ("Ascend", "found") if available else ("CPU", "no Ascend device found")


def _join(config: RuntimeConfig) -> tuple[int, int]:
    if "MS_ROLE" not in os.environ:
        if config.distributed:
            raise UserError("--distributed: msrun did not start this process; use scripts/train_multi.sh, or no flag")
        return 0, 1
    init()
    # mindone's TrainStep looks at the mode when it is built
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    return get_rank(), get_group_size()


# loading.py compares the weights itself and refuses what is wrong: mindone's report does not know T5's tied embedding.
_JUDGED = re.compile(r"Some weights of .* were not (initialized from|used when)", re.DOTALL)
# Remarks for the authors of the code.
_ABOUT_CODE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, SyntaxWarning, ResourceWarning)


class quiet:
    """Keep mindone's and transformers' remarks on import and loading off the terminal.

    Errors still raise, and warnings are printed at the end, because they may be about the result.
    """

    def __enter__(self) -> None:
        sys.stdout.flush()  # what was printed before is not a remark
        self._stdout = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        self._filters = warnings.catch_warnings(record=True)
        self._warnings = self._filters.__enter__()
        warnings.simplefilter("always")
        self._records: list[logging.LogRecord] = []
        self._make_record = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._keep_record)

    def __exit__(self, *_: object) -> None:
        logging.setLogRecordFactory(self._make_record)
        self._filters.__exit__(None, None, None)
        sys.stdout.flush()
        os.dup2(self._stdout, 1)
        os.close(self._stdout)
        for text in dict.fromkeys(self._remarks()):
            say(f"warning: {text}")

    def _keep_record(self, *args: Any, **options: Any) -> logging.LogRecord:
        record = self._make_record(*args, **options)
        if record.levelno < logging.ERROR:
            if record.levelno >= logging.WARNING:
                self._records.append(record)
            record.levelno = -1  # below the level of every handler
        return record

    def _remarks(self) -> Iterator[str]:
        texts = [(record.name, record.getMessage()) for record in self._records]
        texts += [
            (warning.category.__name__, str(warning.message))
            for warning in self._warnings
            if not issubclass(warning.category, _ABOUT_CODE)
        ]
        for source, text in texts:
            if not _JUDGED.match(text):
                yield f"{source}: {' '.join(text.split())[:500]}"
