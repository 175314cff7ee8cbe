"""The loss of pictures that are not trained on; timesteps and noise are fixed, so that steps can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import nullcontext

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from flux_db.console import say, stage
from flux_db.data.dataset import Dataset, Example
from flux_db.data.encode_cache import Cache
from flux_db.data.timesteps import timestep_index
from flux_db.model import flow
from flux_db.model.repeated_calls import CalledOften
from flux_db.model.runtime import Runtime
from flux_db.run.metrics_file import Row
from flux_db.run.saved_state import Best
from flux_db.settings.concepts import concepts_of
from flux_db.settings.schema import Config
from flux_db.stream import Purpose, generator
from flux_db.train_step import StepSettings, Velocity
from flux_db.training.text_vectors import TextVectors

# Each picture is noised at so many levels, spread evenly over the schedule.
LEVELS = 8


class FlowLoss(CalledOften, nn.Cell, Velocity):
    """The training step's loss without its gradient, its weights by scheme and the LoRA's dropout.

    moments [1, 2C, h, w], noise [1, C, h, w], index [1], prompt_embeds [1, L, D], pooled [1, D'] -> [1]
    """

    def __init__(self, transformer: nn.Cell, settings: StepSettings) -> None:
        # the transformer's parameters keep their names
        super().__init__(auto_prefix=False)
        self.model = transformer
        self.vae_shift, self.vae_scale = settings.vae_shift, settings.vae_scale
        self.guidance_scale = settings.guidance_scale
        self.dtype = settings.dtype
        self.sigmas = Tensor(settings.sigmas, ms.float32)
        self.timesteps = Tensor(settings.timesteps, ms.float32)

    def construct(self, moments, noise, index, prompt_embeds, pooled):
        # the posterior's mean: what the VAE would draw around it says nothing about the LoRA
        x_0 = flow.latents_from_moments(moments, ops.zeros_like(noise), self.vae_shift, self.vae_scale)
        x_t = flow.add_noise(x_0, noise, self.sigmas[index])
        velocity = self.velocity(x_t, index, prompt_embeds, pooled)
        return flow.squared_error(velocity, flow.pack(noise - x_0), ops.ones_like(self.sigmas[index]))


class HeldOut:
    """The pictures held out, and the mean of their losses over pictures and timesteps."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        cache: Cache,
        dataset: Dataset,
        transformer: nn.Cell,
        settings: StepSettings,
        vectors: TextVectors | None = None,
    ) -> None:
        self.vectors = vectors or TextVectors(cache, None)
        self.runtime = runtime
        self.cache = cache
        self.seed = config.validation.validation_seed
        self.transformer = transformer
        # a transformer spread over the ranks needs all of them for every forward
        self.even = config.runtime.shard_base
        self.loss = FlowLoss(transformer, settings)
        timesteps = [timestep_index((i + 0.5) / LEVELS, len(settings.sigmas)) for i in range(LEVELS)]
        self.evaluations = [(example, index) for example in dataset.held_out for index in timesteps]
        self.names = [concept.name for concept in concepts_of(config)]
        self.by_concept: dict[str, float] = {}
        """Of the last measurement, if there are several concepts."""
        self.compiled = not runtime.is_main  # the other ranks say nothing
        about = [config.data.resolution, self.seed, settings.guidance_scale, timesteps]
        about += [[example.picture.digest, example.prompt] for example in dataset.held_out]
        self.fingerprint = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]

    def measure(self) -> float:
        """The mean, the same on every rank; NaN if it failed anywhere, which does not end the training."""
        losses = np.zeros(len(self.evaluations), np.float32)
        was_training = self.transformer.training
        self.transformer.set_train(False)
        try:
            with nullcontext() if self.compiled else stage("Measuring the first validation loss"):
                numbers = self.runtime.share(len(losses), even=self.even)
                pooled = self.vectors.of(self.evaluations[number][0].prompt for number in numbers)
                for number in numbers:
                    # what was added to make the shares even counts once: on the rank whose turn it is
                    example, index = self.evaluations[number]
                    value = self._one(example, index, pooled[example.prompt])
                    losses[number] = value if self.runtime.has_turn(number) else 0.0
        except Exception as problem:
            say(f"warning: no validation loss: {type(problem).__name__}: {problem}; training goes on")
            losses[:] = np.nan
        finally:
            self.compiled = True
            self.transformer.set_train(was_training)
        losses = self.runtime.sum(losses).astype(np.float64)
        of_concept = np.array([example.concept for example, _ in self.evaluations])
        if len(self.names) > 1:
            found = ((name, losses[of_concept == number]) for number, name in enumerate(self.names))
            self.by_concept = {name: float(own.mean()) for name, own in found if len(own)}
        return float(losses.mean())

    def _one(self, example: Example, index: int, pooled: np.ndarray) -> float:
        moments = self.cache.read(self.cache.picture_file(example, False))["moments"]
        prompt = self.cache.read(self.cache.prompt_file(example.prompt))
        channels, height, width = moments.shape[0] // 2, *moments.shape[1:]
        # keyed by content: a new picture changes no other's noise
        rng = generator(self.seed, int(example.picture.digest[:15], 16), Purpose.VALIDATION, stream_id=index)
        arrays = (
            moments[None],
            rng.standard_normal((1, channels, height, width), np.float32),
            np.array([index], np.int32),
            prompt["prompt_embeds"][None],
            pooled[None],
        )
        return float(self.loss(*(Tensor(array) for array in arrays)).asnumpy()[0])


def best_in(rows: Sequence[Row]) -> Best | None:
    """The lowest loss in the lines of metrics.jsonl."""
    lines = [row for row in rows if row.get("best") is True and isinstance(row.get("validation_loss"), float)]
    return Best(lines[-1]["step"], lines[-1]["validation_loss"], str(lines[-1].get("pictures"))) if lines else None
