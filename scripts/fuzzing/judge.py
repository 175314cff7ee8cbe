"""Whether a case held: how the program ended, what it printed, and what it did to the files around it."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from fuzzing.case import Case

# So much of a program's text is an answer; more is a flood.
MOST_TEXT = 200_000

# Larger files are compared by size and time.
HASHED = 4 * 2**20

# Where libraries may keep what they like.
ALWAYS = ("home/.cache", "home/.config")

_CRASH = re.compile(r"Traceback \(most recent call last\)|Exception ignored in|Fatal Python error")
# A line that names the source, which only its author understands.
_WARNING = re.compile(r"^\S+\.py:\d+: \w*Warning:.*", re.M)

Snapshot = dict[str, tuple]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended. A code below 0 is a signal."""

    code: int
    stdout: bytes
    stderr: bytes
    seconds: float
    memory_mb: float
    hung: bool = False
    left_behind: bool = False
    """Processes were still there when it had ended."""


def snapshot(folder: Path) -> Snapshot:
    """Everything in the folder, by relative path: kind and content. Links are not followed."""
    found: Snapshot = {}
    waiting = [str(folder)]
    while waiting:
        for entry in os.scandir(waiting.pop()):
            found[os.path.relpath(entry.path, folder)] = _describe(entry)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
    return found


def _describe(entry: os.DirEntry) -> tuple:
    about = entry.stat(follow_symlinks=False)
    kind = stat.S_IFMT(about.st_mode)
    if kind == stat.S_IFLNK:
        return kind, os.readlink(entry.path)
    if kind != stat.S_IFREG:
        return (kind,)
    if about.st_size > HASHED:
        return kind, about.st_size, about.st_mtime_ns
    with open(entry.path, "rb") as file:
        return kind, about.st_size, hashlib.sha256(file.read()).hexdigest()


def judge(case: Case, outcome: Outcome, folder: Path, before: Snapshot, after: Snapshot) -> list[str]:
    """What fell short, a line each; each begins with its kind. Empty if the case held."""
    stdout, stderr = (text.decode(case.encoding, "backslashreplace") for text in (outcome.stdout, outcome.stderr))
    if outcome.hung:
        said = [line for line in stderr.splitlines() if line.strip()]
        return [f"hang: not done after {outcome.seconds:.0f} s, at last: {said[-1][:100] if said else 'not a word'}"]
    found = [
        *_end(case, outcome, stderr),
        *_text(stdout + stderr),
        *_files(case, outcome, before, after),
    ]
    if outcome.memory_mb > case.memory_mb:
        found.append(f"memory: took {outcome.memory_mb:.0f} MB")
    found += [f"told: printed {word}" for word in case.hidden if word in stdout + stderr]
    if outcome.left_behind:
        found.append("left behind: processes that it started still ran")
    if not found and outcome.code == 0 and case.expect.look:
        complaint = case.expect.look(folder, stdout)
        found += [f"wrong result: {complaint}"] if complaint else []
    return found


def _end(case: Case, outcome: Outcome, stderr: str) -> list[str]:
    if outcome.code == 0 and 0 not in case.expect.codes:
        return ["silent: accepted with exit code 0"]
    if outcome.code not in case.expect.codes:
        return [f"exit code: {outcome.code} instead of {' or '.join(map(str, case.expect.codes))}"]
    if outcome.code == 0 or case.stderr != "file":
        return []
    if "error" not in stderr:
        return ["silent: a refusal without a line that says error"]
    if case.expect.names and not any(name in line for line in stderr.splitlines() for name in case.expect.names):
        return [f"not named: no line of stderr holds {' or '.join(case.expect.names)}"]
    return []


def _text(text: str) -> list[str]:
    found = []
    if crash := _CRASH.search(text):
        last = [line for line in text.splitlines() if line.strip()][-1]
        found.append(f"traceback: {crash[0].strip()} ... {last[:200]}")
    if warning := _WARNING.search(text):
        found.append(f"warning: {warning[0][:200]}")
    if len(text) > MOST_TEXT:
        found.append(f"flood: {len(text)} characters")
    # a carriage return too: no case has a terminal, so no bar is redrawn
    if strange := sorted({c for c in text if not (c.isprintable() or c in "\n\t")}):
        found.append(f"unprintable: {', '.join(map(ascii, strange[:5]))}")
    return found


def _files(case: Case, outcome: Outcome, before: Snapshot, after: Snapshot) -> list[str]:
    may_write = outcome.code == 0 or case.words[0] == "check" or case.writes_anyway
    allowed = (*ALWAYS, *(case.writes if may_write else ()))
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    wrong = sorted(path for path in changed if not any(_is_within(path, place) for place in allowed))
    verbs = [("removed" if p not in after else "wrote" if p not in before else "changed") for p in wrong]
    return [f"files: {verb} {path!a}" for verb, path in list(zip(verbs, wrong, strict=True))[:3]]


def _is_within(path: str, place: str) -> bool:
    """In the place, at it, or a folder on the way to it."""
    return path == place or path.startswith(f"{place}/") or place.startswith(f"{path}/")
