"""A training step of two blocks: recomputation and accumulation change nothing but the memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.amp import DynamicLossScaler

from flux_db.demo.tiny_model import SCHEDULER, draw_all, json_bytes
from flux_db.doctor.result import Row, judged, not_here, timed
from flux_db.model import adapter, loading, optim
from flux_db.model.runtime import DTYPES, Runtime
from flux_db.settings.schema import LoraConfig, OptimConfig
from flux_db.step_inputs import StepInputs
from flux_db.stream import dropout_key
from flux_db.train_step import StepSettings, TrainStepForFluxDevDB
from flux_db.training.build import FIRST_SCALE, SCALE_FACTOR, SCALE_WINDOW

CHANNELS, SIDE, TOKENS = 16, 16, 32
MICRO_STEPS, ACCUMULATION = 4, 2
TRANSFORMER = {
    "_class_name": "FluxTransformer2DModel",
    "patch_size": 1,
    "in_channels": 4 * CHANNELS,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "joint_attention_dim": 192,
    "pooled_projection_dim": 128,
    "guidance_embeds": True,
}
"""Blocks of FLUX.1-dev's kinds and head size, of width 256."""

# The same sums in another order, after two updates.
TOLERANCE = {"no": 1e-5, "fp16": 1e-2, "bf16": 3e-2}


class Trained(NamedTuple):
    losses: list[float]
    weights: np.ndarray
    memory: int
    """Bytes of device memory at most; 0 where MindSpore does not report it."""


def write_model(folder: Path) -> None:
    for name in ("transformer", "scheduler"):
        (folder / name).mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_bytes(json_bytes(SCHEDULER))
    (folder / "transformer" / "config.json").write_bytes(json_bytes(TRANSFORMER))
    weights = draw_all("transformer", TRANSFORMER, seed=0)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(weights)


def batch(number: int) -> StepInputs:
    rng = np.random.default_rng(number)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return StepInputs(
        pictures=normal(1, 2 * CHANNELS, SIDE, SIDE),
        eps=normal(1, CHANNELS, SIDE, SIDE),
        noise=normal(1, CHANNELS, SIDE, SIDE),
        index=np.array([200 + 100 * number], np.int32),
        prompt_embeds=normal(1, TOKENS, TRANSFORMER["joint_attention_dim"]),
        pooled_prompt_embeds=normal(1, TRANSFORMER["pooled_projection_dim"]),
        dropout_key=dropout_key(0, number)[None],
        lr=np.array(1e-3, np.float32),
        boundary=np.array(number % ACCUMULATION == ACCUMULATION - 1),
    )


def train(runtime: Runtime, model: Path, precision: str, *, recompute: bool) -> Trained:
    """Two updates of two micro-steps each."""
    dtype = DTYPES[precision]
    transformer = loading.load_transformer(model, dtype)
    lora = LoraConfig(rank=4, lora_dropout=0.1)
    key = adapter.inject(transformer, lora, 0, dtype=dtype)
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks) if recompute else ():
        block.recompute()
    weights = list(adapter.parameters(transformer).values())
    values = adapter.start_values(transformer, lora, 0)
    sigmas, timesteps = loading.training_table(model)
    settings = StepSettings(
        sigmas=sigmas,
        timesteps=timesteps,
        weights=np.ones_like(sigmas),
        vae_shift=0.1159,
        vae_scale=0.3611,
        guidance_scale=1.0,
        prior_loss_weight=None,
        accumulation=ACCUMULATION,
        dtype=dtype,
    )
    scaler = DynamicLossScaler(FIRST_SCALE, SCALE_FACTOR, SCALE_WINDOW) if precision == "fp16" else None
    optimizer = optim.build_optimizer(weights, OptimConfig(), values)
    step = TrainStepForFluxDevDB(transformer, optimizer, settings, loss_scaler=scaler, dropout_key=key).set_train(True)
    on_ascend = runtime.device == "Ascend"
    if on_ascend:
        ms.runtime.reset_max_memory_allocated()
    results = [step(*(Tensor(column) for column in batch(n).given)).asnumpy() for n in range(MICRO_STEPS)]
    losses = [float(result[0]) for n, result in enumerate(results) if n % ACCUMULATION == ACCUMULATION - 1]
    return Trained(
        losses,
        np.concatenate([value.reshape(-1) for value in optimizer.values()]),
        ms.runtime.max_memory_allocated() if on_ascend else 0,
    )


def compare(check: str, precision: str, kept: Trained, recomputed: Trained) -> Row:
    start = np.abs(kept.weights).max()
    apart = float(np.abs(kept.weights - recomputed.weights).max() / start)
    detail = f"losses {', '.join(f'{loss:.4f}' for loss in recomputed.losses)}; weights apart by {apart:.1e}"
    holds = all(np.isfinite(recomputed.losses)) and apart <= TOLERANCE[precision]
    return judged(check, bool(holds), detail, "--gradient_checkpointing changes the result here: train without it")


def memory(kept: Trained, recomputed: Trained) -> Row:
    check = "memory saved by recomputing"
    if not kept.memory:
        return not_here(check, "the CPU backend reports no memory")
    detail = f"{kept.memory / 1e6:.0f} MB without, {recomputed.memory / 1e6:.0f} MB with"
    return judged(check, recomputed.memory < kept.memory, detail, "recomputation saves nothing here")


def check_all(runtime: Runtime) -> list[Row]:
    precision = "bf16" if runtime.device == "Ascend" else "no"
    levels = ("O1", "O0") if runtime.device == "Ascend" else ("O0",)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="flux_db-doctor-") as folder:
        write_model(Path(folder))
        for level in levels:
            runs: list[Trained] = []
            check = f"training step, {level}"

            def both(check: str = check, level: str = level, runs: list[Trained] = runs) -> Row:
                if runtime.device == "Ascend":
                    ms.set_context(jit_config={"jit_level": level})
                runs += [train(runtime, Path(folder), precision, recompute=flag) for flag in (False, True)]
                return compare(check, precision, *runs)

            rows.append(timed(check, both))
            if len(runs) == 2 and level == levels[0]:
                rows.append(memory(*runs))
    return rows
