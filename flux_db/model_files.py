"""A FLUX.1 folder as files: found or fetched, fingerprinted, and looked through for problems. Loads no weights.

Each problem names the flag, the value and what to do.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flux_db import buckets
from flux_db.buckets import PIXELS_PER_TOKEN
from flux_db.config import Config, LoraConfig, ModelConfig, validation_size
from flux_db.console import stage
from flux_db.errors import UserError, did_you_mean, is_full
from flux_db.weight_file import Entry, open_weights

# How the stand-in for a large file begins in a git clone made without LFS.
LFS_POINTER = b"version https://git-lfs"

_WHOLE_FILE_BYTES = 64 * 2**20
_PIECE_BYTES = 2**20

PARTS = ("scheduler", "vae", "transformer", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


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
                    allow_patterns=["model_index.json", *(f"{part}/*" for part in PARTS)],
                )
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
            if is_full(problem):
                raise
            raise UserError(
                f"--pretrained_model_name_or_path {config.pretrained_model_name_or_path}: is not a folder here, and "
                f"cannot be fetched from the hub ({type(problem).__name__}); give a local folder, or log in and retry"
            ) from problem


def fingerprint(folder: Path, parts: Iterable[str]) -> str:
    """Hash of the named parts' files; of large files the size and samples, since hashing T5 whole takes a minute."""
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
    return digest.hexdigest()


def read_config(folder: Path, part: str) -> dict[str, Any]:
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    return json.loads((folder / part / name).read_text(encoding="utf-8"))


def check_model(folder: Path, config: Config) -> list[str]:
    """Problems of a model folder for this run; a name on the hub has one only after the download."""
    problems = [
        f"--pretrained_model_name_or_path {folder}: {problem}"
        for problem in (
            *_missing_parts(folder, config.model.variant),
            *_wrong_sides(folder, config),
        )
    ]
    return problems or _unmatched_layers(folder / "transformer", config.lora)


def _unmatched_layers(part: Path, config: LoraConfig) -> list[str]:
    """Layers asked for that the transformer does not have; read from the headers of its weight files."""
    if config.lora_layers is None:
        return []
    modules = {
        name.removesuffix(".weight")
        for file in part.glob("*.safetensors")
        for name, entry in _entries(file).items()
        if name.endswith(".weight") and len(entry.shape) == 2
    }
    if not modules:
        return []  # not for this check to tell: a damaged file shows when it is loaded
    endings = {".".join(name.split(".")[i:]) for name in modules for i in range(name.count(".") + 1)}
    return [
        f"--lora_layers {layer}: no linear layer of the transformer has this name{did_you_mean(layer, endings)}"
        for layer in config.layers
        if layer not in endings
    ]


def _entries(file: Path) -> dict[str, Entry]:
    try:
        return open_weights(file).entries
    except UserError:
        return {}


def _missing_parts(folder: Path, variant: str | None) -> list[str]:
    problems: list[str] = []
    index = _read_json(folder / "model_index.json", problems)
    if index is None:
        return [f"{problems[0]}; a FLUX.1 folder in diffusers layout has it"]
    if index.get("_class_name") != "FluxPipeline":
        return [f"model_index.json names a {index.get('_class_name')}, not a FluxPipeline; use a FLUX.1 model"]
    for part, check_part in MODEL_PARTS.items():
        if os.path.isdir(folder / part):
            problems += check_part(folder / part, variant)
        else:
            problems.append(f"{part} is missing")
    return [f"{problem}; the download may be incomplete" for problem in problems]


def _scheduler_problems(part: Path, _variant: str | None) -> list[str]:
    problems: list[str] = []
    _read_json(part / "scheduler_config.json", problems)
    return problems


def _network_problems(part: Path, variant: str | None) -> list[str]:
    problems: list[str] = []
    _read_json(part / "config.json", problems)
    return problems + _weight_problems(part, variant)


def _tokenizer_problems(part: Path, _variant: str | None) -> list[str]:
    if any(os.path.isfile(part / name) for name in ("tokenizer.json", "vocab.json", "spiece.model")):
        return []
    return [f"{part.name} has no vocabulary"]


MODEL_PARTS: dict[str, Callable[[Path, str | None], list[str]]] = {
    "scheduler": _scheduler_problems,
    "vae": _network_problems,
    "transformer": _network_problems,
    "text_encoder": _network_problems,
    "text_encoder_2": _network_problems,
    "tokenizer": _tokenizer_problems,
    "tokenizer_2": _tokenizer_problems,
}


def _weight_problems(part: Path, variant: str | None) -> list[str]:
    """Weights are one safetensors file, or an index that names several; a variant's files go before the plain ones."""
    stem = "model" if part.name.startswith("text_encoder") else "diffusion_pytorch_model"
    for single, index in (
        (f"{stem}.{variant}.safetensors", f"{stem}.safetensors.index.{variant}.json"),
        (f"{stem}.safetensors", f"{stem}.safetensors.index.json"),
    ):
        if os.path.isfile(part / single):
            return _damaged([part / single])
        if os.path.isfile(part / index):
            return _shard_problems(part / index)
    return [f"{part.name} has no weights ({stem}.safetensors or {stem}.safetensors.index.json)"]


def _shard_problems(index: Path) -> list[str]:
    problems: list[str] = []
    content = _read_json(index, problems)
    if content is None:
        return problems
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        return [f"{index.parent.name}/{index.name} names no weight files"]
    return _damaged(sorted({index.parent / str(shard) for shard in weight_map.values()}))


def _damaged(files: list[Path]) -> list[str]:
    problems = []
    for file in files:
        name = f"{file.parent.name}/{file.name}"
        try:
            with file.open("rb") as stream:
                start = stream.read(len(LFS_POINTER))
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
        else:
            if not start:
                problems.append(f"{name} is empty")
            elif start == LFS_POINTER:
                problems.append(f"{name} is only a pointer of Git LFS, which git lfs pull would fetch")
    return problems


def _wrong_sides(folder: Path, config: Config) -> list[str]:
    channels = (_read_json(folder / "vae" / "config.json", []) or {}).get("block_out_channels")
    # Every VAE block but the last halves the picture, and a token is 2 x 2 latents.
    multiple = 2 ** len(channels) if isinstance(channels, list) else PIXELS_PER_TOKEN
    if PIXELS_PER_TOKEN % multiple == 0:
        return []
    data, found = config.data, []
    if data.resolution % multiple:
        found.append(f"its VAE needs a multiple of {multiple}, not --resolution {data.resolution}")
    if any(side % multiple for size in _possible_sizes(config) for side in size):
        found.append(f"its VAE needs multiples of {multiple}; name such sizes with --aspect_ratio_buckets")
    size = config.validation.validation_size
    if size is not None and any(side % multiple for side in validation_size(config)):
        found.append(f"its VAE needs multiples of {multiple}, not --validation_size {size}")
    return found


def _possible_sizes(config: Config) -> list[buckets.Size]:
    data, text = config.data, config.data.aspect_ratio_buckets
    if text is None or buckets.problems(text, data.resolution, data.max_buckets):
        return []
    return buckets.candidates(data.resolution) if text.strip() == buckets.AUTO else buckets.parse(text)


def _read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    """The content of a JSON file, or None with a note in problems."""
    name = file.name if file.name == "model_index.json" else f"{file.parent.name}/{file.name}"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{name} is missing")
    except (OSError, ValueError) as error:
        problems.append(f"{name} cannot be read ({error})")
    else:
        if isinstance(content, dict):
            return content
        problems.append(f"{name} holds no JSON object")
    return None
