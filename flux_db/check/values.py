"""Find every problem with the settings and the files they name before any model is loaded.

A check returns its problems as values; the line of each names the flag, the value and what to do.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from flux_db.check import folders
from flux_db.check.concepts import concept_problems
from flux_db.data import buckets
from flux_db.errors import did_you_mean
from flux_db.problem import Problem
from flux_db.settings import lora_layers
from flux_db.settings.concepts import concepts_of, has_trigger, setting_name
from flux_db.settings.derived import background, recomputed, triggers
from flux_db.settings.preserved import is_preserved
from flux_db.settings.schema import TEXT_ENCODER_LAYERS, TRACKERS, Config, DataConfig, LossConfig, to_flat_dict
from flux_db.settings.subject_word import word_of
from flux_db.size import LARGEST_SIDE, PIXELS_PER_TOKEN, parse_size

# Beyond this scale the mode scheme's map from uniform draws to timesteps is no longer one to one (SD3 paper, sec. 3.1).
LARGEST_MODE_SCALE = 2 / (math.pi - 2)

# The one text that may be empty.
EMPTY_PROMPT = ("preserve_class", "")

# The learning rate of every step is computed before the first one.
MOST_STEPS = 10_000_000

INIT = "init_lora"

# Prodigy's learning rate is a factor on the step size that it finds itself: its authors use 1.
LEAST_PRODIGY_RATE = 0.1


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
    _from(-1000, 1000, "logit_mean"),
    (
        "above 0, up to 1000",
        lambda x: 0 < x <= 1000,
        "logit_std learning_rate text_encoder_lr lr_power adam_epsilon sigmoid_scale flow_shift loraplus_ratio"
        " huber_delta",
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
        *concept_problems(config),
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
        if isinstance(text, str) and not text.strip() and (name, text) != EMPTY_PROMPT
    ]


class _Rule(NamedTuple):
    """One thing that settings may have wrong."""

    broken: bool
    flag: str
    text: str
    """What follows the flag in the message."""
    also: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        return Problem(f"--{self.flag}{self.text}", flag=self.flag, also=self.also)


def _broken(*rules: _Rule) -> list[Problem]:
    return [rule.problem for rule in rules if rule.broken]


def _contradictions(config: Config) -> list[Problem]:
    optim, hub = config.optim, config.hub
    warmup = optim.lr_warmup_steps
    return [
        *_prior_problems(config),
        *_preserve_problems(config),
        *_text_encoder_problems(config),
        *_picture_contradictions(config),
        *_device_problems(config),
        *_timestep_problems(config),
        *_lora_problems(config),
        *_robust_problems(config),
        *_broken(
            _Rule(
                warmup > 0 and optim.lr_scheduler == "constant",
                "lr_warmup_steps",
                f" {warmup}: --lr_scheduler constant has no warm-up; use constant_with_warmup",
                ("lr_scheduler",),
            ),
            _Rule(
                optim.max_train_steps is not None and warmup > optim.max_train_steps,
                "lr_warmup_steps",
                f" {warmup}: longer than the run of --max_train_steps {optim.max_train_steps}; shorten the warm-up",
                ("max_train_steps",),
            ),
            _Rule(
                config.output.ema_export and optim.ema_decay is None,
                "ema_export",
                ": needs --ema_decay, which makes the average; add that or leave it out",
                ("ema_decay",),
            ),
            _Rule(
                bool(hub.hub_model_id) and not hub.push_to_hub,
                "hub_model_id",
                f" {hub.hub_model_id}: needs --push_to_hub; add that or leave it out",
                ("push_to_hub",),
            ),
        ),
    ]


def _lora_problems(config: Config) -> list[Problem]:
    lora, optim = config.lora, config.optim
    prodigy = optim.optimizer == "prodigy"
    why = "Prodigy finds one step size for all weights; leave it out, or use --optimizer adamw"
    alone = [name for name in ("init_lora_resize", "init_lora_transformer_only") if getattr(lora, name)]
    return [
        *_unread("lora_layers", lora_layers.parse, lora.lora_layers),
        *_unread("lora_rank_pattern", lora_layers.rank_patterns, lora.lora_rank_pattern),
        *_unread("lora_lr_pattern", lora_layers.rate_patterns, optim.lora_lr_pattern),
        *_broken(
            _Rule(prodigy and bool(optim.lora_lr_pattern), "lora_lr_pattern", f": {why}", ("optimizer",)),
            _Rule(
                prodigy and optim.loraplus_ratio != 1,
                "loraplus_ratio",
                f" {optim.loraplus_ratio:g}: {why}",
                ("optimizer",),
            ),
            *(
                _Rule(lora.init_lora is None, name, f": needs --init_lora; add that or leave --{name} out", (INIT,))
                for name in alone
            ),
        ),
    ]


def _unread(flag: str, read: Callable[[Any], Any], value: Any) -> list[Problem]:
    """The problem of a setting that has a grammar of its own."""
    try:
        read(value)
    except ValueError as error:
        return [Problem(f"--{flag} {error}", flag=flag)]
    return []


def _timestep_problems(config: Config) -> list[Problem]:
    loss, defaults = config.loss, LossConfig()
    sampling, scheme = loss.timestep_sampling, loss.weighting_scheme
    unused = {
        "sigmoid_scale": sampling in ("scheme", "uniform"),
        "flow_shift": sampling != "shift",
    }
    return _broken(
        _Rule(
            sampling != "scheme" and scheme in ("logit_normal", "mode"),
            "timestep_sampling",
            f" {sampling}: --weighting_scheme {scheme} draws the noise levels too; leave one of them out",
            ("weighting_scheme",),
        ),
        *(
            _Rule(
                is_unused and getattr(loss, name) != getattr(defaults, name),
                name,
                f" {getattr(loss, name):g}: not used with --timestep_sampling {sampling}; leave it out",
                ("timestep_sampling",),
            )
            for name, is_unused in unused.items()
        ),
    )


def _robust_problems(config: Config) -> list[Problem]:
    loss, defaults = config.loss, LossConfig()
    given = [name for name in ("huber_delta", "huber_schedule") if getattr(loss, name) != getattr(defaults, name)]
    return _broken(
        *(
            _Rule(loss.loss == "l2", name, f" {getattr(loss, name)}: not used with --loss l2; leave it out", ("loss",))
            for name in given
        ),
    )


def _prior_problems(config: Config) -> list[Problem]:
    prior, switch = config.data.with_prior_preservation, "with_prior_preservation"
    needed = {name: getattr(config.data, name) for name in ("class_data_dir", "class_prompt")}
    rules = []
    for name, value in needed.items():
        alone = f" {value}: needs --{switch}; add that or leave --{name} out"
        rules.append(_Rule(prior and value is None, switch, f" needs --{name}: add it", (name,)))
        rules.append(_Rule(not prior and value is not None, name, alone, (switch,)))
    return _broken(*rules)


def _preserve_problems(config: Config) -> list[Problem]:
    """Of the weight; check/concepts.py has those of the class."""
    weight = config.data.preserve_weight
    return _broken(
        _Rule(
            weight != DataConfig.preserve_weight and not is_preserved(config),
            "preserve_weight",
            f" {weight:g}: needs --preserve_class; add that or leave it out",
            ("preserve_class", "concepts"),
        )
    )


def _text_encoder_problems(config: Config) -> list[Problem]:
    text, switch = config.text_encoder, "train_text_encoder"
    defaults = {field.name: field.default for field in dataclasses.fields(text)}
    given = [name for name, default in defaults.items() if name != switch and getattr(text, name) != default]
    unknown = [name for name in text.layers if name not in TEXT_ENCODER_LAYERS]
    return _broken(
        *(
            _Rule(
                not text.train_text_encoder,
                name,
                f" {getattr(text, name)}: needs --{switch}; add that or leave --{name} out",
                (switch,),
            )
            for name in given
        ),
        _Rule(
            bool(unknown) or not text.layers,
            "text_encoder_layers",
            f" {text.text_encoder_layers}: expects all, or some of {', '.join(TEXT_ENCODER_LAYERS)}"
            + (did_you_mean(unknown[0], TEXT_ENCODER_LAYERS) if unknown else ""),
        ),
        _Rule(
            text.train_text_encoder and config.optim.optimizer == "prodigy" and "text_encoder_lr" in given,
            "text_encoder_lr",
            f" {text.text_encoder_lr:g}: Prodigy finds one step size for both LoRAs; leave --text_encoder_lr out, or "
            "use --optimizer adamw",
            ("optimizer",),
        ),
    )


def _device_problems(config: Config) -> list[Problem]:
    runtime, accumulated = config.runtime, config.optim.gradient_accumulation_steps
    on_cpu = runtime.device == "CPU"
    found = _broken(
        _Rule(
            recomputed(config) is None,
            "gradient_checkpointing",
            f" {runtime.gradient_checkpointing}: expects blocks, attention, none or a number of blocks",
        ),
        _Rule(
            on_cpu and runtime.mixed_precision == "bf16",
            "mixed_precision",
            " bf16: the CPU backend has no bf16 kernels; use no or fp16 with --device CPU",
            ("device",),
        ),
        _Rule(
            not on_cpu and runtime.jit_level == "O2" and accumulated > 1,
            "jit_level",
            f" O2: not with --gradient_accumulation_steps {accumulated}, whose graph branches; use O1",
            ("gradient_accumulation_steps", "device"),
        ),
        _Rule(
            runtime.compile_cache == "off" and runtime.compile_cache_dir is not None,
            "compile_cache_dir",
            f" {runtime.compile_cache_dir}: not used with --compile_cache off; leave one of them out",
            ("compile_cache",),
        ),
    )
    if on_cpu and not runtime.deterministic:
        text = "--no-deterministic: of use on Ascend only; leave it out with --device CPU"
        found.append(Problem(text, flag="deterministic", also=("device",)))
    return found


def _crop_problems(config: Config) -> list[Problem]:
    data, found = config.data, []
    if data.aspect_ratio_buckets is not None:
        wrong = buckets.problems(data.aspect_ratio_buckets, data.resolution, data.max_buckets)
        sizes = ("resolution", "max_buckets")
        found = [_Rule(True, "aspect_ratio_buckets", f": {text}", sizes).problem for text in wrong]
    several = data.cache_crops > 1
    return found + _broken(
        _Rule(
            several and data.center_crop,
            "cache_crops",
            f" {data.cache_crops}: --center_crop has only one; leave one of them out",
            ("center_crop",),
        ),
        _Rule(
            several and not data.cache_latents,
            "cache_crops",
            f" {data.cache_crops}: --no-cache_latents crops anew for every example; leave one of them out",
            ("cache_latents",),
        ),
    )


def _picture_contradictions(config: Config) -> list[Problem]:
    data = config.data
    defaults = {field.name: field.default for field in dataclasses.fields(data)}
    sources = {"instance_data_dir": data.instance_data_dir, "dataset_name": data.dataset_name}
    of_datasets = {name: getattr(data, name) for name in ("dataset_config_name", "image_column", "caption_column")}
    return _broken(
        _Rule(
            data.instance_data_dir is None and data.dataset_name is None and not data.concepts,
            "instance_data_dir",
            " or --dataset_name is required: say where the pictures of the subject are",
            ("dataset_name", "concepts"),
        ),
        *(
            _Rule(
                bool(data.concepts) and value is not None,
                name,
                f" {value}: not together with --concepts, whose entries have a dir; leave one out",
                ("concepts",),
            )
            for name, value in sources.items()
        ),
        _Rule(
            data.instance_data_dir is not None and data.dataset_name is not None,
            "dataset_name",
            f" {data.dataset_name}: not together with --instance_data_dir; leave one out",
            ("instance_data_dir",),
        ),
        *(
            _Rule(
                data.dataset_name is None and value != defaults[name],
                name,
                f" {value}: needs --dataset_name; add that or leave --{name} out",
                ("dataset_name",),
            )
            for name, value in of_datasets.items()
        ),
        *_trigger_rules(config),
        _Rule(
            not _has_background(config),
            "alpha_background",
            f" {data.alpha_background}: no colour; give a name such as grey, or #rrggbb",
        ),
    )


def _trigger_rules(config: Config) -> list[_Rule]:
    data, word = config.data, config.data.trigger_word
    prompts = [("instance_prompt", data.instance_prompt)] if data.instance_prompt is not None else []
    prompts += [("validation_prompt", text) for text in config.validation.validation_prompt]
    needed = "a trigger in --concepts" if data.concepts else "--trigger_word"
    return [
        *(
            _Rule(
                not triggers(config) and has_trigger(text),
                name,
                f" {text}: needs {needed}, which takes the place of {{trigger}}",
                ("trigger_word", "concepts"),
            )
            for name, text in prompts
        ),
        _Rule(word is not None and has_trigger(word), "trigger_word", f" {word}: must be a word of its own"),
        _Rule(
            data.class_prompt is not None and has_trigger(data.class_prompt),
            "class_prompt",
            f" {data.class_prompt}: names the class, so without {{trigger}}",
        ),
    ]


def _has_background(config: Config) -> bool:
    try:
        background(config)
    except ValueError:
        return False
    return True


def _validation_problems(config: Config) -> list[Problem]:
    validation, size = config.validation, config.validation.validation_size
    sides = parse_size(size) if size is not None else None
    return _broken(
        _Rule(
            size is not None and sides is None,
            "validation_size",
            f" {size}: expects height x width in pixels, such as 768x512",
        ),
        _Rule(
            sides is not None and any(not 0 < side <= LARGEST_SIDE or side % PIXELS_PER_TOKEN for side in sides),
            "validation_size",
            f" {size}: both sides must be multiples of {PIXELS_PER_TOKEN}, up to {LARGEST_SIDE}",
        ),
        _Rule(
            validation.validation_data_dir is not None and validation.validation_share > 0,
            "validation_share",
            ": not together with --validation_data_dir; give one of them",
            ("validation_data_dir",),
        ),
        _Rule(
            validation.keep_best == "loss" and not validation.has_held_out,
            "keep_best",
            ": needs --validation_data_dir or --validation_share to measure what is best",
            ("validation_data_dir", "validation_share"),
        ),
        _Rule(
            validation.early_stop_patience is not None and validation.keep_best == "none",
            "early_stop_patience",
            f" {validation.early_stop_patience}: needs --keep_best loss or --keep_best score, which says what is"
            " watched and keeps the best LoRA",
            ("keep_best",),
        ),
        *_score_rules(config),
    )


def _score_rules(config: Config) -> list[_Rule]:
    validation, steps = config.validation, config.validation.score_steps
    networks = {name: getattr(validation, name) for name in ("score_dino", "score_clip")}
    prompts = ("validation_prompt", "validation_prompts_file")
    subject = concepts_of(config)[0]
    trigger = "its key trigger" if config.data.concepts else "--trigger_word"
    return [
        _Rule(
            validation.keep_best == "score" and steps is None,
            "keep_best",
            " score: needs --score_steps, which measures what is best",
            ("score_steps",),
        ),
        _Rule(
            steps is not None and not any(getattr(validation, name) for name in prompts),
            "score_steps",
            f" {steps}: needs --validation_prompt or --validation_prompts_file, whose samples are scored",
            prompts,
        ),
        *(
            _Rule(
                value is not None and steps is None,
                name,
                f" {value}: needs --score_steps; add that or leave --{name} out",
                ("score_steps",),
            )
            for name, value in networks.items()
        ),
        _Rule(
            steps is not None and any(networks.values()) and word_of(config) is None,
            "score_steps",
            f' {steps}: {setting_name(config, subject, "prompt")} "{subject.prompt}" has no rare word, such as sks,'
            f" that tells samples of the subject from others; name it with {trigger}",
            ("instance_prompt", "trigger_word", "class_prompt", "concepts"),
        ),
    ]


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
