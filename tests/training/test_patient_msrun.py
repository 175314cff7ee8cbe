"""msrun's waiting for its workers, and their ranks in its log."""

import os
import sys
import time

import program

from flux_db.training import worker_logs
from flux_db.training.launch import MSRUN
from flux_db.training.patient_msrun import PAUSE_SECONDS, PatientProcess


def test_waiting_for_a_worker_takes_no_core():
    with PatientProcess([sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(3)"]) as process:
        cpu, asked = time.process_time(), 1
        while process.poll() is None:
            asked += 1
    assert process.returncode == 3
    assert asked < 0.5 / PAUSE_SECONDS + 20 and time.process_time() - cpu < 0.2


def test_a_worker_is_logged_with_its_rank(tmp_path, capsys):
    for role in ("MS_SCHED", "MS_WORKER"):
        with PatientProcess(["true"], env=os.environ | {"MS_ROLE": role, "RANK_ID": "3"}) as process:
            process.wait()
    (tmp_path / worker_logs.MSRUN).write_text(capsys.readouterr().out)
    assert worker_logs.ranks(tmp_path) == {process.pid: 3}


def test_the_launcher_starts_mindspores_msrun():
    done = program.run([*MSRUN, "--help"])
    assert done.returncode == 0 and done.stdout.startswith("usage: msrun") and "--worker_num" in done.stdout
