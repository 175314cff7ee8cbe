"""Cases from their plan to their verdict: built in a folder of their own, run by a server, judged, cleared away."""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuzzing import judge
from fuzzing.case import Bench, Case, Plan, Way
from fuzzing.judge import Outcome
from fuzzing.world import World, make_world, train

HANG_SECONDS = 20.0

# Far above what any case may take, so that a runaway one does not take the machine with it.
SAFETY = {"AS": 4 * 2**30, "FSIZE": 2**30, "CORE": 0}
# MindSpore reserves more than it uses.
MINDSPORE_SAFETY = SAFETY | {"AS": 10 * 2**30}

SERVER = Path(__file__).with_name("server.py")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of one case."""

    family: str
    number: int
    about: str
    problems: tuple[str, ...]
    outcome: Outcome
    command: str
    folder: Path
    """Of the case: its files and what it printed."""

    @property
    def held(self) -> bool:
        return not self.problems


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The checkout under test and the Python that runs it."""

    folder: Path
    python: str

    def environment(self, home: Path) -> dict[str, str]:
        """Bare; the tree is named because a case runs in a folder of its own."""
        path = f"{Path(self.python).parent}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "PYTHONPATH": str(self.folder)}


def find_tree(folder: Path) -> Tree:
    own = folder / ".venv" / "bin" / "python"
    return Tree(folder=folder.resolve(), python=str(own) if own.exists() else sys.executable)


class Server:
    """A process that runs one case at a time."""

    def __init__(self, tree: Tree, home: Path, warm_up: Sequence[Sequence[str]]) -> None:
        # one thread: a child of a process with several has only the one that forked
        environment = tree.environment(home) | {"OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [tree.python, str(SERVER), str(tree.folder), json.dumps(warm_up)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=home,
        )
        if self._read() != b"ready\n":
            raise RuntimeError(f"the server of {tree.folder} could not be started")

    def run(self, job: dict) -> dict:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def _read(self) -> bytes:
        assert self._process.stdout
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)


class Runner:
    """Runs cases of one tree, several at a time."""

    def __init__(
        self, tree: Tree, work: Path, *, jobs: int = 1, seconds: float = HANG_SECONDS, with_mindspore: bool = False
    ) -> None:
        self.tree, self.work, self.seconds = tree, work, seconds
        (work / "home").mkdir(parents=True, exist_ok=True)
        environment = tree.environment(work / "home")
        self.world: World = make_world(work, tree.python, environment)
        self._jobs = jobs
        self._servers = {"fork": self._start(self._warm_up())}
        if with_mindspore:
            train(self.world, tree.python, environment, tree.folder / "train_dreambooth_lora_flux.py")
            self._servers["mindspore"] = self._start([["import", name] for name in MINDSPORE])

    def _start(self, warm_up: Sequence[Sequence[str]]) -> queue.Queue[Server]:
        servers: queue.Queue[Server] = queue.Queue()
        for _ in range(self._jobs):
            servers.put(Server(self.tree, self.work / "home", warm_up))
        return servers

    def close(self) -> None:
        for servers in self._servers.values():
            while not servers.empty():
                servers.get().close()

    def run_all(self, cases: Sequence[tuple[str, int, Plan]], seed: int) -> Iterator[Verdict]:
        """Family, number and plan of each; the verdicts come in the same order."""
        with ThreadPoolExecutor(self._jobs) as pool:
            yield from pool.map(lambda case: self.run(*case, seed), cases)

    def run(self, family: str, number: int, plan: Plan, seed: int, *, way: Way | None = None) -> Verdict:
        """Build, run and judge one case."""
        way = way or plan.way
        place = self.work / f"{family}-{number}-{way}"
        folder = place / "case"
        for name in ("home", "tmp"):
            (folder / name).mkdir(parents=True)
        case = plan.build(Bench(folder=folder, rng=dice(seed, family, number), world=self.world))
        before, shared = judge.snapshot(folder), self.world.state()
        outcome = self._outcome(case, way, place)
        problems = judge.judge(case, outcome, folder, before, judge.snapshot(folder))
        if self.world.state() != shared:
            problems.append("files: changed the shared model or pictures")
        command = " ".join(ascii(word) if not word.isprintable() else word for word in case.words)
        return Verdict(
            family=family,
            number=number,
            about=plan.about,
            problems=tuple(problems),
            outcome=outcome,
            command=command,
            folder=place,
        )

    def _outcome(self, case: Case, way: str, place: Path) -> Outcome:
        folder = place / "case"
        environment = self.tree.environment(folder / "home") | {"TMPDIR": str(folder / "tmp")}
        for name, value in case.environment.items():
            environment.pop(name, None)
            environment |= {} if value is None else {name: value}
        if case.stdin is not None:
            (place / "stdin").write_bytes(case.stdin)
        stdin = ("null", os.devnull) if case.stdin is None else ("pipe", str(place / "stdin"))
        files = [place / "stdout", place / "stderr"]
        outputs = [
            (kind, "/dev/full" if kind == "full disk" else str(file))
            for kind, file in zip((case.stdout, case.stderr), files, strict=True)
        ]
        job = {
            "words": case.words,
            "way": way,
            "folder": str(folder),
            "environment": environment,
            "streams": [stdin, *outputs],
            "limits": {**(MINDSPORE_SAFETY if way == "mindspore" else SAFETY), **case.limits},
            "lost_cwd": case.lost_cwd,
            "seconds": self.seconds * case.patience,
        }
        servers = self._servers["mindspore" if way == "mindspore" else "fork"]
        server = servers.get()
        try:
            result = server.run(job)
        finally:
            servers.put(server)
        stdout, stderr = (_head(file) for file in files)
        return Outcome(stdout=stdout, stderr=stderr, **result)

    def _warm_up(self) -> list[list[str]]:
        """A run of each command that needs no MindSpore."""
        flags = Bench(folder=self.work, rng=random.Random(0), world=self.world).flags(
            output_dir=self.work / "warm-up" / "out"
        )
        return [["check", *flags], *([name, "--help"] for name in COMMANDS)]


def dice(seed: int, family: str, number: int) -> random.Random:
    """Every case has its own: which others are run does not matter."""
    return random.Random(f"{seed}/{family}/{number}")


def _head(file: Path) -> bytes:
    """Enough of what was printed; a flood may be longer than memory."""
    if not file.exists():
        return b""
    with file.open("rb") as stream:
        return stream.read(2 * judge.MOST_TEXT)


COMMANDS = ("info", "export", "fuse", "report", "generate", "push", "launch")
MINDSPORE = ("mindspore", "mindone.diffusers", "mindone.peft")
