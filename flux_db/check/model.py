"""Problems of a FLUX.1 folder for a run. Loads no weights."""

from __future__ import annotations

import os
import re
import reprlib
from contextlib import suppress
from pathlib import Path

from flux_db.data import buckets
from flux_db.errors import UserError, did_you_mean
from flux_db.model import int8
from flux_db.model.model_folder import NETWORKS, PARTS, locate, read_config
from flux_db.model.part_weights import INCOMPLETE, choose, read_headers, read_object
from flux_db.model.parts import MODEL_PARTS
from flux_db.problem import Problem
from flux_db.settings import layer_patterns, lora_layers
from flux_db.settings.concepts import concepts_of
from flux_db.settings.derived import is_int8, sample_prompts, validation_size
from flux_db.settings.preserved import is_preserved
from flux_db.settings.schema import Config, LossConfig
from flux_db.size import PIXELS_PER_TOKEN, Size

# What --preserve_class holds at one guidance, it holds at others as near as this.
HELD_NEAR = 1.0


def locate_checked(config: Config) -> Path:
    """As `locate`; a UserError if the folder, which may just have been downloaded, does not serve."""
    folder = locate(config.model)
    if problems := check_model(folder, config):
        raise UserError(problems)
    return folder


def check_model(folder: Path, config: Config) -> list[Problem]:
    """Problems of a model folder for this run; a name on the hub has one only after the download."""
    problems = [
        *(Problem(f"--variant {text}", flag="variant") for text in _variant_problems(folder, config.model.variant)),
        *(
            Problem(
                f"--pretrained_model_name_or_path {folder}: {text}",
                flag="pretrained_model_name_or_path",
                also=("variant",),
            )
            for text in _problems(folder, config.model.variant)
        ),
    ]
    problems = problems or _int8_problems(folder, config)
    if problems:
        return problems
    return _wrong_sides(folder, config) or _unmatched_layers(folder / "transformer", config)


def model_warnings(config: Config, folder: Path | None = None) -> list[Problem]:
    """What a sound model makes of a setting, if that is hardly meant; nothing for a model that is not here yet."""
    folder = folder or Path(config.model.pretrained_model_name_or_path)
    try:
        has_guidance = read_config(folder, "transformer").get("guidance_embeds", False)
    except (OSError, ValueError, UserError):
        return []
    scale, drawn = config.loss.guidance_scale, config.validation.validation_guidance
    if not has_guidance and scale != LossConfig().guidance_scale:
        text = f"--guidance_scale {scale:g}: not used, because the model has no guidance embedding (as FLUX.1-schnell)"
        return [Problem(text, flag="guidance_scale", also=("pretrained_model_name_or_path",))]
    if has_guidance and is_preserved(config) and abs(drawn - scale) > HELD_NEAR:
        text = (
            f"--preserve_class holds the class at --guidance_scale {scale:g} alone, but pictures are drawn at"
            f" {drawn:g}: there it may turn grey; train with --guidance_scale {drawn:g}"
        )
        return [Problem(text, flag="guidance_scale", also=("preserve_class", "validation_guidance"))]
    return []


def _problems(folder: Path, variant: str | None) -> list[str]:
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
            problems += MODEL_PARTS[part](folder / part, variant)
        else:
            problems.append(f"{part} is missing; {INCOMPLETE}")
    return problems


def _variant_problems(folder: Path, variant: str | None) -> list[str]:
    if variant is None:
        return []
    if not re.fullmatch(r"[\w.-]+", variant):
        return [f"{variant}: no weight file can have this in its name; give one such as fp16"]
    found = [choose(folder / part, variant) for part in NETWORKS]
    if any(chosen and chosen.variant for chosen in found):
        return []
    return [f"{variant}: no weight file in {folder} is of this variant; give another one or leave it out"]


def _unmatched_layers(part: Path, config: Config) -> list[Problem]:
    """Layers asked for that the transformer does not have; read from the headers of its weight files."""
    chosen, lora, optim = choose(part, config.model.variant), config.lora, config.optim
    if chosen is None or not (lora.lora_layers or lora.lora_rank_pattern or optim.lora_lr_pattern):
        return []
    try:
        choice = lora_layers.parse(lora.lora_layers)
        patterns = {
            "lora_rank_pattern": lora_layers.rank_patterns(lora.lora_rank_pattern),
            "lora_lr_pattern": lora_layers.rate_patterns(optim.lora_lr_pattern),
        }
    except ValueError:  # reported by the check of values
        return []
    modules = [
        name.removesuffix(".weight")
        for name, entry in read_headers(chosen).entries.items()
        if name.endswith(".weight") and len(entry.shape) == 2
    ]
    endings = {".".join(name.split(".")[i:]) for name in modules for i in range(name.count(".") + 1)}
    where = " in these blocks" if choice.blocks else ""
    trained = [name for name in modules if choice.takes(name)]
    found = [
        Problem(
            f"--lora_layers {item}: no linear layer of the transformer has this name{where}"
            f"{did_you_mean(item, endings)}",
            flag="lora_layers",
        )
        for item in choice.names
        if not any(lora_layers.is_named(item, name) and choice.is_in_blocks(name) for name in modules)
    ]
    if not found:
        found += [
            Problem(f"--lora_layers {blocks}: the transformer has no such layers in these blocks", flag="lora_layers")
            for blocks in choice.blocks
            if not any(map(blocks.holds, trained))
        ]
    return found + [
        Problem(f"--{flag} {expression}: fits no layer that is trained", flag=flag, also=("lora_layers",))
        for flag, own in patterns.items()
        for expression in layer_patterns.unused(own, trained)
        if trained
    ]


def _int8_problems(folder: Path, config: Config) -> list[Problem]:
    chosen = choose(folder / "transformer", config.model.variant)
    entries = read_headers(chosen).entries if chosen else {}
    if is_int8(config) or not any(int8.is_stored(entries, name) for name in entries):
        return []
    flag, model = "base_precision", "pretrained_model_name_or_path"
    text = f"--{model} {folder}: its transformer is stored as int8; add --{flag} int8, or give the original model"
    return [Problem(text, flag=flag, also=(model,))]


def _wrong_sides(folder: Path, config: Config) -> list[Problem]:
    # Every VAE block but the last halves the picture, and a token is 2 x 2 latents.
    multiple = 2 ** len(read_config(folder, "vae")["block_out_channels"])
    if PIXELS_PER_TOKEN % multiple == 0:
        return []
    data, found = config.data, []
    if data.resolution % multiple:
        found.append(("resolution", f"a multiple of {multiple}, not --resolution {data.resolution}"))
    if wrong := [side for concept in data.concepts for side in concept.resolutions if side % multiple]:
        found.append(("concepts", f"multiples of {multiple} as resolutions in --concepts, not {wrong[0]}"))
    if any(side % multiple for size in _possible_sizes(config) for side in size):
        found.append(("aspect_ratio_buckets", f"multiples of {multiple}; name such sizes with --aspect_ratio_buckets"))
    size = config.validation.validation_size
    if size is not None and any(side % multiple for side in validation_size(config)):
        found.append(("validation_size", f"multiples of {multiple}, not --validation_size {size}"))
    if any(side % multiple for side in _sides_of_prompts(config)):
        file = config.validation.validation_prompts_file
        found.append(("validation_prompts_file", f"multiples of {multiple} as --w and --h in {file}"))
    model = "pretrained_model_name_or_path"
    return [Problem(f"--{model} {folder}: its VAE needs {text}", flag=flag, also=(model,)) for flag, text in found]


def _sides_of_prompts(config: Config) -> list[int]:
    with suppress(UserError):  # reported with the file
        return [side for line in sample_prompts(config) for side in (line.width, line.height) if side is not None]
    return []


def _possible_sizes(config: Config) -> list[Size]:
    data, text = config.data, config.data.aspect_ratio_buckets
    if text is None or buckets.problems(text, data.resolution, data.max_buckets):
        return []
    if text.strip() != buckets.AUTO:
        return buckets.parse(text)
    sides = {side for concept in concepts_of(config) for side in concept.resolutions}
    return [size for side in sorted(sides) for size in buckets.candidates(side)]
