"""Checkpoints: saved whole, verified on loading, found and pruned.

A checkpoint is a folder of named bytes with a manifest; what the bytes mean is the caller's affair. A run calls
`clean_leftovers` once it holds the output folder's lock, before it looks for a checkpoint.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flux_db import __version__, atomic
from flux_db.errors import UserError
from flux_db.files import TEXT_LIMIT, open_regular, read_bytes
from flux_db.output_folder import checkpoint_name, checkpoint_step

SCHEMA = 1
FORMAT = "flux_db checkpoint"
MANIFEST = "manifest.json"
TOOL = f"flux_db {__version__}"

# The most that a file of a checkpoint can sensibly have: Prodigy's state of a LoRA with a billion weights is 16 GB.
FILE_LIMIT = 32 * 2**30

T = TypeVar("T")


class DamagedCheckpoint(UserError):
    """A checkpoint that must not be trained on; each problem names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte has been verified."""

    folder: Path
    step: int
    files: dict[str, bytes]


# ---- Save and load ----


def save(output_dir: Path | str, step: int, files: Mapping[str, bytes]) -> Path:
    """Write `checkpoint-<step>`, whole or not at all, and return its folder.

    An earlier checkpoint of that step goes once the new one is in its place. Anything else of that name is not ours to
    delete: it is kept as `checkpoint-<step>.kept-<n>`. Raises OSError where the disk refuses, with nothing lost.
    """
    wrong = [name for name in files if not _is_plain(name)]
    if step < 0 or wrong:
        raise ValueError(f"cannot save a checkpoint of step {step} with files {wrong}")
    target = Path(output_dir, checkpoint_name(step))
    set_aside = atomic.temp_path(target, "old") if _is_ours(target) else _kept_name(target)
    atomic.write_folder(target, {**files, MANIFEST: _manifest_bytes(step, files)}, set_aside=set_aside)
    if set_aside.name.startswith(atomic.TEMP_PREFIX):
        shutil.rmtree(set_aside, ignore_errors=True)
    return target


def load(folder: Path | str) -> Checkpoint:
    """Read a checkpoint and verify all of it; DamagedCheckpoint names each file and what is wrong with it."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    files: dict[str, bytes] = {}
    problems: list[str] = []
    for name, entry in manifest["files"].items():
        data = _read(folder / name, problems, size=entry["size"])
        if data is None:
            continue
        if _sha256(data) != entry["sha256"]:
            problems.append(f"{folder / name}: its content is not what was written (SHA-256 differs)")
        files[name] = data
    if problems:
        raise DamagedCheckpoint(problems)
    return Checkpoint(folder, manifest["step"], files)


def find_latest(output_dir: Path | str, read: Callable[[Path], T] = load) -> tuple[T | None, list[str]]:
    """The newest sound checkpoint by number, if any, and a line for each newer one that was skipped.

    `read` is given its folder, and raises DamagedCheckpoint if it must not be trained on.
    """
    skipped: list[str] = []
    for _, folder in reversed(numbered(output_dir)):
        try:
            return read(folder), skipped
        except DamagedCheckpoint as error:
            skipped.append(f"skipped {folder.name}: {'; '.join(error.problems)}")
    return None, skipped


def numbered(output_dir: Path | str) -> list[tuple[int, Path]]:
    """Step and path of everything that has a checkpoint's name, in order of steps, sound or not, ours or not."""
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        return []
    steps = ((checkpoint_step(path.name), path) for path in output_dir.iterdir())
    return sorted((step, path) for step, path in steps if step is not None)


def has_manifest(folder: Path) -> bool:
    """Whether this program made the folder, be it damaged by now or of a later version."""
    return folder.is_dir() and not folder.is_symlink() and os.path.lexists(folder / MANIFEST)


def is_same(one: Path, two: Path) -> bool:
    """Whether two folders hold the same checkpoint, by their manifests alone."""
    try:
        return _read_manifest(one) == _read_manifest(two)
    except DamagedCheckpoint:
        return False


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..", MANIFEST) and "/" not in name


def _kept_name(target: Path) -> Path:
    names = (target.with_name(f"{target.name}.kept-{n}") for n in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


# ---- The manifest ----


def _manifest_bytes(step: int, files: Mapping[str, bytes]) -> bytes:
    return _seal(
        {
            "format": FORMAT,
            "schema": SCHEMA,
            "step": step,
            "tool": TOOL,
            "files": {name: {"size": len(data), "sha256": _sha256(data)} for name, data in files.items()},
        }
    )


def _seal(manifest: Mapping[str, Any]) -> bytes:
    """The one way to write this content, with the content's own digest in it: any other bytes are damage."""
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return _json_bytes({**body, "sha256": _sha256(_json_bytes(body))})


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, verified as far as it can be without the other files."""
    path = folder / MANIFEST
    if problem := _folder_problem(folder):
        raise DamagedCheckpoint(f"{folder}: {problem}")
    problems: list[str] = []
    data = _read(path, problems)
    if data is None:
        raise DamagedCheckpoint(problems)
    if problem := _manifest_problem(data, checkpoint_step(folder.name)):
        raise DamagedCheckpoint(f"{path}: {problem}")
    return json.loads(data)


def _folder_problem(folder: Path) -> str | None:
    try:
        return None if any(folder.iterdir()) else "is empty"
    except FileNotFoundError:
        return "there is no such folder"
    except NotADirectoryError:
        return "is not a folder"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _manifest_problem(data: bytes, step_in_name: int | None) -> str | None:
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        return "is not JSON"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return "is not the manifest of a checkpoint of this program"
    schema = manifest.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        return (
            f"is of schema {schema}, while {TOOL} knows schemas up to {SCHEMA}; resume with the version that wrote it"
            f" ({str(manifest.get('tool'))[:80]})"
        )
    # True equals 1
    if isinstance(schema, bool) or schema != SCHEMA or not _is_well_formed(manifest) or data != _seal(manifest):
        return "its content is not what was written"
    # A folder that was copied to another name of the user's choice is fine; a wrong number is not.
    if step_in_name not in (None, manifest["step"]):
        return f"is of step {manifest['step']}, while the folder's name says {step_in_name}"
    return None


def _is_well_formed(manifest: Mapping[str, Any]) -> bool:
    step, tool, files = (manifest.get(name) for name in ("step", "tool", "files"))
    return (
        manifest.keys() == {"format", "schema", "step", "tool", "files", "sha256"}
        and type(step) is int
        and step >= 0
        and isinstance(tool, str)
        and isinstance(files, dict)
        and all(_is_plain(name) and _is_entry(entry) for name, entry in files.items())
    )


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"size", "sha256"}
        and type(entry["size"]) is int
        and 0 <= entry["size"] <= FILE_LIMIT
        and isinstance(entry["sha256"], str)
    )


def _is_ours(folder: Path) -> bool:
    """Whether this program may delete the folder: it wrote it there itself, and the manifest says so beyond doubt."""
    if folder.is_symlink() or checkpoint_step(folder.name) is None:
        return False
    try:
        _read_manifest(folder)
    except DamagedCheckpoint:
        return False
    return True


def _read(path: Path, problems: list[str], size: int | None = None) -> bytes | None:
    """The bytes of a file, which must have `size` of them; None with a note in problems."""
    try:
        if size is None:
            return read_bytes(path, TEXT_LIMIT)
        with open_regular(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found == size:
                return file.read(size)
        problems.append(f"{path}: has {found} bytes instead of {size}")
    except FileNotFoundError:
        problems.append(f"{path}: is missing")
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    return None


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- Remove ----


def prune(output_dir: Path | str, keep: int, *, newest: Path | None = None) -> list[Path]:
    """Remove all but the `keep` checkpoints of the highest numbers, and return the folders removed.

    Folders without our manifest are neither counted nor touched. A checkpoint with a missing or truncated file does not
    count, so that it never drives out a sound one. `newest` is never removed: after a resume from an older step the
    checkpoint just saved need not have the highest number.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint must be kept, not {keep}")
    ours = [(step, folder) for step, folder in numbered(output_dir) if _is_ours(folder)]
    counted = [step for step, folder in ours if _has_right_sizes(folder)]
    if len(counted) <= keep:
        return []
    removed = [folder for step, folder in ours if step < counted[-keep] and folder != newest]
    for folder in removed:
        atomic.remove_folder(folder)
    return removed


def _has_right_sizes(folder: Path) -> bool:
    # Digests would mean to read every checkpoint at every save.
    files = _read_manifest(folder)["files"]
    return all((folder / name).is_file() and (folder / name).stat().st_size == files[name]["size"] for name in files)


def clean_leftovers(output_dir: Path | str) -> list[str]:
    """Clear away what a dead run left under temporary names, and say what was done in a line each.

    A checkpoint that was complete but died before it got its name is given it. Only for the holder of the lock: in a
    live run the same names are writes under way.
    """
    lines: list[str] = []
    for path in atomic.leftovers(output_dir):
        try:
            lines.append(_clean(path))
        except OSError as error:
            lines.append(f"{path}: left over from a dead run, cannot be removed: {error.strerror}")
    return lines


def _clean(path: Path) -> str:
    if path.is_dir() and not path.is_symlink():
        try:
            target = path.with_name(checkpoint_name(load(path).step))
        except DamagedCheckpoint:
            pass
        else:
            if not os.path.lexists(target):
                path.rename(target)
                atomic.sync_folder(target.parent)
                return f"{target}: recovered; it was complete when an earlier run died"
    atomic.remove_leftover(path)
    return f"{path}: removed; an unfinished file of a dead run"
