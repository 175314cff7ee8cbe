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
from flux_db.settings.derived import instance_prompt, text_lora
from flux_db.settings.resume_rules import FREE, GLOBAL_BATCH
from flux_db.settings.schema import SECTIONS, Config, LoraConfig, to_flat_dict
from flux_db.weight_file import to_bytes


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


def lora_file(tensors: Mapping[str, np.ndarray], config: Config, facts: Facts, precision: str = "no") -> bytes:
    """A LoRA file. With alpha != rank `tensors` hold each module's alpha; diffusers rejects it in metadata as well."""
    metadata = {"format": "pt", **about(config, facts)}
    if config.lora.alpha == config.lora.rank:
        text = text_lora(config)
        entries = _adapter_metadata(tensors, config.lora, "transformer")
        entries |= _adapter_metadata(tensors, text, "text_encoder") if text else {}
        metadata[ADAPTER_METADATA] = json.dumps(entries, sort_keys=True)
    return to_bytes({name: _cast(value, precision) for name, value in tensors.items()}, metadata)


def about(config: Config, facts: Facts) -> dict[str, str]:
    """The metadata that people read; and the same under the names that kohya's tools and ComfyUI's helpers know."""
    data, lora, text = config.data, config.lora, text_lora(config)
    base = base_model_name(config.model.pretrained_model_name_or_path)
    architecture = {DEV: "flux-1-dev/lora", SCHNELL: "flux-1-schnell/lora"}.get(base)
    facts = {
        "flux_db_version": __version__,
        "base_model": base,
        "instance_prompt": instance_prompt(config),
        "trigger_word": data.trigger_word,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "text_encoder_rank": text.rank if text else None,
        "steps": facts.steps,
        "resolution": data.resolution,
        "pictures": facts.pictures,
        "global_batch": facts.global_batch,
        "config_hash": settings_hash(config, facts.global_batch),
        "kept_for": facts.kept_for,
        "modelspec.architecture": architecture,
        "modelspec.resolution": f"{data.resolution}x{data.resolution}",
        "modelspec.trigger_phrase": data.trigger_word,
        "ss_base_model_version": "flux1",
        "ss_network_dim": lora.rank,
        "ss_network_alpha": lora.alpha,
        "ss_steps": facts.steps,
        "ss_num_train_images": facts.pictures,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def settings_hash(config: Config, global_batch: int) -> str:
    """Hash of the settings that decide the result and are not at their defaults; the same wherever the files lie."""
    defaults = {field.name: field.default for section in SECTIONS.values() for field in dataclasses.fields(section)}
    binding = {
        name: value
        for name, value in to_flat_dict(config).items()
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
