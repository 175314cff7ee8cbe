"""Compiled graphs on disk, so that a later process does not compile them again.

MindSpore can store the graphs that it compiles, but by their number alone: the third graph of a process is loaded from
the third file, whatever it is. So each compilation gets a folder of its own, with nothing in it but the right graph
under the next number, and the graphs are kept elsewhere, under a hash of everything that they are made from. And
MindSpore gives a loaded graph the values of the cell's own parameters only: one that the graph uses and the cell does
not list would hold garbage, so such a graph is not stored.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

from mindspore import nn

from flux_db.atomic import leftovers, remove_folder, remove_leftover, sync_folder, temp_path
from flux_db.console import say
from flux_db.errors import RunError
from flux_db.model import compile_hook, fingerprint
from flux_db.model.device import AscendFacts

ENABLE, PLACE, FORCE = "MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH", "MS_DEV_FORCE_USE_COMPILE_CACHE"
MOST_KEPT = 200
ABANDONED_SECONDS = 24 * 3600
PACKAGES = ("mindspore", "mindone", "numpy")
DIGEST = "sha256"
"""File of an entry: the hash of all others."""


def is_on(wanted: str, device: str, environment: Mapping[str, str]) -> bool:
    """Whether graphs are stored: on Ascend, where nobody has tried it, only if asked for. MindSpore's own switch can
    turn it off for any command."""
    return environment.get(ENABLE) != "0" and (wanted == "on" or (wanted == "auto" and device == "CPU"))


def environment_problem(environment: Mapping[str, str]) -> str | None:
    """Why MindSpore's own switch is refused; None if it is not on."""
    if environment.get(ENABLE) != "1":
        return None
    return f"{ENABLE}=1: MindSpore would load graphs by their number alone; unset it, graphs are stored without it"


def default_folder(environment: Mapping[str, str]) -> Path:
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "flux_db", "graphs")


# --- the name --------------------------------------------------------------------------------------------------------


def key(parts: Any) -> str:
    """A hash of plain values; the same for equal ones in any order of names."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def versions(facts: AscendFacts) -> dict[str, str | None]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {**found, "python": platform.python_version(), "cann": facts.cann, "driver": facts.driver}


# What msrun, the launch scripts and this program set for a process, and where the program is to write.
_ABOUT_THE_PROCESS = ("MS_ROLE", "MS_SCHED_", "MS_TOPO_", "MS_NODE_", "MS_WORKER_", "MS_COMPILER_CACHE_", FORCE)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those by which MindSpore may compile something else, or in another way."""
    found = {name: value for name, value in environment.items() if name.startswith("MS_")}
    return {name: value for name, value in found.items() if not name.startswith(_ABOUT_THE_PROCESS)}


def sources_digest(folder: Path) -> str:
    """Of every Python file below the folder, by name and content."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def hidden_parameters(cell: nn.Cell) -> list[str]:
    """Parameters that the cell's compiled graph uses and the cell does not list."""
    return sorted(compile_hook.parameters_of_graph(cell) - set(cell.parameters_dict()))


# --- the folder ------------------------------------------------------------------------------------------------------


class GraphStore:
    """The graphs in a folder, for a process whose surroundings (versions, sources, device, rank) are given."""

    _own: ClassVar[Path | None] = None
    """Where MindSpore looks and writes; there only while it compiles. For the whole process: it asks once."""
    _number: ClassVar[int | None] = 0
    """Under which MindSpore loads or stores the next graph of this process; None if that is not known any more."""

    def __init__(self, root: Path, surroundings: Mapping[str, Any]) -> None:
        self.root = root
        self.surroundings = dict(surroundings)
        if GraphStore._own is None:
            GraphStore._own = temp_path(root / "process")

    def name(self, cell: nn.Cell, inputs: Sequence[Any], options: Mapping[str, Any]) -> str | None:
        """Of the cell's graph for such inputs; None for one that is not stored."""
        try:
            given = [*inputs, *(item for name, value in sorted(options.items()) for item in (name, value))]
            parts = [self.surroundings, fingerprint.of_cell(cell), fingerprint.of_inputs(given)]
        except fingerprint.Unreadable:
            return None
        return key(parts)

    def holds(self, name: str | None) -> bool:
        """Whether a graph of this name can be loaded now."""
        return name is not None and self._number is not None and self._found(name, self._number) is not None

    @contextmanager
    def compiling(self, name: str | None, hidden: Callable[[], list[str]]) -> Iterator[None]:
        """Load what is compiled in this block, or store it. `hidden` then names the graph's hidden parameters."""
        number = GraphStore._number
        if name is None or number is None or (is_stored := self._prepare(name, number)) is None:
            yield
            return
        GraphStore._number = None  # until it is known that MindSpore has counted
        try:
            with self._removing(name) if is_stored else nullcontext(), _switched_on(self._own):
                yield
            if not is_stored:
                self._keep(name, number, hidden())
            GraphStore._number = number + 1
        finally:
            self._clear()

    def _prepare(self, name: str, number: int) -> bool | None:
        """Make MindSpore's folder, with the graph in it if it is stored; returns whether, or None if that failed."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._own.mkdir(mode=0o700, parents=True)
            files = self._found(name, number)
            for file in files or ():
                place = self._own / renumbered(file.relative_to(self.root / name), number)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
            if files:
                os.utime(self.root / name)
            return files is not None
        except OSError as error:
            say(f"warning: --compile_cache: {error.filename}: {error.strerror}; compiling without it")
            GraphStore._number = None
            self._clear()
            return None

    def _clear(self) -> None:
        with suppress(OSError):
            remove_leftover(self._own)

    def _found(self, name: str, number: int) -> list[Path] | None:
        """The files of an entry that can be loaded as graph `number`; a damaged entry is removed."""
        entry = self.root / name
        try:
            digest = (entry / DIGEST).read_text()
            files = _graph_files(entry)
            is_whole = _digest(entry, files) == digest
        except OSError:
            return None
        if not is_whole:
            with suppress(OSError):
                remove_folder(entry)
            return None
        # what else MindSpore stores, on Ascend, may hold the number inside
        return files if len(files) == 1 or _numbers(files) == {number} else None

    @contextmanager
    def _removing(self, name: str) -> Iterator[None]:
        """Remove an entry that cannot be loaded in this block."""
        try:
            yield
        except Exception as error:
            entry = self.root / name
            with suppress(OSError):
                remove_folder(entry)
            raise RunError(
                f"--compile_cache: the stored graph in {entry} cannot be used and was removed"
                f" ({type(error).__name__}); start again to compile it anew"
            ) from error

    def _keep(self, name: str, number: int, hidden: Sequence[str]) -> None:
        if hidden:
            say(f"warning: --compile_cache: not stored, because the graph hides parameters: {', '.join(hidden)}")
            return
        files = _graph_files(self._own)
        if _numbers(files) != {number} or not all(file.stat().st_size for file in files):
            say(f"warning: --compile_cache: MindSpore did not store the graph in {self.root}; is it full?")
            return
        for file in self._own.rglob("*"):
            if file.is_file() and file not in files:
                file.unlink()
        with suppress(OSError):  # another process was faster, and its entry is as good; or the disk is full
            (self._own / DIGEST).write_text(_digest(self._own, files))
            self._own.rename(self.root / name)
            sync_folder(self.root)
        _prune(self.root, keep=self.root / name)


_NUMBER = re.compile(r"compile_cache_(\d+)")


def renumbered(file: Path, number: int) -> Path:
    """rank_0/graph_cache/compile_cache_3.mindir with another number."""
    return file.with_name(_NUMBER.sub(f"compile_cache_{number}", file.name))


def _numbers(files: Sequence[Path]) -> set[int]:
    return {int(found[1]) for file in files if (found := _NUMBER.search(file.name))}


def _graph_files(folder: Path) -> list[Path]:
    """rank_0/graph_cache/compile_cache_3.mindir, and on Ascend perhaps others of the same number."""
    return sorted(folder.glob("rank_*/graph_cache/*compile_cache_*"))


def _digest(folder: Path, files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@contextmanager
def _switched_on(folder: Path) -> Iterator[None]:
    # FORCE: the name says what the graph is made from; MindSpore would compare the sources of the script alone
    os.environ.update({ENABLE: "1", PLACE: str(folder), FORCE: "1"})
    try:
        yield
    finally:
        for variable in (ENABLE, PLACE, FORCE):
            os.environ.pop(variable, None)


def _prune(root: Path, keep: Path) -> None:
    """Keep the entries that were used last, and nothing that a dead process left."""
    with suppress(OSError):
        for path in leftovers(root):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                remove_leftover(path)
        folders = sorted((f for f in root.iterdir() if f.is_dir() and not f.name.startswith(".")), key=_age)
        for folder in folders[MOST_KEPT:]:
            if folder != keep:
                remove_folder(folder)


def _age(folder: Path) -> float:
    return -folder.stat().st_mtime


# --- MindSpore's compiler --------------------------------------------------------------------------------------------

_used: GraphStore | None = None


def use(store: GraphStore | None) -> None:
    """The store of this process, for `storing` and `is_stored`."""
    global _used
    _used = store


def is_stored(cell: nn.Cell, inputs: Sequence[Any]) -> bool:
    """Whether compiling this cell for such inputs will load a stored graph."""
    return _used is not None and _used.holds(_used.name(cell, inputs, {}))


def storing(cell: nn.Cell, inputs: Sequence[Any], named: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Around a compilation: it goes through the store."""
    if _used is None:
        return nullcontext()
    return _used.compiling(_used.name(cell, inputs, named), lambda: hidden_parameters(cell))
