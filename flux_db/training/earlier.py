"""What an earlier run, or another branch of this one, left in the output folder: moved to `earlier-<n>/`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from flux_db import atomic
from flux_db.console import say
from flux_db.files import read_text
from flux_db.output_folder import (
    BEST_LORA,
    CONFIG,
    EMA_LORA,
    GRID,
    LORA_FILE,
    METRICS,
    MODEL_CARD,
    REPORT,
    SAMPLES,
    SCORES,
    STATUS,
    THUMBNAIL_INDEX,
    THUMBNAILS,
    earlier_name,
)
from flux_db.report import model_card
from flux_db.report.sample_sheet import sample_sheet
from flux_db.run import checkpoint, metrics_file, sample_files
from flux_db.run.saved_state import lora_steps

# What a run makes in its output folder, besides checkpoints, samples and thumbnails.
# The cache, the logs and what `check` writes belong to no run.
RESULTS = (METRICS, LORA_FILE, BEST_LORA, EMA_LORA)
ACCOUNTS = (CONFIG, STATUS, REPORT, SCORES, MODEL_CARD)
"""They describe the results, and are set aside with them only."""


def set_aside_all(output: Path) -> Path | None:
    """Move everything that a run left; returns where to, or None if there was nothing to keep."""
    checkpoints = list(_checkpoints_after(output, -1))
    results = [path for name in RESULTS if _has_content(path := output / name)]
    samples = [output / SAMPLES] if any(sample_files.folders_after(output, -1)) else []
    if not (checkpoints or results or samples):
        return None
    accounts = [path for name in ACCOUNTS if _is_own_file(path := output / name)]
    thumbs = output / THUMBNAILS
    folders = [*samples, thumbs] if (thumbs / THUMBNAIL_INDEX).is_file() else samples
    # checkpoints last: after a crash in between, the rest is still known as a run
    return _move(output, [*accounts, *results, *folders, *checkpoints])


def set_aside_after(output: Path, step: int) -> Path | None:
    """Move what lies beyond a step; metrics and settings are copied whole. Returns where to, or None for nothing."""
    loras = [path for name in (LORA_FILE, BEST_LORA, EMA_LORA) if _is_lora_after(path := output / name, step)]
    accounts = [output / name for name in (STATUS, REPORT, SCORES, MODEL_CARD)] if output / LORA_FILE in loras else []
    rounds = list(sample_files.folders_after(output, step))
    checkpoints = list(_checkpoints_after(output, step))
    rows = metrics_file.read(output / METRICS)
    if not (loras or rounds or checkpoints or len(metrics_file.up_to(rows, step)) < len(rows)):
        return None
    copies = [path for name in (METRICS, CONFIG) if (path := output / name).is_file()]
    target = _move(output, [*filter(_is_own_file, accounts), *loras, *rounds, *checkpoints], copies)
    if rounds:
        _redraw_grid(output)
    return target


def has_results_after(output: Path, step: int) -> bool:
    """Whether a checkpoint or a finished LoRA lies beyond a step."""
    return any(_checkpoints_after(output, step)) or _is_lora_after(output / LORA_FILE, step)


def drop_after(output: Path, step: int) -> None:
    """Remove samples and best LoRA of steps that the run takes again, and with the same settings makes again."""
    if sample_files.forget_after(output, step):
        _redraw_grid(output)
    if _is_lora_after(output / BEST_LORA, step):
        (output / BEST_LORA).unlink()


def clean_folders(output: Path) -> None:
    """Remove unfinished files of a dead run below the output folder; beside its checkpoints they are gone already."""
    folders = (output / SAMPLES, output / THUMBNAILS)
    for folder in (*folders, *sample_files.folders_after(output, -1)):
        for path in atomic.leftovers(folder):
            atomic.remove_leftover(path)


def _redraw_grid(output: Path) -> None:
    path = output / SAMPLES / GRID
    try:
        if rounds := sample_files.read_rounds(output):
            atomic.write_png(path, sample_sheet(rounds))
        else:
            path.unlink(missing_ok=True)
    except Exception as problem:  # only a view of the samples, and drawn again with the next round
        say(f"warning: {path} was not written: {type(problem).__name__}: {problem}")


def _move(output: Path, paths: Sequence[Path], copies: Sequence[Path] = ()) -> Path:
    target = next(p for n in itertools.count(1) if not os.path.lexists(p := output / earlier_name(n)))
    target.mkdir()
    for path in copies:
        atomic.write_file(target / path.name, path.read_bytes())
    for path in paths:
        place = target / path.relative_to(output)
        place.parent.mkdir(exist_ok=True)
        path.rename(place)
    atomic.sync_folder(target)
    atomic.sync_folder(output)
    return target


def _checkpoints_after(output: Path, step: int) -> Iterator[Path]:
    later = (folder for number, folder in checkpoint.numbered(output) if number > step)
    return filter(checkpoint.has_manifest, later)


def _is_lora_after(path: Path, step: int) -> bool:
    """A file without a step in it may not be overwritten either."""
    if not path.is_file():
        return False
    steps = lora_steps(path)
    return steps is None or steps > step


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _is_own_file(path: Path) -> bool:
    """A card may be somebody else's, and then stays."""
    if path.name != MODEL_CARD:
        return path.is_file()
    with contextlib.suppress(OSError, ValueError):
        return model_card.MARK in read_text(path)
    return False
