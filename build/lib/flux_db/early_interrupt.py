"""Imported first by every way in: Ctrl-C during the other imports ends the program without Python's traceback."""

import signal


def hush() -> None:
    """Let the system end this process at Ctrl-C, unless it was started to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def hear() -> None:
    """Ctrl-C is an exception again, which the program reports in one line."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


hush()
