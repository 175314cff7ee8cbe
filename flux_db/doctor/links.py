"""The links between devices: an all-reduce of a LoRA's gradients, under msrun."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from flux_db import child
from flux_db.atomic import write_file
from flux_db.doctor.result import Row, judged, not_here
from flux_db.model.runtime import Runtime
from flux_db.training.launch import Devices, Supervisor

GRADIENT_MB = 179
"""Of a LoRA of rank 16 in FLUX.1-dev: 44.8 M numbers in float32."""
ROUNDS = 5
CHECK = "all-reduce"


class Reduce(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, x):
        return self.all_reduce(x)


def measure(runtime: Runtime, megabytes: int) -> Row:
    """In a worker: the sum of every rank's vector, compared bit by bit and timed."""
    length = megabytes * 10**6 // 4
    own = np.arange(length, dtype=np.float32) % 1024 + runtime.rank
    total = sum(range(runtime.world_size))
    wanted = (np.arange(length, dtype=np.float32) % 1024) * runtime.world_size + total
    cell, vector = Reduce(), Tensor(own, ms.float32)
    wrong = int((cell(vector).asnumpy() != wanted).sum())  # whole numbers: exact in any order
    start = time.monotonic()
    for _ in range(ROUNDS):
        last = cell(vector).asnumpy()[:1]
    seconds = (time.monotonic() - start) / ROUNDS
    differing = runtime.differing({"sum": cell(vector).asnumpy().tobytes(), "last": last.tobytes()})
    speed = megabytes / 1000 / seconds
    detail = f"{megabytes} MB over {runtime.world_size} devices in {seconds * 1000:.0f} ms, {speed:.2f} GB/s"
    if wrong or differing:
        detail += f"; {wrong} numbers wrong, {len(differing)} of 2 vectors not equal on all ranks"
    return judged(CHECK, not wrong and not differing, detail, "check the links: hccn_tool, and HCCL's log")


def work(runtime: Runtime, megabytes: int, file: Path) -> None:
    """What a worker does: measure, and leave the row for the process that started it."""
    row = measure(runtime, megabytes)
    if runtime.is_main:
        write_file(file, json.dumps(row._asdict()).encode())


def check_all(devices: int, device: str, megabytes: int) -> list[Row]:
    """Start the workers under msrun, and return what they found."""
    if devices == 1:
        return [not_here(CHECK, "needs several devices: --devices 8")]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flux_db-doctor-") as folder, Supervisor(Path(folder)) as supervisor:
        file = Path(folder) / "row.json"
        words = ["doctor", "--device", device, "--all_reduce_mb", str(megabytes), "--row_file", str(file)]
        with redirect_stdout(sys.stderr):  # a worker's log is shown; stdout is for the results
            code = supervisor.run_workers([child.MAIN, *words], Devices(devices=devices), 0)
        if code or not file.exists():
            return [judged(CHECK, False, f"the workers ended with exit code {code}", "see their messages above")]
        row = Row(**json.loads(file.read_text()))
    return [row._replace(seconds=round(time.monotonic() - start, 2))]
