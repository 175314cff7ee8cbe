"""What a run leaves in its output folder to go on from: checkpoints, the settings behind them, and how it ended.

A checkpoint is a folder of named bytes with a manifest; what the bytes mean is the caller's affair. A run calls
`clean_leftovers` once it holds the output folder's lock, before it looks for a checkpoint.
"""

import hashlib
import itertools
import json
import math
import operator
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flux_db import __version__, atomic
from flux_db.errors import UserError

SCHEMA = 1
FORMAT = "flux_db checkpoint"
MANIFEST = "manifest.json"
RUN_STATE = "train_state.json"
TOOL = f"flux_db {__version__}"


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
    target = Path(output_dir, f"checkpoint-{step}")
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
        data = _read(folder / name, problems)
        if data is None:
            continue
        if len(data) != entry["size"]:
            problems.append(f"{folder / name}: has {len(data)} bytes instead of {entry['size']}")
        elif _sha256(data) != entry["sha256"]:
            problems.append(f"{folder / name}: its content is not what was written (SHA-256 differs)")
        files[name] = data
    if problems:
        raise DamagedCheckpoint(problems)
    return Checkpoint(folder, manifest["step"], files)


def find_latest(output_dir: Path | str) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint by number, if any, and a line for each newer one that was skipped."""
    skipped: list[str] = []
    for _, folder in reversed(numbered(output_dir)):
        try:
            return load(folder), skipped
        except DamagedCheckpoint as error:
            skipped.append(f"skipped {folder.name}: {'; '.join(error.problems)}")
    return None, skipped


def numbered(output_dir: Path | str) -> list[tuple[int, Path]]:
    """Step and path of everything that has a checkpoint's name, in order of steps, sound or not, ours or not."""
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        return []
    steps = ((_step_in_name(path), path) for path in output_dir.iterdir())
    return sorted((step, path) for step, path in steps if step is not None)


def _step_in_name(folder: Path) -> int | None:
    match = re.fullmatch("checkpoint-(0|[1-9][0-9]*)", folder.name)
    return int(match[1]) if match else None


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
    if problem := _manifest_problem(data, _step_in_name(folder)):
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
            f" ({manifest.get('tool')})"
        )
    if schema != SCHEMA or data != _seal(manifest) or not _is_well_formed(manifest):
        return "its content is not what was written"
    # A folder that was copied to another name of the user's choice is fine; a wrong number is not.
    if step_in_name not in (None, manifest["step"]):
        return f"is of step {manifest['step']}, while the folder's name says {step_in_name}"
    return None


def _is_well_formed(manifest: Mapping[str, Any]) -> bool:
    step, files = manifest.get("step"), manifest.get("files")
    return (
        type(step) is int
        and isinstance(files, dict)
        and all(_is_plain(name) and isinstance(entry, dict) for name, entry in files.items())
        and all(set(entry) == {"size", "sha256"} for entry in files.values())
    )


def _is_ours(folder: Path) -> bool:
    """Whether this program may delete the folder: it wrote it there itself, and the manifest says so beyond doubt."""
    if folder.is_symlink() or _step_in_name(folder) is None:
        return False
    try:
        _read_manifest(folder)
    except DamagedCheckpoint:
        return False
    return True


def _read(path: Path, problems: list[str]) -> bytes | None:
    try:
        return path.read_bytes()
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
            target = path.with_name(f"checkpoint-{load(path).step}")
        except DamagedCheckpoint:
            pass
        else:
            if not os.path.lexists(target):
                path.rename(target)
                atomic.sync_folder(target.parent)
                return f"{target}: recovered; it was complete when an earlier run died"
    atomic.remove_leftover(path)
    return f"{path}: removed; an unfinished file of a dead run"


# ---- Settings that may change on resume, and those that may not ----

# Settings that do not reach the result. What is not listed here, a new setting included, binds.
FREE = frozenset(
    {
        # Where things lie: the model and the pictures are compared by fingerprint instead.
        "pretrained_model_name_or_path",
        "instance_data_dir",
        "class_data_dir",
        "cache_dir",
        "encode_cache_dir",
        "output_dir",
        "logging_dir",
        # What is saved, shown and drawn beside the training.
        "checkpointing_steps",
        "checkpoints_total_limit",
        "resume_from_checkpoint",
        "allow_changed",
        "max_skipped_steps",
        "upcast_before_saving",
        "report_to",
        "sample_batch_size",
        "validation_prompt",
        "num_validation_images",
        "validation_epochs",
        "validation_steps",
        "validation_inference_steps",
        "validation_guidance",
        # How the same sums are computed.
        "device",
        "distributed",
        "jit_level",
        "gradient_checkpointing",
        "dataloader_num_workers",
        "enable_mindspore_data_sink",
    }
)

# Of these the product counts, over all cards.
GLOBAL_BATCH = ("train_batch_size", "gradient_accumulation_steps")

LENGTH = ("max_train_steps", "num_train_epochs")

# Schedules that are the same for every length of the run.
ENDLESS_SCHEDULES = ("constant", "constant_with_warmup")

# Entries beside the settings, and the setting that --allow_changed knows them by.
FINGERPRINTS = {"model_fingerprint": "pretrained_model_name_or_path", "data_fingerprint": "instance_data_dir"}

ABSENT = "(not recorded)"


class Change(NamedTuple):
    """A setting that differs from the checkpoint's."""

    name: str
    old: Any
    new: Any


def changed_settings(
    old: Mapping[str, Any], new: Mapping[str, Any], *, world_size_old: int, world_size_new: int
) -> list[Change]:
    """The settings that change the result, of the checkpoint's flat config and the one of now.

    Both may hold `model_fingerprint` and `data_fingerprint`; they are reported under their folder's setting.
    """
    special = {*FREE, *GLOBAL_BATCH, *LENGTH, *FINGERPRINTS}
    names = [name for name in dict.fromkeys([*new, *old]) if name not in special]
    return [
        *_changed_content(old, new),
        *(Change(name, *_both(name, old, new)) for name in names if operator.ne(*_both(name, old, new))),
        *_changed_length(old, new),
        *_changed_batch(old, new, world_size_old, world_size_new),
    ]


def _both(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Any, Any]:
    return old.get(name, ABSENT), new.get(name, ABSENT)


def _changed_content(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    def shown(settings: Mapping[str, Any], entry: str, setting: str) -> str:
        return f"{settings.get(setting, ABSENT)} with content {settings.get(entry, ABSENT)}"

    return [
        Change(setting, shown(old, entry, setting), shown(new, entry, setting))
        for entry, setting in FINGERPRINTS.items()
        if operator.ne(*_both(entry, old, new))
    ]


def _changed_length(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """A longer run is always welcome; a shorter one bends a schedule that is drawn over the whole length."""
    if new.get("lr_scheduler") in ENDLESS_SCHEDULES:
        return []
    steps, epochs = LENGTH
    name = steps if old.get(steps) is not None or new.get(steps) is not None else epochs
    before, after = old.get(name), new.get(name)
    # Steps and epochs cannot be compared without the pictures, so a change between them is shown to the user.
    longer = None not in (before, after) and after >= before
    return [] if longer or before == after else [Change(name, before, after)]


def _changed_batch(old: Mapping[str, Any], new: Mapping[str, Any], cards_old: int, cards_new: int) -> list[Change]:
    before, after = _dealing(old, cards_old), _dealing(new, cards_new)
    if math.prod(before) == math.prod(after):
        return []
    texts = [
        f"{batch} x {accumulation} accumulated x {cards} cards = {batch * accumulation * cards}"
        for batch, accumulation, cards in (before, after)
    ]
    return [Change("train_batch_size", *texts)]


def _dealing(settings: Mapping[str, Any], cards: int) -> tuple[int, int, int]:
    batch, accumulation = (settings.get(name, 1) for name in GLOBAL_BATCH)
    return batch, accumulation, cards


def refuse_changes(changes: list[Change], allowed: frozenset[str]) -> None:
    """Raise a UserError that lists every change not allowed and the flag that allows them all."""
    refused = [change for change in changes if change.name not in allowed]
    if not refused:
        return
    lines = [f"  {change.name}: {change.old!r} in the checkpoint, {change.new!r} now" for change in refused]
    names = ",".join(sorted({*allowed, *(change.name for change in refused)}))
    raise UserError(
        "\n".join(
            [
                "the checkpoint was made with other settings, and these change the result:",
                *lines,
                f"set them back, or go on with the new ones by --allow_changed {names}",
            ]
        )
    )


# ---- How the run stands ----

Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True)
class RunState:
    """The truth about an output folder; `running` without a holder of the lock means that the run was killed."""

    status: Status
    step: int
    last_good_checkpoint: str | None
    message: str | None
    time: str
    tool: str
    schema: int


def write_run_state(
    output_dir: Path | str,
    status: Status,
    *,
    step: int,
    last_good_checkpoint: Path | str | None,
    message: str | None = None,
) -> None:
    """Replace the folder's `train_state.json`."""
    if status not in get_args(Status):
        raise ValueError(f"no such status: {status}")
    good = None if last_good_checkpoint is None else str(last_good_checkpoint)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    state = RunState(status, step, good, message, now, TOOL, SCHEMA)
    atomic.write_file(Path(output_dir, RUN_STATE), _json_bytes(asdict(state)))


def read_run_state(output_dir: Path | str) -> RunState | None:
    """The state last written; None where there is none that this version can read."""
    try:
        return RunState(**json.loads(Path(output_dir, RUN_STATE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
