"""msrun without MindSpore, as the launcher meets it: started in its place, it starts two workers and a scheduler.

What it does was read from MindSpore 2.7.1 (mindspore/parallel/cluster/process_entity/_api.py) and is held against real
jobs by the other tests of test_launch.py: the variables and log files of the workers, the line about the first worker
that failed, the end of all others, and the long wait for the scheduler after a failure.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from flux_db.training.patient_msrun import PatientProcess  # noqa: E402

WORKER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from flux_db.child import end_with_parent
end_with_parent()
role, rank, wrong = os.environ["MS_ROLE"], os.environ["RANK_ID"], os.environ["WRONG"]
if role == "MS_SCHED":
    time.sleep(300)
if rank == "1" and wrong == "fail_before_init":
    sys.exit("error: this rank fails before it has joined the others")
print("Loading the transformer ...", flush=True)
if wrong == "crash_when_done" and rank == "0":
    print("Done.", flush=True)
    os.kill(os.getpid(), 11)
if rank == "1" and wrong == "raise_after_init":
    raise RuntimeError("this rank fails after it has joined the others")
time.sleep(300)
"""


def start(log: Path, words: list[str], **variables: str) -> PatientProcess:
    command = [sys.executable, "-c", WORKER, str(ROOT), *words]
    with log.open("wb") as file:
        return PatientProcess(command, env=os.environ | variables, stdout=file, stderr=file, start_new_session=True)


def main() -> int:
    given = dict(
        word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word
    )
    logs, words = Path(given["log_dir"]), [word for word in sys.argv[1:] if "=" not in word]
    scheduler = start(logs / "scheduler.log", words, MS_ROLE="MS_SCHED", RANK_ID="0")
    workers = [
        start(logs / f"worker_{rank}.log", words, MS_ROLE="MS_WORKER", RANK_ID=str(rank))
        for rank in range(int(given["local_worker_num"]))
    ]
    while not (failed := [worker for worker in workers if worker.poll()]):
        pass
    print(
        f"[ERROR] Worker process {failed[0].pid} exit with exception. Error code: {failed[0].returncode}.", flush=True
    )
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
    scheduler.wait()
    return 1


if __name__ == "__main__":
    sys.exit(main())
