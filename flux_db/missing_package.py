"""Imported first by every way in: a package that is not installed gives one line with what to do, not a traceback."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As sys.excepthook. The program ends with exit code 2."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or name.partition(".")[0] == __package__:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {sys.executable} has no package {name}; {_remedy(ROOT / '.venv')}", file=sys.stderr)
    raise SystemExit(2)


def _remedy(environment: Path) -> str:
    activate, is_active = environment / "bin" / "activate", Path(sys.prefix).resolve() == environment.resolve()
    if activate.is_file() and not is_active:
        return f"activate the environment of flux-db first: source {shlex.quote(os.path.relpath(activate))}"
    return "install what flux-db needs: pip install -e . in its folder"


sys.excepthook = report
