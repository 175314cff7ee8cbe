"""What follows from the settings: prompts with the trigger word, sizes, folders, batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from flux_db.output_folder import CACHE, CLASS_PICTURES
from flux_db.settings.concepts import CLASS_PROMPT, INSTANCE_PROMPT, concepts_of, has_trigger
from flux_db.settings.prompt_lines import PromptLine, read_prompts
from flux_db.settings.schema import Config, LoraConfig, to_flat_dict
from flux_db.size import Size, parse_size


def instance_prompt(config: Config) -> str:
    """--instance_prompt as the model sees it; that of the first concept."""
    return concepts_of(config)[0].prompt


def triggers(config: Config) -> tuple[str, ...]:
    """Those of the concepts that have one, each once."""
    return tuple(dict.fromkeys(concept.trigger for concept in concepts_of(config) if concept.trigger is not None))


class Recomputed(NamedTuple):
    """--gradient_checkpointing: what the backward pass computes again."""

    cells: Literal["none", "blocks", "attention"]
    count: int | None = None
    """Only in the first so many blocks; None: in all of them."""


def recomputed(config: Config) -> Recomputed | None:
    """None if the setting makes no sense."""
    text = config.runtime.gradient_checkpointing
    if text in ("none", "blocks", "attention"):
        return Recomputed(text)  # type: ignore[arg-type]
    return Recomputed("blocks", int(text)) if text.isdecimal() and len(text) < 5 and int(text) > 0 else None


def is_int8(config: Config) -> bool:
    """Whether the frozen transformer's matrices are stored as int8."""
    return config.runtime.base_precision == "int8"


def text_lora(config: Config) -> LoraConfig | None:
    """The LoRA of the text encoder: as strong, by alpha / rank, as the transformer's; None if it is not trained."""
    lora, text = config.lora, config.text_encoder
    if not text.train_text_encoder:
        return None
    rank = text.text_encoder_rank or lora.rank
    return LoraConfig(
        rank=rank,
        lora_alpha=None if lora.alpha == lora.rank else lora.alpha * rank / lora.rank,
        lora_dropout=lora.lora_dropout,
        lora_compute=lora.lora_compute,
        lora_layers=",".join(text.layers),
    )


def background(config: Config) -> tuple[int, int, int]:
    """--alpha_background as red, green and blue; a ValueError if it is no colour."""
    from PIL import ImageColor

    red, green, blue = ImageColor.getrgb(config.data.alpha_background.strip())
    return red, green, blue


def cache_path(config: Config) -> Path:
    """Folder of the encoded prompts and pictures."""
    return Path(config.data.encode_cache_dir or Path(config.output.output_dir, CACHE))


def class_path(config: Config) -> Path:
    """Folder of the class pictures."""
    return Path(config.data.class_data_dir or Path(config.output.output_dir, CLASS_PICTURES))


def sample_prompts(config: Config) -> tuple[PromptLine, ...]:
    """Every prompt to draw samples from, in order: those of --validation_prompt, then the file's with their options.

    One with {instance_prompt} or {trigger} in it is drawn for each concept (that has a trigger).
    """
    lines = (line.with_text(text) for line in raw_sample_prompts(config) for text in _filled(config, line.text))
    return tuple(dict.fromkeys(lines))


def _filled(config: Config, text: str) -> list[str]:
    concepts = concepts_of(config)
    named = [concept for concept in concepts if concept.trigger is not None]
    text = text.replace(CLASS_PROMPT, config.data.class_prompt or CLASS_PROMPT)
    return [
        concept.fill_trigger(text.replace(INSTANCE_PROMPT, concept.prompt))
        for concept in (named if has_trigger(text) and named else concepts)
    ]


def raw_sample_prompts(config: Config) -> list[PromptLine]:
    """The same as they were written, with {trigger} and {instance_prompt} in them."""
    file = config.validation.validation_prompts_file
    given = [PromptLine(text=prompt) for prompt in config.validation.validation_prompt]
    return [*given, *(read_prompts(file, "validation_prompts_file") if file else [])]


def validation_prompts(config: Config) -> tuple[str, ...]:
    """The distinct texts of all prompts to draw samples from."""
    return tuple(dict.fromkeys(line.text for line in sample_prompts(config)))


def validation_size(config: Config) -> Size:
    """Of the samples."""
    size = config.validation.validation_size
    return (parse_size(size) if size else None) or Size.square(config.data.resolution)


def shown_settings(config: Config) -> dict[str, Any]:
    """The settings as others may see them: without secrets."""
    return {name: value for name, value in to_flat_dict(config).items() if not name.endswith("token")}


def global_batch(config: Config, world_size: int) -> int:
    """Pictures of the subject behind one optimizer step, over all devices."""
    return config.optim.train_batch_size * config.optim.gradient_accumulation_steps * world_size
