"""DINOv2 and CLIP folders, which score samples, as files: found or fetched, and looked through. Loads no weights."""

from __future__ import annotations

import os
import re
import reprlib
from pathlib import Path

from flux_db.console import stage
from flux_db.errors import UserError, is_full
from flux_db.model import picture_processor
from flux_db.model.part_weights import INCOMPLETE, read_object, weight_problems

# config.json names it as model_type; the name is also that of the network in expected_weights.
NAMES = {"dinov2": "DINOv2", "clip": "CLIP"}

_TOKENIZER = ("vocab.json", "merges.txt")
_PATTERNS = ["*.json", "*.safetensors", "merges.txt"]


def name_problem(name: str) -> str | None:
    """What is wrong with a folder or a name on the hub, before anything is fetched."""
    if os.path.isdir(name):
        return None
    if os.path.exists(name):
        return "is a file; give the folder"
    is_local = name.startswith((".", os.sep, "~")) or (os.sep in name and os.path.isdir(os.path.dirname(name)))
    if is_local:
        return "no such folder; check the path"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    return "neither a folder nor a name on the hub of the form owner/model"


def locate(name: str, flag: str, network: str, cache_dir: str | None = None) -> Path:
    """The folder on this machine, fetched first if the name is one of the hub; a UserError if it does not serve."""
    if problem := name_problem(name):
        raise UserError(f"{flag} {name}: {problem}")
    folder = Path(name) if os.path.isdir(name) else _fetch(name, flag, cache_dir)
    if found := problems(folder, network):
        raise UserError([f"{flag} {name}: {problem}" for problem in found])
    return folder


def problems(folder: Path, network: str) -> list[str]:
    """All that is wrong with the folder, each a sentence."""
    try:
        config = read_object(folder / "config.json")
    except UserError as error:
        return [f"{problem}; a folder with a {NAMES[network]} has it" for problem in error.problems]
    if (kind := config.get("model_type")) != network:
        return [f"its config.json is of a {reprlib.repr(kind)}, not of a {NAMES[network]} ({network})"]
    found = weight_problems(folder, None, config, network)
    try:
        processing = picture_processor.read(folder, network)
        found += [] if found else _size_problems(config, processing, network)
    except UserError as error:
        found += error.problems
    if network == "clip" and (missing := [name for name in _TOKENIZER if not os.path.isfile(folder / name)]):
        found.append(f"has no vocabulary ({' and '.join(missing)}); {INCOMPLETE}")
    return found


def _size_problems(config: dict, processing: picture_processor.Processing, network: str) -> list[str]:
    """Whether the pictures that the processor makes fit the network."""
    file = picture_processor.FILE
    if processing.result is None:
        return [f"{file} neither crops nor resizes to one size; give a folder whose pictures have one size"]
    height, width = processing.result
    if network == "clip":
        side = config["vision_config"].get("image_size", 224)
        return (
            [] if height == width == side else [f"{file} makes {height}x{width}, but config.json wants {side}x{side}"]
        )
    patch = config.get("patch_size", 14)
    fits = height >= patch and width >= patch
    return [] if fits else [f"{file} makes {height}x{width}, less than a patch of {patch}x{patch}"]


def _fetch(name: str, flag: str, cache_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with stage(f"Fetching {name} from the hub"):
        try:
            return Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=_PATTERNS))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
            if is_full(problem):
                raise
            raise UserError(
                f"{flag} {name}: is not a folder here, and cannot be fetched from the hub "
                f"({type(problem).__name__}); give a local folder, or log in and retry"
            ) from problem
