"""MindSpore's msrun, which waits for its workers without taking a core from them.

Its own loop asks each worker whether it has ended, and the next one at once, for as long as the job lasts.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

PAUSE_SECONDS = 0.05

_START = "import sys; sys.path[0] = sys.argv.pop(1); from flux_db.training.patient_msrun import main; main()"

COMMAND = [sys.executable, "-c", _START, str(Path(__file__).resolve().parents[2])]
"""The words that start it; msrun's own follow."""


class PatientProcess(subprocess.Popen):
    """A process that takes its time to answer while it runs."""

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
