"""One run at a time in an output folder."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
from datetime import datetime
from pathlib import Path
from types import TracebackType

from flux_db.console import say
from flux_db.errors import UserError, unwritable
from flux_db.output_folder import LOCK

# A forked worker shares the parent's lock and would hold it after the parent's death, so children close it at once.
_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def is_first_process() -> bool:
    """False for the scheduler that msrun starts and for every worker but the first: those do not take the lock."""
    return os.environ.get("MS_ROLE") != "MS_SCHED" and os.environ.get("RANK_ID", "0") == "0"


class OutputLock:
    """Holds the folder while the `with` block runs. The lock ends with the process, however it ends.

    The lock file itself stays: removing it would let two runs each lock a file of that name.
    """

    def __init__(self, output_dir: Path | str) -> None:
        self.output_dir = Path(output_dir)
        self._descriptor = -1

    def __enter__(self) -> "OutputLock":
        descriptor = self._open()
        try:
            self._lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        _held.add(descriptor)
        self._descriptor = descriptor
        _write_holder(descriptor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._descriptor not in _held:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        _held.remove(self._descriptor)
        os.close(self._descriptor)

    def _open(self) -> int:
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            # the file is emptied, and through a link that would be another one
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.output_dir / LOCK, flags, 0o644)
        except OSError as error:
            if (self.output_dir / LOCK).is_symlink():
                problem = f"--output_dir {self.output_dir}: its {LOCK} is a link; remove that"
                raise UserError(problem) from error
            raise unwritable(f"--output_dir {self.output_dir}: cannot be written", error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(f"--output_dir {self.output_dir}: its {LOCK} is not a file; remove that")
        return descriptor

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"--output_dir {self.output_dir}: another run is at work there ({_read_holder(descriptor)}); wait for"
                " its end, stop it, or name another folder"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            # Lustre, for one, is often mounted without locks; refusing to train there would help nobody.
            say(f"warning: the file system of {self.output_dir} has no locks; never start two runs on this folder")


def _write_holder(descriptor: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": _now()}
    # A full disk must not stop a run that only wants to leave its name.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it has not yet left its process number"


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
