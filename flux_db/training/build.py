"""From settings to the things that train: transformer with LoRA, optimizer, compiled step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn
from mindspore.amp import DynamicLossScaler

from flux_db.console import counted, printable, say, stage
from flux_db.data.dataset import Dataset, preserved_prompts, total_steps
from flux_db.data.encode_cache import text_precision
from flux_db.data.timesteps import loss_weights, robust_table
from flux_db.model import adapter, loading, model_folder, optim, preservation, sharding, text_encoder
from flux_db.model.optim import FlatOptimizer, SecondPart
from flux_db.model.runtime import DTYPES, Runtime
from flux_db.settings import lora_layers
from flux_db.settings.concepts import concepts_of
from flux_db.settings.derived import Recomputed, is_int8, recomputed, text_lora
from flux_db.settings.preserved import is_preserved
from flux_db.settings.schema import Config
from flux_db.stream import BatchLayout
from flux_db.train_step import StepSettings, TrainStepForFluxDevDB
from flux_db.training import warm_start
from flux_db.weight_file import WHOLE

# As torch's GradScaler: double after 2000 good steps, halve after an overflow.
FIRST_SCALE, SCALE_FACTOR, SCALE_WINDOW = 2.0**16, 2, 2000


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What is compiled, and the state that it changes. Depends on the settings, but not on the length of the run."""

    transformer: nn.Cell
    optimizer: FlatOptimizer
    step: TrainStepForFluxDevDB
    scaler: DynamicLossScaler | None
    """With fp16 only."""
    dropout_key: Parameter | None
    sigmas: np.ndarray
    """[T] noise level of each timestep index."""
    text_encoder: nn.Cell | None = None
    """CLIP, if it is trained."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything that one run of the loop works with."""

    transformer: nn.Cell
    optimizer: FlatOptimizer
    step: TrainStepForFluxDevDB
    scaler: DynamicLossScaler | None
    """With fp16 only."""
    layout: BatchLayout
    total_steps: int
    learning_rates: np.ndarray
    """[total_steps]; [total_steps, 3] if CLIP is trained"""
    sigmas: np.ndarray
    """[T] noise level of each timestep index."""
    latent_shape: tuple[int, int, int]
    text_encoder: nn.Cell | None = None
    """CLIP, if it is trained."""


def build(config: Config, runtime: Runtime, model: Path, dataset: Dataset) -> Training:
    graph = build_graph(config, runtime, model, prior=bool(dataset.class_examples))
    return plan_run(config, runtime, model, dataset, graph)


def build_graph(config: Config, runtime: Runtime, model: Path, *, prior: bool) -> Graph:
    """`prior`: every batch has class examples too."""
    with stage("Loading the transformer"):
        share = sharding.share_of(runtime) if config.runtime.shard_base else WHOLE
        transformer = loading.load_transformer(
            model, runtime.dtype, config.model.variant, share, is_int8=is_int8(config)
        )
    preserved = is_preserved(config)
    rows = config.optim.train_batch_size * (2 if prior else 1) * (preservation.PARTS if preserved else 1)
    lora_dtype = ms.float32 if config.lora.lora_compute == "fp32" else runtime.dtype
    dropout_key = adapter.inject(transformer, config.lora, config.output.seed, rows, lora_dtype)
    if preserved:
        adapter.add_row_gates(transformer)
    if config.runtime.shard_base:
        _shard(transformer, runtime)
    if choice := recomputed(config):
        recompute(transformer, choice)
    weights = list(adapter.parameters(transformer).values())
    values = adapter.start_values(transformer, config.lora, config.output.seed)
    clip, second = None, None
    if (lora := text_lora(config)) is not None:
        clip = _text_encoder(config, model, lora_dtype, dropout_key)
        own = list(adapter.parameters(clip).values())
        second = SecondPart(len(own), config.text_encoder.adam_weight_decay_text_encoder)
        weights += own
        values += adapter.start_values(clip, lora, config.output.seed)
    if config.lora.init_lora is not None:
        values = warm_start.take_over(config, transformer, clip, values, is_main=runtime.is_main)
    factors = _rate_factors(config, transformer, clip) if lora_layers.has_rate_factors(config.optim) else None
    optimizer = optim.build_optimizer(weights, config.optim, values, second, factors)
    scaler = None
    if config.runtime.mixed_precision == "fp16":
        scaler = DynamicLossScaler(FIRST_SCALE, SCALE_FACTOR, SCALE_WINDOW)
    settings = step_settings(config, runtime, model, prior=prior)
    vae = None
    if not config.data.cache_latents:
        with stage("Loading the VAE"):
            vae = loading.load_vae(model, loading.VAE_DTYPE, config.model.variant)
    step = TrainStepForFluxDevDB(
        transformer,
        optimizer,
        settings,
        vae=vae,
        text_encoder=clip,
        loss_scaler=scaler,
        dropout_key=dropout_key,
    ).set_train(True)
    if vae is not None:
        vae.set_train(False)
    if clip is not None:
        text_encoder.set_training(clip)
    return Graph(
        transformer=transformer,
        optimizer=optimizer,
        step=step,
        scaler=scaler,
        dropout_key=dropout_key,
        sigmas=settings.sigmas,
        text_encoder=clip,
    )


def _rate_factors(config: Config, transformer: nn.Cell, clip: nn.Cell | None) -> list[float]:
    """For each tensor of the vector. Patterns are about the transformer; LoRA+ is about both."""
    plain = dataclasses.replace(config.optim, lora_lr_pattern=())
    parts = [(config.optim, transformer), *([(plain, clip)] if clip is not None else [])]
    return [
        lora_layers.rate_factor(settings, name.rpartition(".")[0], is_up=name.endswith(".lora_B"))
        for settings, network in parts
        for name in adapter.parameters(network)
    ]


def _text_encoder(config: Config, model: Path, dtype: ms.Type, dropout_key: Parameter | None) -> nn.Cell:
    """CLIP with its LoRA, in the precision that prompts are encoded in."""
    with stage("Loading CLIP"):
        clip = loading.load_clip(model, DTYPES[text_precision(config)], config.model.variant)
    adapter.inject_text_encoder(clip, text_lora(config), config.output.seed, dtype, dropout_key)
    if is_preserved(config):
        adapter.add_row_gates(clip)
    return clip


def plan_run(config: Config, runtime: Runtime, model: Path, dataset: Dataset, graph: Graph) -> Training:
    """A run of the graph over the dataset: its layout, its length and its learning rates."""
    layout = BatchLayout(
        batch=config.optim.train_batch_size,
        accumulation=config.optim.gradient_accumulation_steps,
        world_size=runtime.world_size,
        rank=runtime.rank,
    )
    total = total_steps(config, dataset, layout.global_batch)
    scale = layout.global_batch if config.optim.scale_lr else 1
    if runtime.is_main:
        second = graph.optimizer.second_size
        count = sum(graph.optimizer.sizes) - second
        layers = len(adapter.parameters(graph.transformer)) // 2
        if (lora := text_lora(config)) is not None:
            own = len(adapter.parameters(graph.text_encoder)) // 2
            say(f"LoRA of rank {lora.rank} in {counted(own, 'layer')} of CLIP, {second / 1e6:.2f} M parameters")
        say(
            f"LoRA of rank {_ranks(graph.transformer)} in {counted(layers, 'layer')}, {count / 1e6:.2f} M parameters; "
            f"{counted(len(dataset.examples), _what(config))}, {counted(total, 'step')} of {layout.global_batch}"
        )
        _report_data(config, dataset, layout)
    return Training(
        transformer=graph.transformer,
        optimizer=graph.optimizer,
        step=graph.step,
        scaler=graph.scaler,
        layout=layout,
        total_steps=total,
        learning_rates=optim.learning_rates(
            config.optim, total, scale, config.text_encoder if graph.text_encoder is not None else None
        ),
        text_encoder=graph.text_encoder,
        sigmas=graph.sigmas,
        latent_shape=latent_shape(config, model),
    )


def _ranks(network: nn.Cell) -> str:
    found = sorted({p.shape[0] for name, p in adapter.parameters(network).items() if name.endswith("lora_A")})
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _shard(transformer: nn.Cell, runtime: Runtime) -> None:
    whole, kept = sharding.shard_base(transformer, runtime)
    if runtime.world_size == 1:
        say("warning: --shard_base does nothing on one device")
    elif runtime.is_main:
        say(f"Each device keeps {kept / 1e6:.2f} M of the transformer's {whole / 1e6:.2f} M weights")


def _what(config: Config) -> str:
    """A picture may be shown at several sizes."""
    several = any(len(concept.resolutions) > 1 for concept in concepts_of(config))
    return "example" if several else "picture"


def _report_concepts(config: Config, dataset: Dataset) -> None:
    drawn = Counter(example.concept for example in dataset.examples)
    for number, concept in enumerate(concepts_of(config)):
        weight = f", loss x {concept.weight:g}" if concept.weight != 1 else ""
        say(f"Concept {printable(concept.name)}: {drawn[number]} of {len(dataset.examples)} draws in an epoch{weight}")


def _report_data(config: Config, dataset: Dataset, layout: BatchLayout) -> None:
    if dataset.is_of_several:
        _report_concepts(config, dataset)
    counts = Counter(example.size for example in dataset.examples)
    if len(counts) > 1:
        shown = ", ".join(f"{size}: {counts[size]}" for size in dataset.sizes)
        say(f"{_what(config).capitalize()}s in each bucket, which is a graph of its own: {shown}")
        small = [str(size) for size in dataset.sizes if counts[size] < layout.global_batch]
        if small:
            say(
                f"warning: fewer pictures than the {layout.global_batch} of a step in {', '.join(small)}: "
                "its steps repeat them, and not every epoch has such a step"
            )
    if prompts := preserved_prompts(config, dataset):
        shown = f"{prompts[0]!r}" + (f" and {len(prompts) - 1} more" if len(prompts) > 1 else "")
        say(f"The LoRA is held to the base model's answers to {printable(shown)}")
    if dataset.masked:
        masked = sum(example.mask is not None for example in dataset.examples)
        weight = config.data.unmasked_weight
        say(f"Masks for {masked} of {len(dataset.examples)} pictures; outside of them the loss counts {weight:g}")


def step_settings(config: Config, runtime: Runtime, model: Path, *, prior: bool) -> StepSettings:
    sigmas, timesteps = loading.training_table(model)
    vae = model_folder.read_config(model, "vae")
    has_guidance = model_folder.read_config(model, "transformer").get("guidance_embeds", False)
    loss = config.loss
    return StepSettings(
        sigmas=sigmas,
        timesteps=timesteps,
        weights=loss_weights(loss.weighting_scheme, sigmas),
        robust=robust_table(loss.loss, loss.huber_delta, loss.huber_schedule, sigmas),
        vae_shift=vae.get("shift_factor") or 0.0,
        vae_scale=vae["scaling_factor"],
        guidance_scale=loss.guidance_scale if has_guidance else None,
        prior_loss_weight=config.data.prior_loss_weight if prior else None,
        preserve_weight=config.data.preserve_weight if is_preserved(config) else None,
        concepts=len(config.data.concepts) if len(config.data.concepts) > 1 else 0,
        accumulation=config.optim.gradient_accumulation_steps,
        max_grad_norm=config.optim.max_grad_norm,
        world_size=runtime.world_size,
        dtype=runtime.dtype,
    )


def latent_shape(config: Config, model: Path) -> tuple[int, int, int]:
    vae = model_folder.read_config(model, "vae")
    side = config.data.resolution // 2 ** (len(vae["block_out_channels"]) - 1)
    return vae["latent_channels"], side, side


def recompute(transformer: nn.Cell, choice: Recomputed) -> None:
    """Gradient checkpointing; mindone's own switch fails for FLUX."""
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    for block in [] if choice.cells == "none" else blocks[: choice.count]:
        (block.attn if choice.cells == "attention" else block).recompute()
