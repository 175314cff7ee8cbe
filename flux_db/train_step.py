"""`TrainStepForFluxDevDB`: one micro-step of DreamBooth LoRA training as a pure function of its inputs and state."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.amp import DynamicLossScaler

from flux_db.model import flow, preservation
from flux_db.model.optim import FlatOptimizer, flatten
from flux_db.model.quiet import quiet
from flux_db.model.repeated_calls import CalledOften
from flux_db.model.text_encoder import clip_vectors
from flux_db.step_inputs import StepResult

with quiet():
    from mindone.diffusers.training_utils import TrainStep


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What the step knows besides its inputs; constants of the compiled graph."""

    sigmas: np.ndarray
    """[T] noise level of each timestep index."""
    timesteps: np.ndarray
    """[T] timestep that the transformer gets at each index, in 0..1."""
    weights: np.ndarray
    """[T] weight of the squared error at each index."""
    vae_shift: float
    vae_scale: float
    guidance_scale: float | None
    """None for a model without guidance embedding."""
    prior_loss_weight: float | None
    """None without prior preservation; else the second half of every batch are class examples."""
    preserve_weight: float | None = None
    """None without --preserve_class; else prompts and dropout keys have a second half, which is of the class."""
    robust: np.ndarray | None = None
    """[2, T] threshold and scale of a robust error at each index; None: the error is squared."""
    concepts: int = 0
    """Number of concepts whose errors are summed apart; 0 if there is but one."""
    accumulation: int = 1
    max_grad_norm: float = 1.0
    world_size: int = 1
    dtype: ms.Type = ms.float32
    """Precision of the frozen base, and so of the forward."""


@ops.constexpr
def _position_ids(text_length, height, width):
    return (
        Tensor(np.zeros((text_length, 3)), ms.float32),
        Tensor(flow.image_position_ids(height, width), ms.float32),
    )


class Velocity:
    """For cells with a transformer as `model`, `timesteps`, `guidance_scale` and `dtype`."""

    def velocity(self, x_t, index, prompt_embeds, pooled):
        """What the transformer answers to noisy latents [B, C, h, w], packed."""
        txt_ids, img_ids = _position_ids(prompt_embeds.shape[1], x_t.shape[2], x_t.shape[3])
        guidance = None
        if self.guidance_scale is not None:
            guidance = ops.full((x_t.shape[0],), self.guidance_scale, dtype=ms.float32)
        return self.model(
            hidden_states=flow.pack(x_t).astype(self.dtype),
            timestep=self.timesteps[index],
            guidance=guidance,
            pooled_projections=pooled.astype(self.dtype),
            encoder_hidden_states=prompt_embeds.astype(self.dtype),
            txt_ids=txt_ids,
            img_ids=img_ids,
            return_dict=False,
        )[0]


class TrainStepForFluxDevDB(CalledOften, TrainStep, Velocity):
    """`step(*inputs.given) -> [5]`, from StepInputs to the numbers of a StepResult.

    Sizes are the inputs' own: each size compiles to one graph, and all graphs share weights and optimizer.
    """

    def __init__(
        self,
        transformer: nn.Cell,
        optimizer: FlatOptimizer,
        settings: StepSettings,
        *,
        vae: nn.Cell | None = None,
        text_encoder: nn.Cell | None = None,
        loss_scaler: DynamicLossScaler | None = None,
        dropout_key: Parameter | None = None,
    ) -> None:
        # The window over micro-steps is kept here, flat, not by mindone's accumulator: hence its 1.
        super().__init__(transformer, optimizer, loss_scaler=loss_scaler, gradient_accumulation_steps=1)
        # graph mode reads plain attributes of the cell only
        self.vae_shift, self.vae_scale = settings.vae_shift, settings.vae_scale
        self.guidance_scale = settings.guidance_scale
        self.prior_loss_weight = settings.prior_loss_weight
        self.preserve_weight = settings.preserve_weight
        self.max_grad_norm = settings.max_grad_norm
        self.dtype = settings.dtype
        self.parts = settings.accumulation * settings.world_size
        self.vae = vae
        self.text_encoder = text_encoder
        self.eos_token_id = text_encoder.config.eos_token_id if text_encoder is not None else None
        self.dropout_key = dropout_key
        self.dynamic_scale = loss_scaler is not None
        self.loss_scaler = self.grad_scaler.loss_scaler
        # as parameters of the cell: a stored graph is given values for these only
        self.scale_value = self.loss_scaler.scale_value
        self.scale_counter = self.loss_scaler.counter if self.dynamic_scale else None
        self.sigmas = Tensor(settings.sigmas, ms.float32)
        self.timesteps = Tensor(settings.timesteps, ms.float32)
        self.weights = Tensor(settings.weights, ms.float32)
        self.is_robust = settings.robust is not None
        if self.is_robust:
            self.deltas, self.scales = (Tensor(row, ms.float32) for row in settings.robust)
        self.accumulate = settings.accumulation > 1
        self.concepts = settings.concepts
        self.measures = 1 + self.concepts
        length = sum(optimizer.sizes) + self.measures + 1 if self.accumulate else 1
        self.window = Parameter(Tensor(np.zeros(length), ms.float32), name="window", requires_grad=False)
        self.stop_asked = Parameter(Tensor([0.0], ms.float32), name="stop_asked", requires_grad=False)
        self.result_length = len(StepResult._fields) + self.concepts
        self.all_reduce = ops.AllReduce() if settings.world_size > 1 else ops.Identity()

    def ask_to_stop(self) -> None:
        """Tell all ranks, with the next optimizer step, that this one was asked to stop."""
        ops.assign(self.stop_asked, Tensor([1.0], ms.float32))

    def encode(self, pictures: Tensor) -> Tensor:
        """Latent moments of a batch, from the cache or by the VAE inside the graph."""
        if self.vae is None:
            return pictures
        return ops.stop_gradient(self.vae.encode(pictures)[0])

    def pool(self, text: Tensor) -> Tensor:
        """CLIP's vectors of a batch, stored or by CLIP inside the graph, whose LoRA is trained."""
        if self.text_encoder is None:
            return text
        return clip_vectors(self.text_encoder, text, self.eos_token_id)

    def forward(self, pictures, eps, noise, index, prompt_embeds, pooled, mask=None, concept=None):
        sigma = self.sigmas[index]
        x_0 = flow.latents_from_moments(self.encode(pictures), eps, self.vae_shift, self.vae_scale)
        x_t = flow.add_noise(x_0, noise, sigma)
        difference = None
        if self.preserve_weight is None:
            velocity = self.velocity(x_t, index, prompt_embeds, self.pool(pooled))
        else:
            velocity, difference = self.preserved(x_t, index, prompt_embeds, pooled)
        mask = None if mask is None else flow.pack(mask)
        errors = self.errors(velocity, flow.pack(noise - x_0), index, mask)
        if self.prior_loss_weight is None:
            loss = errors.mean()
        else:
            loss = flow.prior_preservation(errors, self.prior_loss_weight)
        if self.preserve_weight is not None:
            loss = loss + self.preserve_weight * difference
        if concept is None:
            return self.loss_scaler.scale(loss), loss
        # [B, 1] * [B, concepts] -> [concepts]
        sums = (errors.reshape(-1, 1) * concept).sum(0)
        return self.loss_scaler.scale(loss), ops.concat((loss.reshape(1), sums))

    def preserved(self, x_t, index, prompt_embeds, pooled):
        """The answers to the prompts, and the mean squared difference from the base model at those of the class."""
        answers = self.velocity(
            preservation.three_times(x_t),
            preservation.three_times(index),
            preservation.with_base_rows(prompt_embeds),
            self.pool(preservation.with_base_rows(pooled)),
        )
        velocity, of_class, base = preservation.parts(answers)
        return velocity, flow.squared_error(of_class, base, ops.ones_like(self.sigmas[index])).mean()

    def errors(self, velocity, target, index, mask):
        """Weighted error of each row, [B]."""
        if not self.is_robust:
            return flow.squared_error(velocity, target, self.weights[index], mask)
        delta, scale = self.deltas[index], self.scales[index]
        return flow.robust_error(velocity, target, self.weights[index], delta, scale, mask)

    def construct(
        self,
        pictures,
        eps,
        noise,
        index,
        prompt_embeds,
        pooled_prompt_embeds,
        dropout_key,
        lr,
        boundary,
        mask=None,
        concept=None,
    ):
        if self.dropout_key is not None:
            if self.preserve_weight is not None:
                dropout_key = preservation.with_base_rows(dropout_key)
            ops.assign(self.dropout_key, dropout_key)
        inputs = (pictures, eps, noise, index, prompt_embeds, pooled_prompt_embeds)
        inputs = inputs if mask is None else (*inputs, mask)
        inputs = inputs if concept is None else (*inputs, concept)
        (_, measures), gradients = self.forward_and_backward(*inputs)
        # all that ranks tell each other travels as one vector: one accumulator, one all-reduce
        vector = ops.concat((flatten(gradients), measures.reshape(self.measures), self.stop_asked))
        if not self.accumulate:
            return self.update(vector, lr)
        vector = self.window + vector
        if boundary:
            result = self.update(vector, lr)
            ops.assign(self.window, ops.zeros_like(self.window))
        else:
            ops.assign(self.window, vector)
            result = ops.zeros((self.result_length,), ms.float32)
        return result

    def update(self, vector, lr):
        """From the window's sum of [gradients, measures, stop] to new weights, unless a gradient is not finite.

        The measures are the loss and the sum of errors of each concept.
        """
        vector = self.all_reduce(vector)
        if self.parts > 1:  # a division by 1 is not free on the CPU
            vector = vector / self.parts
        scale = self.loss_scaler.scale_value * 1.0
        end = -1 - self.measures
        gradient, loss, stop = vector[:end], vector[end], vector[-1] * self.parts
        if self.dynamic_scale:
            gradient = gradient / scale
        gradient = self.optimizer.trained(gradient, lr)
        norm = ops.sqrt(self.optimizer.sum(gradient * gradient))
        finite = ops.isfinite(norm)
        clip = ops.minimum(self.max_grad_norm / (norm + 1e-6), Tensor(1.0, ms.float32))
        self.optimizer(gradient * clip, lr, finite)
        if self.dynamic_scale:
            self.loss_scaler.adjust(finite)
        result = ops.stack((loss, norm, finite.astype(ms.float32), scale, stop))  # a StepResult
        if self.concepts == 0:
            return result
        return ops.concat((result, vector[end + 1 : -1]))
