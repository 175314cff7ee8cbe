"""What the settings of the LoRA, the loss, the optimizer, the text encoder and the device may contradict."""

import dataclasses
from collections.abc import Callable
from typing import Any

from flux_db import releases
from flux_db.check.rule import Rule, broken
from flux_db.errors import did_you_mean
from flux_db.problem import Problem
from flux_db.settings import lora_layers
from flux_db.settings.derived import recomputed
from flux_db.settings.schema import TEXT_ENCODER_LAYERS, Config, LossConfig

INIT = "init_lora"
SIGMOIDS = ("sigmoid", "shift", "flux_shift")


def training_problems(config: Config) -> list[Problem]:
    return [
        *_text_encoder_problems(config),
        *_device_problems(config),
        *_timestep_problems(config),
        *_lora_problems(config),
        *_robust_problems(config),
        *_optimizer_problems(config),
    ]


def _optimizer_problems(config: Config) -> list[Problem]:
    optim, warmup = config.optim, config.optim.lr_warmup_steps
    users = {"lr_power": ("polynomial",), "lr_num_cycles": ("cosine_with_restarts",)}
    return _unused(optim, "lr_scheduler", users) + broken(
        Rule(
            optim.max_train_steps is not None and warmup > optim.max_train_steps and optim.lr_scheduler != "constant",
            "lr_warmup_steps",
            f" {warmup}: longer than the run of --max_train_steps {optim.max_train_steps}; shorten the warm-up",
            ("max_train_steps", "lr_scheduler"),
        ),
        Rule(
            config.output.ema_export and optim.ema_decay is None,
            "ema_export",
            ": needs --ema_decay, which makes the average; add that or leave it out",
            ("ema_decay",),
        ),
    )


def _lora_problems(config: Config) -> list[Problem]:
    lora, optim = config.lora, config.optim
    prodigy = optim.optimizer == "prodigy"
    why = "Prodigy finds one step size for all weights; leave it out, or use --optimizer adamw"
    alone = [name for name in ("init_lora_resize", "init_lora_transformer_only") if getattr(lora, name)]
    return [
        *_unread("lora_layers", lora_layers.parse, lora.lora_layers),
        *_unread("lora_rank_pattern", lora_layers.rank_patterns, lora.lora_rank_pattern),
        *_unread("lora_lr_pattern", lora_layers.rate_patterns, optim.lora_lr_pattern),
        *broken(
            Rule(prodigy and bool(optim.lora_lr_pattern), "lora_lr_pattern", f": {why}", ("optimizer",)),
            Rule(
                prodigy and optim.loraplus_ratio != 1,
                "loraplus_ratio",
                f" {optim.loraplus_ratio:g}: {why}",
                ("optimizer",),
            ),
            *(
                Rule(lora.init_lora is None, name, f": needs --init_lora; add that or leave --{name} out", (INIT,))
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
    loss, sampling, scheme = config.loss, config.loss.timestep_sampling, config.loss.weighting_scheme
    return [
        *_unused(loss, "timestep_sampling", {"sigmoid_scale": SIGMOIDS, "flow_shift": ("shift",)}),
        *_unused(
            loss,
            "weighting_scheme",
            {"logit_mean": ("logit_normal",), "logit_std": ("logit_normal",), "mode_scale": ("mode",)},
        ),
        *broken(
            Rule(
                sampling != "scheme" and scheme in ("logit_normal", "mode"),
                "timestep_sampling",
                f" {sampling}: --weighting_scheme {scheme} draws the noise levels too; leave one of them out",
                ("weighting_scheme",),
            ),
        ),
    ]


def _unused(section: Any, choice: str, users: dict[str, tuple[str, ...]]) -> list[Problem]:
    """Settings that the value of another, `choice`, does not use. `users`: the values that do, for each of them."""
    chosen, defaults = getattr(section, choice), type(section)()
    return broken(
        *(
            Rule(
                chosen not in values and getattr(section, name) != getattr(defaults, name),
                name,
                f" {getattr(section, name):g}: not used with --{choice} {chosen}; leave it out",
                (choice,),
            )
            for name, values in users.items()
        )
    )


def _robust_problems(config: Config) -> list[Problem]:
    loss, defaults = config.loss, LossConfig()
    given = [name for name in ("huber_delta", "huber_schedule") if getattr(loss, name) != getattr(defaults, name)]
    return broken(
        *(
            Rule(loss.loss == "l2", name, f" {getattr(loss, name)}: not used with --loss l2; leave it out", ("loss",))
            for name in given
        ),
    )


def _text_encoder_problems(config: Config) -> list[Problem]:
    text, switch = config.text_encoder, "train_text_encoder"
    defaults = {field.name: field.default for field in dataclasses.fields(text)}
    given = [name for name, default in defaults.items() if name != switch and getattr(text, name) != default]
    unknown = [name for name in text.layers if name not in TEXT_ENCODER_LAYERS]
    return broken(
        *(
            Rule(
                not text.train_text_encoder,
                name,
                f" {getattr(text, name)}: needs --{switch}; add that or leave --{name} out",
                (switch,),
            )
            for name in given
        ),
        Rule(
            bool(unknown) or not text.layers,
            "text_encoder_layers",
            f" {text.text_encoder_layers}: expects all, or some of {', '.join(TEXT_ENCODER_LAYERS)}"
            + (did_you_mean(unknown[0], TEXT_ENCODER_LAYERS) if unknown else ""),
        ),
        Rule(
            text.train_text_encoder and config.optim.optimizer == "prodigy" and "text_encoder_lr" in given,
            "text_encoder_lr",
            f" {text.text_encoder_lr:g}: Prodigy finds one step size for both LoRAs; leave --text_encoder_lr out, or "
            "use --optimizer adamw",
            ("optimizer",),
        ),
    )


def _device_problems(config: Config) -> list[Problem]:
    runtime, accumulated = config.runtime, config.optim.gradient_accumulation_steps
    on_cpu, mindspore = runtime.device == "CPU", releases.installed()
    found = broken(
        Rule(
            recomputed(config) is None,
            "gradient_checkpointing",
            f" {runtime.gradient_checkpointing}: expects blocks, attention, none or a number of blocks",
        ),
        Rule(
            on_cpu and runtime.mixed_precision == "bf16",
            "mixed_precision",
            " bf16: the CPU backend has no bf16 kernels; use no or fp16 with --device CPU",
            ("device",),
        ),
        Rule(
            not on_cpu and runtime.jit_level == "O2" and accumulated > 1,
            "jit_level",
            f" O2: not with --gradient_accumulation_steps {accumulated}, whose graph branches; use O1",
            ("gradient_accumulation_steps", "device"),
        ),
        Rule(
            not on_cpu and runtime.jit_level == "O2" and not releases.documents_o2(mindspore),
            "jit_level",
            f" O2: MindSpore {mindspore} is about to remove it (from 2.9 on); use O1",
            ("device",),
        ),
        Rule(
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
