"""The configured step, called once on inputs of zeros: what `dry-run-ascend` does in its child."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from mindspore import Tensor

from flux_db.check.model import locate_checked
from flux_db.console import say, stage
from flux_db.data.dataset import Dataset, read_dataset
from flux_db.data.encode import CLIP_TOKENS
from flux_db.data.selection import lacks_class_images
from flux_db.errors import UserError
from flux_db.model import model_folder, runtime
from flux_db.settings.preserved import is_preserved
from flux_db.settings.schema import Config
from flux_db.size import Size
from flux_db.step_inputs import StepInputs
from flux_db.stream import DROPOUT_NUMBERS
from flux_db.training.build import Training, build


def call_once(config: Config) -> None:
    """Build the step as a run would, and call it for its largest size. What it returns is not read: under simulation
    it means nothing."""
    if lacks_class_images(config):
        raise UserError("--class_data_dir: the class pictures are not there yet; draw them first, by class-images")
    # compiled for certain: MindSpore computes the memory while it compiles
    place = runtime.start(replace(config.runtime, compile_cache="off"), alone=True)
    model = locate_checked(config)
    dataset, _ = read_dataset(config)
    training = build(config, place, model, dataset)
    size = max(dataset.sizes, key=math.prod)
    say(f"The step for {size} with {training.layout.batch} pictures")
    inputs = [Tensor(column) for column in zeros(config, model, dataset, training, size).given]
    with stage("Compiling and calling it once"):
        training.step(*inputs)


def zeros(config: Config, model: Path, dataset: Dataset, training: Training, size: Size) -> StepInputs:
    """A batch of the right shapes and types."""
    rows = training.layout.batch * (2 if dataset.class_examples else 1)
    widths = model_folder.read_config(model, "transformer")
    channels = training.latent_shape[0]
    shrink = config.data.resolution // training.latent_shape[1]
    latent = (size.height // shrink, size.width // shrink)
    cached, clip = config.data.cache_latents, training.text_encoder is not None
    zero = lambda *shape: np.zeros((rows, *shape), np.float32)  # noqa: E731
    twice = lambda row: np.concatenate([row, row]) if is_preserved(config) else row  # noqa: E731
    return StepInputs(
        pictures=zero(2 * channels, *latent) if cached else zero(3, size.height, size.width),
        eps=zero(channels, *latent),
        noise=zero(channels, *latent),
        index=np.zeros(rows, np.int32),
        prompt_embeds=twice(zero(config.data.max_sequence_length, widths["joint_attention_dim"])),
        pooled_prompt_embeds=twice(
            np.zeros((rows, CLIP_TOKENS), np.int32) if clip else zero(widths["pooled_projection_dim"])
        ),
        dropout_key=twice(zero(DROPOUT_NUMBERS)),
        lr=np.zeros(3 if clip else (), np.float32),
        boundary=np.array(True),
        mask=zero(1, *latent) if dataset.weighted else None,
        concept=zero(len(config.data.concepts)) if dataset.is_of_several else None,
    )
