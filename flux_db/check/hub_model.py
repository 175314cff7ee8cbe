"""A model that is still on the hub: whether it can be fetched to this machine, and what that takes."""

from __future__ import annotations

import math
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from flux_db.check.device_memory import read_model
from flux_db.check.model import check_model
from flux_db.model.model_folder import FETCHED
from flux_db.problem import Problem
from flux_db.settings.schema import Config
from flux_db.settings.secrets import LOGIN

FLAG = "pretrained_model_name_or_path"
PATIENCE_SECONDS = 10.0
# Of the published weights: bf16.
ITEM_BYTES = 2


class ModelState(NamedTuple):
    """Where the model of a run is."""

    text: str
    problems: list[Problem]
    """Why it cannot be fetched to this machine."""


def find_model(config: Config) -> ModelState:
    """Asks the hub only about a model that is not here. Fetches nothing."""
    folder = Path(config.model.pretrained_model_name_or_path)
    if folder.is_dir():
        return ModelState("here", [])
    stored = _stored(config)
    if stored is not None and not check_model(stored, config):
        return ModelState(f"here, in {stored}", [])
    return _on_the_hub(config)


def _stored(config: Config) -> Path | None:
    """The folder of an earlier download, perhaps an incomplete one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    model = config.model
    try:
        return Path(
            snapshot_download(
                model.pretrained_model_name_or_path,
                revision=model.revision,
                cache_dir=model.cache_dir,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def _on_the_hub(config: Config) -> ModelState:
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name, revision = config.model.pretrained_model_name_or_path, config.model.revision
    api, has_token = HfApi(library_name="flux-db"), bool(get_token())
    login = "login found" if has_token else "no login found"
    try:
        info = api.model_info(name, revision=revision, files_metadata=True, timeout=PATIENCE_SECONDS)
        if info.gated and has_token:
            api.auth_check(name)
    except RevisionNotFoundError:
        text = f"--revision {revision}: {name} has no branch, tag or commit of this name"
        return ModelState("not here", [Problem(text, flag="revision")])
    except GatedRepoError:
        why = f"the account of your login may not read it; accept its licence at {api.endpoint}/{name}"
        return ModelState(f"not here; gated, {login}", [_problem(name, why)])
    except RepositoryNotFoundError:
        hint = "check the name" if has_token else f"check the name, or {LOGIN} if it is private"
        return ModelState(f"not here; {login}", [_problem(name, f"is neither a folder nor on the hub; {hint}")])
    except (OSError, ValueError) as error:
        size = f"about {_usual_size(config) / 1e9:.0f} GB if it is as large as FLUX.1-dev"
        why = f"is not here, and the hub cannot be asked now ({type(error).__name__}); give a local folder"
        return ModelState(f"not here; {size}", [_problem(name, why)])
    return _to_fetch(config, info, login)


def _to_fetch(config: Config, info: Any, login: str) -> ModelState:
    name = config.model.pretrained_model_name_or_path
    size = sum(file.size or 0 for file in info.siblings if any(fnmatch(file.rfilename, p) for p in FETCHED))
    place = _place(config)
    free = shutil.disk_usage(place).free
    problems = []
    if info.gated and login.startswith("no"):
        problems.append(_problem(name, f"is gated: accept its licence on its page, and {LOGIN}"))
    if size > free:
        what = f"takes {size / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB free"
        problems.append(_problem(name, f"{what}; make room, or choose another disk with --cache_dir"))
    access = f"gated, {login}" if info.gated else "open to all"
    room = f"{free / 1e9:.0f} GB free in {place}"
    return ModelState(f"not here; {size / 1e9:.1f} GB to fetch, {access}; {room}", problems)


def _usual_size(config: Config) -> int:
    shapes = read_model(config).shapes
    return ITEM_BYTES * sum(math.prod(shape) for part in shapes.values() for shape in part.values())


def _place(config: Config) -> Path:
    """The folder that exists, of those around the place of downloads."""
    from huggingface_hub import constants

    place = Path(config.model.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()
    return next(path for path in (place, *place.parents) if os.path.isdir(path))


def _problem(name: str, text: str) -> Problem:
    return Problem(f"--{FLAG} {name}: {text}", flag=FLAG)
