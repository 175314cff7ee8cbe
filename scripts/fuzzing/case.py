"""A case: files that somebody hostile or careless wrote, a command on them, and what may come of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fuzzing.world import World

# fork: in a child of a process that has imported everything but MindSpore; mindspore: of one that has that, too;
# start: as a process of its own.
Way = Literal["fork", "mindspore", "start"]

# How the child's stdout or stderr is connected.
Stream = Literal["file", "closed", "broken pipe", "full disk"]

# Looks at the case's folder and the text on stdout; returns what is wrong with them.
Look = Callable[[Path, str], str | None]


@dataclass(frozen=True, kw_only=True)
class Expect:
    """How a case may end."""

    codes: tuple[int, ...]
    names: tuple[str, ...] = ()
    """A refusal must name one of these: the flag or the file."""
    look: Look | None = None
    """For a case that ended with 0."""


def refused(*names: str) -> Expect:
    """A mistake of the user, reported in a line that holds one of the names."""
    return Expect(codes=(2,), names=names)


def fine(look: Look | None = None) -> Expect:
    return Expect(codes=(0,), look=look)


def either(*names: str, look: Look | None = None) -> Expect:
    """Harmless or a mistake: but whatever it is, it ends cleanly."""
    return Expect(codes=(0, 2), names=names, look=look)


def unwritable(*names: str) -> Expect:
    """What was asked for could not be written: a mistake, or a run that failed; reported in a line all the same."""
    return Expect(codes=(1, 2), names=names)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is started, in a bare environment and in the case's own folder."""

    words: tuple[str, ...]
    """Of `python -m flux_db`; with `train` first, of the training script."""
    expect: Expect
    writes: tuple[str, ...] = ()
    """Paths in the case's folder that may change. A refusal changes nothing, but for `check`, which draws its sheet."""
    writes_anyway: bool = False
    """Also if it fails in the end."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Added to the bare one; None takes a variable away."""
    stdin: bytes | None = None
    """Comes through a pipe; None: /dev/null."""
    stdout: Stream = "file"
    stderr: Stream = "file"
    limits: Mapping[str, int] = field(default_factory=dict)
    """Of setrlimit, by the names of the module resource: NOFILE, FSIZE, AS."""
    encoding: str = "utf-8"
    """Of what the program prints."""
    lost_cwd: bool = False
    """The folder that it is started in is removed before."""
    hidden: tuple[str, ...] = ()
    """Words that must not be printed: secrets."""
    memory_mb: int = 1024
    """Largest resident size."""
    patience: float = 1.0
    """How many times the usual it may take before it is a hang."""

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a case is built with: its own folder, its own dice, and the files that all cases share."""

    folder: Path
    rng: random.Random
    world: World

    def path(self, name: str) -> Path:
        """A place in the case's folder; the folders above it are made."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, content: bytes | str) -> Path:
        path = self.path(name)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path

    def flags(self, **changes: object) -> list[str]:
        """The flags of a run that could start, with changes; None leaves a flag out, True is a switch."""
        settings = {**self.world.settings, "output_dir": "out", **changes}
        words: list[str] = []
        for name, value in settings.items():
            values = value if isinstance(value, list) else [value]
            for one in values:
                words += [] if one is None else [f"--{name}"] if one is True else [f"--{name}", str(one)]
        return words

    def check(self, expect: Expect, **changes: object) -> Case:
        return self.run(expect, "check", *self.flags(**changes), writes=("out",))

    def run(self, expect: Expect, *words: object, writes: Sequence[str] = ()) -> Case:
        return Case(words=tuple(map(str, words)), expect=expect, writes=tuple(writes))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A case that is not built yet: its files are written only when its turn comes."""

    about: str
    build: Callable[[Bench], Case]
    way: Way = "fork"


def plan(about: str, build: Callable[..., Case], *arguments: Any, way: Way = "fork") -> Plan:
    return Plan(about=about, build=lambda bench: build(bench, *arguments), way=way)
