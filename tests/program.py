"""The program as a user starts it: in a bare environment. Every test that starts it does so through here.

MindSpore changes the C environment of the process that imports it (OMP_NUM_THREADS=1, which os.environ does not show).
A child that inherited that would run other threads than a user's, and a broken Ctrl-C once passed every test by it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
HOME = Path.home()
"""Of the programs; conftest.py gives them one of their own, where they share the graphs that they store."""
SCRIPT = ROOT / "train_dreambooth_lora_flux.py"
PYTHON = sys.executable


def environment(home: Path | str | None = None, **variables: str) -> dict[str, str]:
    """PATH, HOME and LANG, and nothing else but what the test gives."""
    path = f"{Path(PYTHON).parent}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(home or HOME), "LANG": "C.UTF-8", **variables}


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line; True is a switch, a list repeats its flag."""
    words = []
    for name, value in settings.items():
        if value is True:
            words.append(f"--{name}")
        else:
            items = value if isinstance(value, list) else [value]
            words += [word for item in items for word in (f"--{name}", str(item))]
    return words


def trainer(settings: Mapping[str, Any]) -> list[str]:
    return [PYTHON, str(SCRIPT), *flags(settings)]


def command(name: str, *words: object) -> list[str]:
    """`python -m flux_db NAME ...`"""
    return [PYTHON, "-m", "flux_db", name, *map(str, words)]


def script(name: str, *words: object) -> list[str]:
    """A script of scripts/, for bash."""
    return ["bash", str(ROOT / "scripts" / name), *map(str, words)]


def run(words: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 300, **options: Any):
    """Run to the end; output as text."""
    options = {"capture_output": True, "text": True, "errors": "replace", "cwd": ROOT, **options}
    return subprocess.run(list(words), env=dict(env or environment()), timeout=timeout, check=False, **options)


def start(words: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
    """Start and return at once."""
    options = {"text": True, "errors": "replace", "cwd": ROOT, **options}
    return subprocess.Popen(list(words), env=dict(env or environment()), **options)


def descendants(pid: int) -> list[int]:
    """Its children, their children, and so on."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended; one that nobody waited for has."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """What the condition returns as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    pytest.fail(f"not within {seconds} s: {what}")
