"""What a run writes to disk, computed from its settings and the model's config.json."""

from __future__ import annotations

from typing import NamedTuple

from flux_db.check.device_memory import FLOAT, Model, state_vectors, trained_parameters
from flux_db.settings.schema import Config


class Disk(NamedTuple):
    """Bytes of files."""

    prompt: int
    """Encoded, of each."""
    picture: int
    """Encoded, of each picture of the subject, with its crops and mirrored."""
    checkpoint: int
    lora: int


def disk(config: Config, model: Model) -> Disk:
    count, data = trained_parameters(config, model), config.data
    t5, clip = (model.settings[part] for part in ("text_encoder_2", "text_encoder"))
    prompt = (data.max_sequence_length * t5.get("d_model", 512) + clip.get("hidden_size", 512)) * FLOAT
    side = data.resolution // 2 ** (len(model.channels) - 1)
    moments = 2 * model.settings["vae"]["latent_channels"] * side * side * FLOAT
    copies = data.cache_crops * (2 if data.random_flip else 1) if data.cache_latents else 0
    kept = state_vectors(config) + 1 - (config.optim.gradient_accumulation_steps > 1)
    return Disk(prompt, moments * copies, count * FLOAT * kept, count * FLOAT)
