"""A FLUX.1 folder as files: found or fetched, fingerprinted, and looked through for problems. Loads no weights.

Each problem names the flag, the value and what to do.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flux_db.console import stage
from flux_db.errors import UserError, is_full
from flux_db.model.part_weights import (
    choose,
    read_object,
)
from flux_db.settings.schema import ModelConfig

_WHOLE_FILE_BYTES = 64 * 2**20
_PIECE_BYTES = 2**20

NETWORKS = ("vae", "transformer", "text_encoder", "text_encoder_2")
PARTS = ("scheduler", *NETWORKS, "tokenizer", "tokenizer_2")
FETCHED = ("model_index.json", *(f"{part}/*" for part in PARTS))
"""Patterns of the files that are downloaded."""


def locate(config: ModelConfig) -> Path:
    """The model's folder on this machine; downloaded first, if the name is one of the hub."""
    folder = Path(config.pretrained_model_name_or_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with stage(f"Fetching {config.pretrained_model_name_or_path} from the hub"):
        try:
            return Path(
                snapshot_download(
                    config.pretrained_model_name_or_path,
                    revision=config.revision,
                    cache_dir=config.cache_dir,
                    allow_patterns=list(FETCHED),
                )
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
            if is_full(problem):
                raise
            raise UserError(
                f"--pretrained_model_name_or_path {config.pretrained_model_name_or_path}: is not a folder here, and "
                f"cannot be fetched from the hub ({type(problem).__name__}); give a local folder, or log in and retry"
            ) from problem


def fingerprint(folder: Path, parts: Iterable[str], variant: str | None = None) -> str:
    """Hash of the named parts' files; of large files the size and samples, since hashing T5 whole takes a minute.

    A folder may hold the weights of several variants. The plain ones leave no trace, so that what was stored when there
    was no such distinction stays valid.
    """
    parts = tuple(parts)
    digest = hashlib.sha256()
    for path in sorted(p for part in parts for p in (folder / part).rglob("*") if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
                continue
            for offset in range(0, size, size // 16):
                file.seek(offset)
                digest.update(file.read(_PIECE_BYTES))
    for part in parts:
        chosen = choose(folder / part, variant) if part in NETWORKS else None
        if chosen and chosen.variant:
            digest.update(f"loaded: {chosen.file.relative_to(folder)}\n".encode())
    return digest.hexdigest()


def read_config(folder: Path, part: str) -> dict[str, Any]:
    return read_object(folder / part / _config_name(part))


def _config_name(part: str) -> str:
    return "scheduler_config.json" if part == "scheduler" else "config.json"


# ---- the parts ----
