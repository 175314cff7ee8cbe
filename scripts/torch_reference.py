"""diffusers on torch, as functions: what MindSpore is compared with. Runs in an environment with the `interop` extra.

The loss is put together as diffusers' train_dreambooth_lora_flux.py does it, from diffusers' own functions; randomness
comes in as arrays. One thing differs: that script does not split the weighting with prior preservation, so that its
schemes with weights fail or mix the halves. Here the weighting is split like prediction and target.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# The same arithmetic on every x86-64: no instructions that only some processors have. Before torch is imported.
os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", HF_HUB_OFFLINE="1")

import diffusers
import numpy as np
import peft
import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import cast_training_params, compute_loss_weighting_for_sd3
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch.utils.hooks import RemovableHandle
from transformers import CLIPTextModel

Arrays = Mapping[str, np.ndarray]


def start() -> None:
    """Results that do not depend on the number of cores."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.enabled = False


def versions() -> dict[str, str]:
    libraries = {"torch": torch, "diffusers": diffusers, "peft": peft, "transformers": transformers, "numpy": np}
    python = ".".join(map(str, sys.version_info[:2]))
    return {"python": python} | {name: library.__version__ for name, library in libraries.items()}


# --- the model's parts -------------------------------------------------------------------------------------------


def load_transformer(model: Path, dtype: torch.dtype = torch.float32) -> FluxTransformer2DModel:
    transformer = FluxTransformer2DModel.from_pretrained(model, subfolder="transformer", torch_dtype=dtype)
    return transformer.requires_grad_(False).eval()


def load_clip(model: Path, dtype: torch.dtype = torch.float32) -> CLIPTextModel:
    return CLIPTextModel.from_pretrained(model, subfolder="text_encoder", dtype=dtype).requires_grad_(False).eval()


def load_vae(model: Path) -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(model, subfolder="vae").requires_grad_(False).eval()


def load_scheduler(model: Path) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler.from_pretrained(model, subfolder="scheduler")


def pipeline(model: Path, transformer: FluxTransformer2DModel) -> FluxPipeline:
    pipe = FluxPipeline(
        scheduler=load_scheduler(model),
        vae=load_vae(model),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def add_lora(network: torch.nn.Module, layers: Sequence[str], rank: int, alpha: float) -> None:
    """For the transformer, and for CLIP as diffusers' script does it."""
    network.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(layers)))
    cast_training_params([network], dtype=torch.float32)


def lora_state(network: torch.nn.Module, prefix: str = "transformer") -> dict[str, torch.Tensor]:
    """By file key."""
    return {f"{prefix}.{name}": value for name, value in get_peft_model_state_dict(network).items()}


def set_lora(network: torch.nn.Module, weights: Arrays, prefix: str = "transformer") -> None:
    state = {name.removeprefix(f"{prefix}."): torch.tensor(value) for name, value in weights.items()}
    result = set_peft_model_state_dict(network, state)
    if result.unexpected_keys:
        raise ValueError(f"unexpected: {result.unexpected_keys}")


def lora_gradients(network: torch.nn.Module, prefix: str = "transformer") -> dict[str, np.ndarray]:
    """By file key."""
    named = network.named_parameters()
    return {
        f"{prefix}.{name.replace('.default', '')}": p.grad.detach().numpy().copy()
        for name, p in named
        if p.requires_grad
    }


# --- training ----------------------------------------------------------------------------------------------------


def as_seen_by(rounding: torch.dtype | None, value: torch.Tensor | None) -> torch.Tensor | None:
    """A timestep or guidance as a transformer of that precision takes it: it multiplies it by 1000 after rounding.

    In bf16 guidance 3.5 becomes 3504 instead of 3500, which is another embedding altogether.
    """
    if rounding is None or value is None:
        return value
    return (value.to(rounding) * 1000).float() / 1000


class Trainee:
    """A transformer, and what its loss needs besides."""

    def __init__(
        self,
        model: Path,
        dtype: torch.dtype = torch.float32,
        rounding: torch.dtype | None = None,
        *,
        with_clip: bool = False,
    ) -> None:
        """`rounding`: compute in `dtype`, but with weights, timesteps and guidance rounded to this other precision.

        `with_clip`: batches have token ids as `ids`. CLIP is in bf16 where the transformer is, otherwise in float32.
        """
        self.dtype, self.rounding = dtype, rounding
        self.clip = None
        if with_clip:
            text_dtypes = [
                torch.bfloat16 if one == torch.bfloat16 else torch.float32 for one in (rounding or dtype, dtype)
            ]
            self.clip = load_clip(model, text_dtypes[0]).to(text_dtypes[1])
        # in fp16 small gradients would vanish
        self.loss_scale = 1024.0 if dtype == torch.float16 else 1.0
        self.transformer = load_transformer(model, rounding or dtype).to(dtype)
        self.scheduler = load_scheduler(model)
        vae = load_vae(model)
        self.shift, self.scale = vae.config.shift_factor, vae.config.scaling_factor

    def predict(self, batch: Arrays, guidance_scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The transformer's answer [B, tokens, 4C], the target [B, C, h, w], the sigmas [B, 1, 1, 1]."""
        moments, eps, noise = (torch.tensor(batch[name]) for name in ("pictures", "eps", "noise"))
        posterior = DiagonalGaussianDistribution(moments)
        model_input = (posterior.mean + posterior.std * eps - self.shift) * self.scale
        indices = torch.tensor(batch["index"]).long()
        timesteps = self.scheduler.timesteps[indices]
        sigmas = self._sigmas(timesteps)
        noisy = (1.0 - sigmas) * model_input + sigmas * noise
        b, c, h, w = model_input.shape
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full([1], guidance_scale).expand(b)
        answer = self.transformer(
            hidden_states=FluxPipeline._pack_latents(noisy, b, c, h, w).to(self.dtype),
            timestep=as_seen_by(self.rounding, timesteps / 1000),
            guidance=as_seen_by(self.rounding, guidance),
            pooled_projections=self.pooled(batch).to(self.dtype),
            encoder_hidden_states=torch.tensor(batch["prompt_embeds"]).to(self.dtype),
            txt_ids=torch.zeros(batch["prompt_embeds"].shape[1], 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(b, h // 2, w // 2, "cpu", torch.float32),
            return_dict=False,
        )[0]
        return answer.float(), noise - model_input, sigmas

    def pooled(self, batch: Arrays) -> torch.Tensor:
        if self.clip is None:
            return torch.tensor(batch["pooled"])
        return self.clip(torch.tensor(batch["ids"]).long(), output_hidden_states=False).pooler_output

    def _sigmas(self, timesteps: torch.Tensor) -> torch.Tensor:
        steps = [(self.scheduler.timesteps == t).nonzero().item() for t in timesteps]
        return self.scheduler.sigmas[steps].reshape(-1, 1, 1, 1)

    def loss(
        self, batch: Arrays, scheme: str = "none", guidance_scale: float = 1.0, prior_weight: float | None = None
    ) -> torch.Tensor:
        answer, target, sigmas = self.predict(batch, guidance_scale)
        factor = 8  # _unpack_latents takes sizes in pixels
        prediction = FluxPipeline._unpack_latents(answer, target.shape[2] * factor, target.shape[3] * factor, factor)
        weighting = compute_loss_weighting_for_sd3(scheme, sigmas)
        if prior_weight is None:
            return _mean_error(prediction, target, weighting)
        halves = [torch.chunk(value, 2) for value in (prediction, target, weighting)]
        own, prior = zip(*halves, strict=True)
        return _mean_error(*own) + prior_weight * _mean_error(*prior)

    def backward(self, loss: torch.Tensor) -> None:
        """Leaves the gradients of the LoRA's tensors in them."""
        (loss * self.loss_scale).backward()
        for p in (p for network in self.networks for p in network.parameters()):
            if p.grad is not None:
                p.grad /= self.loss_scale

    @property
    def networks(self) -> list[torch.nn.Module]:
        return [self.transformer] if self.clip is None else [self.transformer, self.clip]

    def train(self, batches: Iterable[Arrays], optimizer: Mapping, **loss_settings) -> list[tuple[float, float]]:
        """AdamW on every batch; returns (loss, norm of the gradient before clipping) of each step."""
        groups = []
        for network, own in zip(self.networks, ({}, _of_text_encoder(optimizer)), strict=False):
            network.train()
            groups.append({"params": [p for p in network.parameters() if p.requires_grad], **own})
        trained = [p for group in groups for p in group["params"]]
        adamw = torch.optim.AdamW(
            groups,
            lr=optimizer["learning_rate"],
            betas=(optimizer["adam_beta1"], optimizer["adam_beta2"]),
            weight_decay=optimizer["adam_weight_decay"],
            eps=optimizer["adam_epsilon"],
        )
        course = []
        for batch in batches:
            loss = self.loss(batch, **loss_settings)
            self.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(trained, optimizer["max_grad_norm"])
            adamw.step()
            adamw.zero_grad()
            course.append((loss.item(), norm.item()))
        return course


def _of_text_encoder(optimizer: Mapping) -> dict[str, float]:
    """The settings of its own that diffusers' script gives CLIP's LoRA."""
    names = {"lr": "text_encoder_lr", "weight_decay": "adam_weight_decay_text_encoder"}
    return {name: optimizer[flag] for name, flag in names.items() if flag in optimizer}


def _mean_error(prediction: torch.Tensor, target: torch.Tensor, weighting: torch.Tensor) -> torch.Tensor:
    error = weighting.float() * (prediction.float() - target.float()) ** 2
    return torch.mean(error.reshape(target.shape[0], -1), 1).mean()


# --- sampling ----------------------------------------------------------------------------------------------------


def round_while_sampling(pipe: FluxPipeline, rounding: torch.dtype) -> RemovableHandle:
    """Give the transformer timesteps and guidance as a pipeline of that precision does."""

    def rounded(_module, arguments, named):
        named["timestep"] = as_seen_by(rounding, (named["timestep"] * 1000).to(rounding) / 1000)
        named["guidance"] = as_seen_by(rounding, named["guidance"])
        return arguments, named

    return pipe.transformer.register_forward_pre_hook(rounded, with_kwargs=True)


def draw(
    pipe: FluxPipeline, prompt_embeds: np.ndarray, pooled: np.ndarray, noise: np.ndarray, steps: int, guidance: float
) -> np.ndarray:
    """One picture [3, H, W] in 0..1 from embeddings [L, D] and [D'] and noise [C, h, w]."""
    latents = torch.tensor(noise[None])
    b, c, h, w = latents.shape
    dtype, factor = pipe.transformer.dtype, pipe.vae_scale_factor
    images = pipe(
        prompt_embeds=torch.tensor(prompt_embeds[None]).to(dtype),
        pooled_prompt_embeds=torch.tensor(pooled[None]).to(dtype),
        latents=FluxPipeline._pack_latents(latents, b, c, h, w).to(dtype),
        height=h * factor,
        width=w * factor,
        num_inference_steps=steps,
        guidance_scale=guidance,
        output_type="pt" if dtype == torch.float32 else "latent",
    ).images
    if dtype != torch.float32:  # the VAE is float32 here, which the pipeline does not provide for
        latents = FluxPipeline._unpack_latents(images.float(), h * factor, w * factor, factor)
        latents = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        images = pipe.image_processor.postprocess(pipe.vae.decode(latents, return_dict=False)[0], output_type="pt")
    return images[0].numpy()
