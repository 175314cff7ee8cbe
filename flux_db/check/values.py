"""Find every problem with the settings and the files they name before any model is loaded.

A check returns its problems as values; the line of each names the flag, the value and what to do.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from flux_db.check import folders
from flux_db.data import buckets
from flux_db.data.buckets import LARGEST_SIDE, PIXELS_PER_TOKEN
from flux_db.errors import did_you_mean
from flux_db.problem import Problem
from flux_db.settings.derived import background, has_trigger, recomputed
from flux_db.settings.schema import TRACKERS, Config, to_flat_dict
from flux_db.size import parse_size

# Beyond this scale the mode scheme's map from uniform draws to timesteps is no longer one to one (SD3 paper, sec. 3.1).
LARGEST_MODE_SCALE = 2 / (math.pi - 2)

# The learning rate of every step is computed before the first one.
MOST_STEPS = 10_000_000

# Prodigy's learning rate is a factor on the step size that it finds itself: its authors use 1.
LEAST_PRODIGY_RATE = 0.1


def _between(low: float, high: float) -> Callable[[float], bool]:
    return lambda x: low <= x <= high


def _from(low: int, high: int, names: str) -> tuple[str, Callable[[float], bool], str]:
    return f"from {low} to {high}", _between(low, high), names


# What a number must be, the test for it, and the flags it is asked of. Unset flags are left out. The upper limits are
# far beyond any use: a number above them is a slip, and would fill the memory or never come to an end.
BOUNDS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    _from(1, MOST_STEPS, "max_train_steps"),
    _from(0, MOST_STEPS, "lr_warmup_steps"),
    _from(
        1,
        10**9,
        "num_train_epochs lr_num_cycles validation_epochs validation_steps checkpointing_steps"
        " checkpoints_total_limit max_skipped_steps",
    ),
    _from(1, 4096, "rank"),  # the sides of most layers of FLUX.1 are 3072
    _from(1, 1000, "train_batch_size gradient_accumulation_steps sample_batch_size cache_crops"),
    _from(1, 1000, "validation_inference_steps"),  # FLUX.1 has so many timesteps
    _from(1, 10_000, "repeats num_validation_images"),
    _from(1, 100_000, "num_class_images"),
    _from(1, 64, "max_buckets"),  # each is a graph to compile
    _from(0, 256, "dataloader_num_workers"),
    _from(0, 1000, "guidance_scale validation_guidance adam_weight_decay"),
    _from(0, 10**6, "prior_loss_weight"),
    _from(-1000, 1000, "logit_mean"),
    ("above 0, up to 1000", lambda x: 0 < x <= 1000, "logit_std learning_rate lr_power adam_epsilon"),
    ("above 0, up to 1000000", lambda x: 0 < x <= 10**6, "lora_alpha"),
    # without clipping: as large as you like, but a float32
    ("above 0, up to 1e30", lambda x: 0 < x <= 1e30, "max_grad_norm"),
    ("0 or more and below 1", lambda x: 0 <= x < 1, "lora_dropout adam_beta1 adam_beta2 validation_share"),
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


def warnings(config: Config) -> list[Problem]:
    """What is allowed, but hardly meant."""
    optim = config.optim
    if optim.optimizer == "prodigy" and optim.learning_rate < LEAST_PRODIGY_RATE:
        return [
            Problem(
                f"--learning_rate {optim.learning_rate:g}: Prodigy finds its step size itself and takes this as a"
                f" factor on it, usually 1; below {LEAST_PRODIGY_RATE} it learns next to nothing",
                flag="learning_rate",
            )
        ]
    return []


def check_values(config: Config) -> list[Problem]:
    """Problems in the values alone; of the file system only links are looked at."""
    values = to_flat_dict(config)
    return [
        *_out_of_bounds(values),
        *_empty_texts(values),
        *_contradictions(config),
        *folders.problems(config),
        *_crop_problems(config),
        *_validation_problems(config),
        *_unknown_changes(config),
        *_unknown_trackers(config),
    ]


def _out_of_bounds(values: dict[str, Any]) -> list[Problem]:
    return [
        Problem(f"--{name} {values[name]}: must be {rule}", flag=name)
        for rule, holds, names in BOUNDS
        for name in names.split()
        if values[name] is not None and not holds(values[name])
    ]


def _empty_texts(values: dict[str, Any]) -> list[Problem]:
    return [
        Problem(f"--{name} is empty: give it a value or leave it out", flag=name)
        for name, value in values.items()
        for text in (value if isinstance(value, list) else [value])
        if isinstance(text, str) and not text.strip()
    ]


def _contradictions(config: Config) -> list[Problem]:
    data, optim, runtime = config.data, config.optim, config.runtime
    problems = []
    for name in ("class_data_dir", "class_prompt"):
        value = getattr(data, name)
        if data.with_prior_preservation and value is None:
            problems.append(
                Problem(
                    f"--with_prior_preservation needs --{name}: add it", flag="with_prior_preservation", also=(name,)
                )
            )
        if not data.with_prior_preservation and value is not None:
            problems.append(
                Problem(
                    f"--{name} {value}: needs --with_prior_preservation; add that or leave --{name} out",
                    flag=name,
                    also=("with_prior_preservation",),
                )
            )
    problems += _picture_contradictions(config)
    if optim.lr_warmup_steps > 0 and optim.lr_scheduler == "constant":
        problems.append(
            Problem(
                f"--lr_warmup_steps {optim.lr_warmup_steps}: --lr_scheduler constant has no warm-up;"
                " use constant_with_warmup",
                flag="lr_warmup_steps",
                also=("lr_scheduler",),
            )
        )
    if optim.max_train_steps is not None and optim.lr_warmup_steps > optim.max_train_steps:
        problems.append(
            Problem(
                f"--lr_warmup_steps {optim.lr_warmup_steps}: longer than the run of --max_train_steps"
                f" {optim.max_train_steps}; shorten the warm-up",
                flag="lr_warmup_steps",
                also=("max_train_steps",),
            )
        )
    if not config.lora.layers:
        problems.append(
            Problem(
                f"--lora_layers {config.lora.lora_layers}: names no layer; give some, or leave it out",
                flag="lora_layers",
            )
        )
    if config.hub.hub_model_id and not config.hub.push_to_hub:
        problems.append(
            Problem(
                f"--hub_model_id {config.hub.hub_model_id}: needs --push_to_hub; add that or leave it out",
                flag="hub_model_id",
                also=("push_to_hub",),
            )
        )
    if recomputed(config) is None:
        problems.append(
            Problem(
                f"--gradient_checkpointing {runtime.gradient_checkpointing}: expects blocks, attention, none or a "
                "number of blocks",
                flag="gradient_checkpointing",
            )
        )
    if runtime.device == "CPU" and runtime.mixed_precision == "bf16":
        problems.append(
            Problem(
                "--mixed_precision bf16: the CPU backend has no bf16 kernels; use no or fp16 with --device CPU",
                flag="mixed_precision",
                also=("device",),
            )
        )
    if runtime.device != "CPU" and runtime.jit_level == "O2" and optim.gradient_accumulation_steps > 1:
        problems.append(
            Problem(
                f"--jit_level O2: not with --gradient_accumulation_steps {optim.gradient_accumulation_steps}, whose"
                " graph branches; use O1",
                flag="jit_level",
                also=("gradient_accumulation_steps", "device"),
            )
        )
    if runtime.device == "CPU" and not runtime.deterministic:
        problems.append(
            Problem(
                "--no-deterministic: of use on Ascend only; leave it out with --device CPU",
                flag="deterministic",
                also=("device",),
            )
        )
    if runtime.compile_cache == "off" and runtime.compile_cache_dir is not None:
        problems.append(
            Problem(
                f"--compile_cache_dir {runtime.compile_cache_dir}: not used with --compile_cache off; leave one of them"
                " out",
                flag="compile_cache_dir",
                also=("compile_cache",),
            )
        )
    return problems


def _crop_problems(config: Config) -> list[Problem]:
    data, found = config.data, []
    if data.aspect_ratio_buckets is not None:
        wrong = buckets.problems(data.aspect_ratio_buckets, data.resolution, data.max_buckets)
        found += [
            Problem(f"--aspect_ratio_buckets: {text}", flag="aspect_ratio_buckets", also=("resolution", "max_buckets"))
            for text in wrong
        ]
    if data.cache_crops > 1 and data.center_crop:
        found.append(
            Problem(
                f"--cache_crops {data.cache_crops}: --center_crop has only one; leave one of them out",
                flag="cache_crops",
                also=("center_crop",),
            )
        )
    if data.cache_crops > 1 and not data.cache_latents:
        found.append(
            Problem(
                f"--cache_crops {data.cache_crops}: --no-cache_latents crops anew for every example; leave one of them"
                " out",
                flag="cache_crops",
                also=("cache_latents",),
            )
        )
    return found


def _picture_contradictions(config: Config) -> list[Problem]:
    data, problems = config.data, []
    if data.instance_data_dir is None and data.dataset_name is None:
        problems.append(
            Problem(
                "--instance_data_dir or --dataset_name is required: say where the pictures of the subject are",
                flag="instance_data_dir",
                also=("dataset_name",),
            )
        )
    if data.instance_data_dir is not None and data.dataset_name is not None:
        problems.append(
            Problem(
                f"--dataset_name {data.dataset_name}: not together with --instance_data_dir; leave one out",
                flag="dataset_name",
                also=("instance_data_dir",),
            )
        )
    defaults = {f.name: f.default for f in dataclasses.fields(data)}
    for name in ("dataset_config_name", "image_column", "caption_column"):
        value = getattr(data, name)
        if data.dataset_name is None and value != defaults[name]:
            problems.append(
                Problem(
                    f"--{name} {value}: needs --dataset_name; add that or leave --{name} out",
                    flag=name,
                    also=("dataset_name",),
                )
            )
    if data.trigger_word is None:
        prompts = {"instance_prompt": [data.instance_prompt], "validation_prompt": config.validation.validation_prompt}
        problems += [
            Problem(
                f"--{name} {text}: needs --trigger_word, which takes the place of {{trigger}}",
                flag=name,
                also=("trigger_word",),
            )
            for name, texts in prompts.items()
            for text in texts
            if has_trigger(text)
        ]
    elif has_trigger(data.trigger_word):
        problems.append(Problem(f"--trigger_word {data.trigger_word}: must be a word of its own", flag="trigger_word"))
    if data.class_prompt is not None and has_trigger(data.class_prompt):
        problems.append(
            Problem(f"--class_prompt {data.class_prompt}: names the class, so without {{trigger}}", flag="class_prompt")
        )
    try:
        background(config)
    except ValueError:
        problems.append(
            Problem(
                f"--alpha_background {data.alpha_background}: no colour; give a name such as grey, or #rrggbb",
                flag="alpha_background",
            )
        )
    return problems


def _validation_problems(config: Config) -> list[Problem]:
    validation = config.validation
    problems = []
    if (size := validation.validation_size) is not None:
        sides = parse_size(size)
        if sides is None:
            problems.append(
                Problem(
                    f"--validation_size {size}: expects height x width in pixels, such as 768x512",
                    flag="validation_size",
                )
            )
        elif any(side <= 0 or side % PIXELS_PER_TOKEN or side > LARGEST_SIDE for side in sides):
            problems.append(
                Problem(
                    f"--validation_size {size}: both sides must be multiples of {PIXELS_PER_TOKEN}, up to"
                    f" {LARGEST_SIDE}",
                    flag="validation_size",
                )
            )
    if validation.validation_data_dir is not None and validation.validation_share > 0:
        problems.append(
            Problem(
                "--validation_share: not together with --validation_data_dir; give one of them",
                flag="validation_share",
                also=("validation_data_dir",),
            )
        )
    if validation.keep_best and not validation.has_held_out:
        problems.append(
            Problem(
                "--keep_best: needs --validation_data_dir or --validation_share to measure what is best",
                flag="keep_best",
                also=("validation_data_dir", "validation_share"),
            )
        )
    return problems


def _unknown_trackers(config: Config) -> list[Problem]:
    given = config.output.trackers
    problems = [
        Problem(
            f"--report_to {name}: expects tensorboard, wandb, swanlab or none{did_you_mean(name, TRACKERS)}",
            flag="report_to",
        )
        for name in given
        if name not in TRACKERS
    ]
    if given and any("none" in item.split(",") for item in config.output.report_to):
        problems.append(Problem(f"--report_to: none excludes {', '.join(given)}; leave one out", flag="report_to"))
    return problems


def _unknown_changes(config: Config) -> list[Problem]:
    known = to_flat_dict(config)
    return [
        Problem(f"--allow_changed {name}: no such setting{did_you_mean(name, known)}", flag="allow_changed")
        for name in sorted(config.output.changes_allowed)
        if name not in known
    ]
