"""MindSpore's msrun, which waits for its workers without taking a core from them, and logs which rank each one has.

Its own loop asks each worker whether it has ended, and the next one at once, for as long as the job lasts. And it
names a worker that failed by the number of its process, which is not found anywhere else once it has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PAUSE_SECONDS = 0.05
RANK_LINE = "Worker process {process} has rank {rank}"

_START = "import sys; sys.path[0] = sys.argv.pop(1); from flux_db.training.patient_msrun import main; main()"

COMMAND = [sys.executable, "-c", _START, str(Path(__file__).resolve().parents[2])]
"""The words that start it; msrun's own follow."""


class PatientProcess(subprocess.Popen):
    """A process that logs its rank when it starts, and takes its time to answer while it runs."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        variables = options.get("env") or os.environ
        if variables.get("MS_ROLE") == "MS_WORKER":
            print(RANK_LINE.format(process=self.pid, rank=variables["RANK_ID"]), flush=True)

    def poll(self) -> int | None:
        code = super().poll()
        if code is None:
            time.sleep(PAUSE_SECONDS)
        return code


def main() -> None:
    # before MindSpore is imported: msrun finds the class by its name
    subprocess.Popen = PatientProcess
    from mindspore.parallel.cluster.run import main as msrun

    sys.argv[0] = "msrun"
    sys.exit(msrun())
