"""The trained LoRA as a file that others load: diffusers' keys, honest metadata, no local paths."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from flux_db import __version__
from flux_db.lora.lora_file import ADAPTER_METADATA
from flux_db.model.identity import DEV, SCHNELL, base_model_name
from flux_db.settings.concepts import comparable, concepts_of
from flux_db.settings.derived import text_lora, triggers, validation_size
from flux_db.settings.lora_layers import needs_alphas
from flux_db.settings.resume_rules import FREE, GLOBAL_BATCH
from flux_db.settings.schema import SECTIONS, Config, LoraConfig, to_flat_dict
from flux_db.weight_file import to_bytes

# Settings without which nobody draws as the run's samples were drawn; under their own names.
DRAWN_WITH = (
    "max_sequence_length",
    "validation_inference_steps",
    "validation_guidance",
    "validation_seed",
    "mixed_precision",
    "base_precision",
)

# Of a metadata entry that a setting makes as long as it likes.
LONGEST_NOTE = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What the settings do not say about a run."""

    steps: int
    """Optimizer steps behind the weights."""
    pictures: int
    """Pictures of the subject."""
    global_batch: int
    """Pictures behind one optimizer step, over all devices."""
    kept_for: str | None = None
    """Of the best LoRA: what it is best in."""
    init_lora: str | None = None
    """The LoRA that it was started from: name and content."""


def lora_file(
    tensors: Mapping[str, np.ndarray], config: Config, facts: Facts, precision: str = "no", *, averaged: bool = False
) -> bytes:
    """A LoRA file. If `tensors` hold each module's alpha, the metadata must not: diffusers rejects that.

    `averaged`: the tensors are the average of --ema_decay, which the metadata then says.
    """
    metadata = {"format": "pt", **about(config, facts)}
    if averaged:
        metadata["ema_decay"] = str(config.optim.ema_decay)
    if not needs_alphas(config.lora):
        text = text_lora(config)
        entries = _adapter_metadata(tensors, config.lora, "transformer")
        entries |= _adapter_metadata(tensors, text, "text_encoder") if text else {}
        metadata[ADAPTER_METADATA] = json.dumps(entries, sort_keys=True)
    return to_bytes({name: _cast(value, precision) for name, value in tensors.items()}, metadata)


def about(config: Config, facts: Facts) -> dict[str, str]:
    """The metadata that people read; and the same under the names that kohya's tools and ComfyUI's helpers know."""
    data, lora, text = config.data, config.lora, text_lora(config)
    base = base_model_name(config.model.pretrained_model_name_or_path)
    words = _cut(", ".join(triggers(config))) or None
    flat, size = to_flat_dict(config), validation_size(config)
    architecture = {DEV: "flux-1-dev/lora", SCHNELL: "flux-1-schnell/lora"}.get(base)
    facts = {
        "flux_db_version": __version__,
        "base_model": base,
        "instance_prompt": _cut("; ".join(dict.fromkeys(concept.prompt for concept in concepts_of(config)))),
        "trigger_word": words,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "rank_pattern": _cut("; ".join(lora.lora_rank_pattern)) or None,
        "text_encoder_rank": text.rank if text else None,
        "init_lora": facts.init_lora,
        "steps": facts.steps,
        "resolution": data.resolution,
        "pictures": facts.pictures,
        "global_batch": facts.global_batch,
        "config_hash": settings_hash(config, facts.global_batch),
        "kept_for": facts.kept_for,
        "validation_size": f"{size.height}x{size.width}",
        **{name: flat[name] for name in DRAWN_WITH},
        "modelspec.architecture": architecture,
        "modelspec.resolution": f"{data.resolution}x{data.resolution}",
        "modelspec.trigger_phrase": words,
        "ss_base_model_version": "flux1",
        "ss_network_dim": lora.rank,
        "ss_network_alpha": lora.alpha,
        "ss_steps": facts.steps,
        "ss_num_train_images": facts.pictures,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_NOTE else f"{text[:LONGEST_NOTE]}..."


def settings_hash(config: Config, global_batch: int) -> str:
    """Hash of the settings that decide the result and are not at their defaults; the same wherever the files lie."""
    defaults = {field.name: field.default for section in SECTIONS.values() for field in dataclasses.fields(section)}
    binding = {
        name: value
        for name, value in comparable(to_flat_dict(config)).items()
        if name not in FREE
        and name not in GLOBAL_BATCH
        and not name.endswith(("_dir", "_file", "_path"))
        and value != (list(default) if isinstance(default := defaults[name], tuple) else default)
    }
    text = json.dumps({**binding, "global_batch": global_batch}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _adapter_metadata(tensors: Mapping[str, np.ndarray], lora: LoraConfig, part: str) -> dict[str, object]:
    own = [name.split(".", 1) for name in tensors]
    modules = sorted({name.rsplit(".", 2)[0] for prefix, name in own if prefix == part})
    settings = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
        "rank_pattern": {},
        "alpha_pattern": {},
        "lora_bias": False,
        "use_dora": False,
    }
    return {f"{part}.{name}": value for name, value in settings.items()}


def _cast(value: np.ndarray, precision: str) -> np.ndarray:
    if precision == "no" or value.ndim == 0:
        return value
    return value.astype(np.float16 if precision == "fp16" else ml_dtypes.bfloat16)
