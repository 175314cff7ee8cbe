"""Ctrl-C and SIGTERM: the first lets the current step finish, the second Ctrl-C leaves at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from flux_db.console import say


class StopRequest:
    """While active, `signal` tells which signal asked the run to stop, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        say(f"\n{self.signal.name}: finishing this step, then saving (Ctrl-C again leaves at once)")

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0
