"""What follows from the settings: prompts with the trigger word, sizes, folders, batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flux_db.errors import UserError
from flux_db.files import read_text, text_problem
from flux_db.output_folder import CACHE
from flux_db.settings.schema import Config, LoraConfig, to_flat_dict
from flux_db.size import Size, parse_size

# Of a file; each is encoded and drawn.
MOST_PROMPTS = 10_000

_TRIGGER = re.compile(r"\{trigger\}|\[trigger\]", re.IGNORECASE)


def has_trigger(text: str) -> bool:
    return _TRIGGER.search(text) is not None


def fill_trigger(text: str, config: Config) -> str:
    """A prompt or caption with --trigger_word in the place of {trigger} or [trigger]."""
    return replace_trigger(text, config.data.trigger_word)


def replace_trigger(text: str, word: str | None) -> str:
    return text if word is None else _TRIGGER.sub(lambda _: word, text)


def instance_prompt(config: Config) -> str:
    """--instance_prompt as the model sees it."""
    return fill_trigger(config.data.instance_prompt, config)


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


def validation_prompts(config: Config) -> tuple[str, ...]:
    """Every prompt to draw samples from, in order: those of --validation_prompt, then the file's."""
    return tuple(dict.fromkeys(fill_trigger(prompt, config) for prompt in raw_validation_prompts(config)))


def raw_validation_prompts(config: Config) -> list[str]:
    """The same as they were written, with {trigger} in them."""
    file = config.validation.validation_prompts_file
    return [*config.validation.validation_prompt, *(read_prompts(file, "validation_prompts_file") if file else [])]


def read_prompts(path: Path | str, flag: str) -> list[str]:
    """The prompts of a text file, one on each line; empty lines and those that begin with # are none."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file in UTF-8"
        raise UserError(f"--{flag} {path}: {reason}") from None
    if problem := text_problem(text):
        raise UserError(f"--{flag} {path}: {problem}")
    lines = [line.strip() for line in text.splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if len(prompts) > MOST_PROMPTS:
        raise UserError(f"--{flag} {path}: has {len(prompts):,} prompts; at most {MOST_PROMPTS:,} can be drawn")
    return prompts


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
