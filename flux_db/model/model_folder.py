"""A FLUX.1 folder as files: found or fetched, fingerprinted, and looked through for problems. Loads no weights.

Each problem names the flag, the value and what to do.
"""

import hashlib
import os
import re
import reprlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flux_db.console import stage
from flux_db.data import buckets
from flux_db.data.buckets import PIXELS_PER_TOKEN
from flux_db.errors import UserError, did_you_mean, is_full
from flux_db.files import TEXT_LIMIT, read_bytes
from flux_db.model.part_weights import (
    INCOMPLETE,
    choose,
    read_headers,
    read_object,
    short_name,
    variants,
    weight_problems,
)
from flux_db.settings.schema import Config, ModelConfig, validation_size

_WHOLE_FILE_BYTES = 64 * 2**20
_PIECE_BYTES = 2**20

NETWORKS = ("vae", "transformer", "text_encoder", "text_encoder_2")
PARTS = ("scheduler", *NETWORKS, "tokenizer", "tokenizer_2")

# Settings that training reads itself: the range that makes sense, and what stands for an absent one, if anything does.
_NUMBERS: dict[str, dict[str, tuple[float, float, float | None]]] = {
    "scheduler": {
        "num_train_timesteps": (1, 100_000, 1000),
        "shift": (1e-3, 1e3, 1.0),
        "base_shift": (-100.0, 100.0, 0.5),
        "max_shift": (-100.0, 100.0, 1.15),
    },
    "vae": {"scaling_factor": (1e-4, 1e4, None), "shift_factor": (-1e4, 1e4, None)},
}


# diffusers writes the class into a part's settings; another one would be a network of another kind.
_CLASSES = {"transformer": "FluxTransformer2DModel", "vae": "AutoencoderKL"}


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


def locate_checked(config: Config) -> Path:
    """As `locate`; a UserError if the folder, which may just have been downloaded, does not serve."""
    folder = locate(config.model)
    if problems := check_model(folder, config):
        raise UserError(problems)
    return folder


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


def check_model(folder: Path, config: Config) -> list[str]:
    """Problems of a model folder for this run; a name on the hub has one only after the download."""
    problems = [
        *(f"--variant {problem}" for problem in _variant_problems(folder, config.model.variant)),
        *(f"--pretrained_model_name_or_path {folder}: {problem}" for problem in _problems(folder, config)),
    ]
    return problems or _unmatched_layers(folder / "transformer", config)


def part_problems(part: Path, variant: str | None) -> list[str]:
    """Problems of a network's folder: its config.json, its weights, and whether they belong together."""
    problems: list[str] = []
    config = _read_settings(part, problems)
    return [*problems, *_detours(part, config or {}), *weight_problems(part, variant, config)]


def all_variants_problems(part: Path) -> list[str]:
    """As `part_problems`, for the plain weights and those of every variant that there are."""
    found = variants(part) or [None]
    return list(dict.fromkeys(problem for variant in found for problem in part_problems(part, variant)))


def _problems(folder: Path, config: Config) -> list[str]:
    try:
        index = read_object(folder / "model_index.json")
    except UserError as error:
        return [f"{problem}; a FLUX.1 folder in diffusers layout has it" for problem in error.problems]
    if (name := index.get("_class_name")) != "FluxPipeline":
        shown = name[:80] if isinstance(name, str) else reprlib.repr(name)
        return [f"model_index.json names a {shown}, not a FluxPipeline; use a FLUX.1 model"]
    problems: list[str] = []
    for part in PARTS:
        if os.path.isdir(folder / part):
            problems += MODEL_PARTS[part](folder / part, config.model.variant)
        else:
            problems.append(f"{part} is missing; {INCOMPLETE}")
    return problems or _wrong_sides(folder, config)


def _variant_problems(folder: Path, variant: str | None) -> list[str]:
    if variant is None:
        return []
    if not re.fullmatch(r"[\w.-]+", variant):
        return [f"{variant}: no weight file can have this in its name; give one such as fp16"]
    found = [choose(folder / part, variant) for part in NETWORKS]
    if any(chosen and chosen.variant for chosen in found):
        return []
    return [f"{variant}: no weight file in {folder} is of this variant; give another one or leave it out"]


def _unmatched_layers(part: Path, config: Config) -> list[str]:
    """Layers asked for that the transformer does not have; read from the headers of its weight files."""
    chosen = choose(part, config.model.variant)
    if config.lora.lora_layers is None or chosen is None:
        return []
    modules = [
        name.removesuffix(".weight")
        for name, entry in read_headers(chosen).entries.items()
        if name.endswith(".weight") and len(entry.shape) == 2
    ]
    endings = {".".join(name.split(".")[i:]) for name in modules for i in range(name.count(".") + 1)}
    return [
        f"--lora_layers {layer}: no linear layer of the transformer has this name{did_you_mean(layer, endings)}"
        for layer in config.lora.layers
        if layer not in endings
    ]


# ---- the parts ----


def _scheduler_problems(part: Path, _variant: str | None) -> list[str]:
    problems: list[str] = []
    _read_settings(part, problems)
    return problems


def _tokenizer_problems(part: Path, _variant: str | None) -> list[str]:
    """The files that the tokenizers read are small, and all but two are JSON."""
    problems: list[str] = []
    objects = ("vocab.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    for name in objects:
        if os.path.lexists(part / name):
            _read(part / name, problems)
    for name in ("merges.txt", "spiece.model"):
        if os.path.lexists(part / name):
            try:
                read_bytes(part / name, TEXT_LIMIT)
            except OSError as problem:
                problems.append(f"{part.name}/{name} cannot be read ({problem.strerror}); {INCOMPLETE}")
    sets = VOCABULARIES[part.name]
    if not any(all(os.path.isfile(part / name) for name in names) for names in sets):
        wanted = " or ".join(" and ".join(names) for names in sets)
        problems.append(f"{part.name} has no vocabulary ({wanted}); {INCOMPLETE}")
    return problems


# Sets of files that each hold a whole vocabulary. CLIP's tokenizer does not read tokenizer.json.
VOCABULARIES = {"tokenizer": (("vocab.json", "merges.txt"),), "tokenizer_2": (("tokenizer.json",), ("spiece.model",))}

MODEL_PARTS: dict[str, Callable[[Path, str | None], list[str]]] = {
    "scheduler": _scheduler_problems,
    "tokenizer": _tokenizer_problems,
    "tokenizer_2": _tokenizer_problems,
    **dict.fromkeys(NETWORKS, part_problems),
}


def _detours(part: Path, config: dict[str, Any]) -> list[str]:
    """What makes transformers load other weights than those that are checked here."""
    if not part.name.startswith("text_encoder"):
        return []
    found = ["config.json has transformers_weights"] if "transformers_weights" in config else []
    found += ["there is an adapter_config.json"] if os.path.lexists(part / "adapter_config.json") else []
    return [f"{part.name}: {reason}, so that other weights would be loaded; remove that" for reason in found]


def _read_settings(part: Path, problems: list[str]) -> dict[str, Any] | None:
    """A part's own settings, or None; with a note in problems on what is wrong with them."""
    file = part / _config_name(part.name)
    config = _read(file, problems)
    if config is None:
        return None
    for name, (least, most, default) in _NUMBERS.get(part.name, {}).items():
        value = config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | type(least)) or not least <= value <= most:
            kind = "whole number" if isinstance(least, int) else "number"
            problems.append(
                f"{short_name(file)}: {name} {reprlib.repr(value)}: must be a {kind} from {least:g} to {most:g}; "
                "fetch it again"
            )
    wanted = _CLASSES.get(part.name)
    if wanted and (name := config.get("_class_name", wanted)) != wanted:
        problems.append(f"{short_name(file)}: is of a {reprlib.repr(name)}, not of a {wanted}; use a FLUX.1 model")
    return config


def _wrong_sides(folder: Path, config: Config) -> list[str]:
    # Every VAE block but the last halves the picture, and a token is 2 x 2 latents.
    multiple = 2 ** len(read_config(folder, "vae")["block_out_channels"])
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


def _read(file: Path, problems: list[str]) -> dict[str, Any] | None:
    """The content of a JSON file, or None with a note in problems."""
    try:
        return read_object(file)
    except UserError as error:
        problems += [f"{problem}; {INCOMPLETE}" for problem in error.problems]
        return None
