"""The status of a run: one small file in its output folder that is true at any time."""

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from flux_db import __version__, atomic
from flux_db.console import say
from flux_db.errors import describe
from flux_db.files import read_text
from flux_db.output_folder import STATUS

SCHEMA = 1

Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True)
class RunStatus:
    """The truth about an output folder; `running` without a holder of the lock means that the run was killed."""

    status: Status
    step: int
    last_good_checkpoint: str | None
    message: str | None
    time: str
    tool: str
    schema: int


def write_status(
    output_dir: Path | str,
    status: Status,
    *,
    step: int,
    last_good_checkpoint: Path | str | None,
    message: str | None = None,
) -> None:
    """Replace the folder's `train_state.json`. A disk that refuses it is reported and ends nothing."""
    if status not in get_args(Status):
        raise ValueError(f"no such status: {status}")
    good = None if last_good_checkpoint is None else str(last_good_checkpoint)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    state = RunStatus(status, step, good, message, now, f"flux_db {__version__}", SCHEMA)
    try:
        atomic.write_file(Path(output_dir, STATUS), (json.dumps(asdict(state), indent=2) + "\n").encode())
    except OSError as problem:
        say(f"warning: the run's status was not written: {describe(problem)}; the checkpoints are not affected")


def read_status(output_dir: Path | str) -> RunStatus | None:
    """The state last written; None where there is none that this version can read."""
    try:
        return RunStatus(**json.loads(read_text(Path(output_dir, STATUS))))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
