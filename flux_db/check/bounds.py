"""What each number among the settings may be."""

import math
from collections.abc import Callable
from typing import Any

from flux_db.problem import Problem
from flux_db.size import LARGEST_SIDE, PIXELS_PER_TOKEN

# Beyond this scale the mode scheme's map from uniform draws to timesteps is no longer one to one (SD3 paper, sec. 3.1).
LARGEST_MODE_SCALE = 2 / (math.pi - 2)

# The learning rate of every step is computed before the first one.
MOST_STEPS = 10_000_000


def _between(low: float, high: float) -> Callable[[float], bool]:
    return lambda x: low <= x <= high


def _from(low: int, high: int, names: str) -> tuple[str, Callable[[float], bool], str]:
    return f"from {low} to {high}", _between(low, high), names


# What a number must be, the test for it, and the flags it is asked of. Unset flags are left out. The upper limits are
# far beyond any use: a number above them is a slip, and would fill the memory or never come to an end.
BOUNDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    _from(1, MOST_STEPS, "max_train_steps text_encoder_steps"),
    _from(0, MOST_STEPS, "lr_warmup_steps"),
    _from(
        1,
        10**9,
        "num_train_epochs lr_num_cycles validation_epochs validation_steps score_steps checkpointing_steps"
        " checkpoints_total_limit max_skipped_steps early_stop_patience",
    ),
    _from(1, 4096, "rank text_encoder_rank"),  # the sides of most layers of FLUX.1 are 3072
    _from(1, 1000, "train_batch_size gradient_accumulation_steps sample_batch_size cache_crops"),
    _from(1, 1000, "validation_inference_steps"),  # FLUX.1 has so many timesteps
    _from(1, 10_000, "repeats num_validation_images"),
    _from(1, 100_000, "num_class_images"),
    _from(1, 64, "max_buckets"),  # each is a graph to compile
    _from(0, 256, "dataloader_num_workers"),
    _from(0, 1000, "guidance_scale validation_guidance adam_weight_decay adam_weight_decay_text_encoder"),
    _from(0, 10**6, "prior_loss_weight preserve_weight"),
    # beyond these, nearly all draws are the first or the last timestep
    _from(-10, 10, "logit_mean"),
    ("above 0, up to 10", lambda x: 0 < x <= 10, "logit_std sigmoid_scale"),
    ("above 0, up to 100", lambda x: 0 < x <= 100, "flow_shift"),
    (
        "above 0, up to 1000",
        lambda x: 0 < x <= 1000,
        "learning_rate text_encoder_lr lr_power adam_epsilon loraplus_ratio huber_delta",
    ),
    ("above 0, up to 1000000", lambda x: 0 < x <= 10**6, "lora_alpha max_train_minutes"),
    # without clipping: as large as you like, but a float32
    ("above 0, up to 1e30", lambda x: 0 < x <= 1e30, "max_grad_norm"),
    ("0 or more and below 1", lambda x: 0 <= x < 1, "lora_dropout adam_beta1 adam_beta2 validation_share"),
    ("above 0 and below 1", lambda x: 0 < x < 1, "ema_decay"),
    _from(0, 1, "caption_dropout unmasked_weight"),
    _from(1, 512, "max_sequence_length"),
    _from(0, 2**32 - 1, "seed validation_seed"),
    (f"from -1 to {LARGEST_MODE_SCALE:.2f}", _between(-1, LARGEST_MODE_SCALE), "mode_scale"),
    (
        f"a multiple of {PIXELS_PER_TOKEN}, up to {LARGEST_SIDE}",
        lambda x: 0 < x <= LARGEST_SIDE and x % PIXELS_PER_TOKEN == 0,
        "resolution",
    ),
)


def out_of_bounds(values: dict[str, Any]) -> list[Problem]:
    return [
        Problem(f"--{name} {values[name]}: must be {rule}", flag=name)
        for rule, holds, names in BOUNDS
        for name in names.split()
        if values[name] is not None and not holds(values[name])
    ]
