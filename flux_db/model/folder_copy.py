"""A new model folder beside an old one: changed parts are written, the others are links to the same files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flux_db.atomic import sync_folder, temp_path
from flux_db.console import stage
from flux_db.errors import UserError, unwritable

# What a model folder has besides the transformer; anything else in it is not needed to load it.
OTHER_PARTS = ("scheduler", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


def demand_new(model: Path, output: Path) -> None:
    """A UserError if the folder cannot be written as a new one."""
    if os.path.lexists(output):
        raise UserError(f"-o {output}: exists already; remove it first, or choose another folder")
    if not os.path.isdir(output.absolute().parent):
        raise UserError(f"-o {output}: there is no folder {output.parent}; make it first")
    if output.resolve().is_relative_to(model.resolve()):
        raise UserError(f"-o {output}: lies inside the model's folder; choose another place")


@contextmanager
def new_model(model: Path, output: Path, changed: Sequence[str]) -> Iterator[Path]:
    """A folder under a temporary name, with all parts but the changed ones; it gets its name at the end."""
    temp = temp_path(output.absolute())
    try:
        with stage("Copying the model"):
            _copy_others(model, temp, [part for part in OTHER_PARTS if part not in changed])
        yield temp
        temp.rename(output)
        sync_folder(output.absolute().parent)
    except BaseException as problem:
        shutil.rmtree(temp, ignore_errors=True)
        if isinstance(problem, OSError):
            raise unwritable(f"-o {output}: could not be written", problem) from problem
        raise


def _copy_others(model: Path, target: Path, others: Sequence[str]) -> None:
    """The other parts as links to the same files where the file system can, so that they take no space."""
    target.mkdir(parents=True)
    paths = [model / "model_index.json", *model.glob("LICENSE*")]
    paths += [path for part in others for path in (model / part).rglob("*")]
    for path in paths:
        if path.is_file():
            copy = target / path.relative_to(model)
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path.resolve(), copy)
            except OSError:
                shutil.copyfile(path, copy)
