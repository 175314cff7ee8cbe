"""Where a command line of diffusers' or mindone's script means nothing or something else here: a line for each."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flux_db.console import say
from flux_db.data.dataset import Dataset, total_steps
from flux_db.settings.command_line import Given
from flux_db.settings.derived import global_batch
from flux_db.settings.schema import Config

# Defaults of both scripts that differ from this program's, beside --lora_alpha and --learning_rate.
THEIR_RANK, THEIR_ALPHA = 4, 4
THEIR_DEFAULTS = {"rank": THEIR_RANK, "guidance_scale": 3.5, "train_batch_size": 4}
THEIR_WARMUP = 500

THERE = "diffusers' and mindone's scripts"


def say_notes(given: Given, dataset: Dataset, devices: int) -> None:
    for line in (*given.notes, *notes(given, dataset, devices)):
        say(f"note: {line}")


def notes(given: Given, dataset: Dataset, devices: int) -> list[str]:
    """Lines to print; none about defaults if there is a YAML file, which those scripts do not have."""
    return [*given.ignored, *([] if given.has_file else _defaults(given)), *_epochs(given, dataset, devices)]


def _defaults(given: Given) -> Iterator[str]:
    config = given.config
    values = {"rank": config.lora.rank, "guidance_scale": config.loss.guidance_scale}
    values["train_batch_size"] = config.optim.train_batch_size
    for name, theirs in THEIR_DEFAULTS.items():
        if name not in given.named and values[name] != theirs and not (name == "rank" and config.lora.init_lora):
            yield f"--{name} is {values[name]:g} unless it is given, {theirs:g} in {THERE}"
    if "lora_alpha" not in given.named and config.lora.alpha != THEIR_ALPHA and not config.lora.init_lora:
        yield f"--lora_alpha is --rank unless it is given, {THEIR_ALPHA} in diffusers' script"
    if "lr_warmup_steps" not in given.named and config.optim.lr_scheduler != "constant":
        yield f"--lr_warmup_steps is 0 unless it is given, {THEIR_WARMUP} in {THERE}"
    if config.optim.optimizer == "prodigy" and "learning_rate" not in given.named:
        yield "--learning_rate is 1 for Prodigy unless it is given, 0.0001 in diffusers' script"


def _epochs(given: Given, dataset: Dataset, devices: int) -> Iterator[str]:
    """Flags that count epochs, if these have another number of steps there."""
    config, batch, examples = given.config, global_batch(given.config, devices), len(dataset.examples)
    larger = config.data.num_class_images if config.data.with_prior_preservation else 0
    there = _their_steps(config, max(examples, larger), devices)
    why = "ends each epoch with a step"
    if larger > examples:
        why = "makes an epoch of as many pictures as the larger of subject and class has"
    optim, validation = config.optim, config.validation
    if optim.max_train_steps is None:
        epochs, here = optim.num_train_epochs, total_steps(config, dataset, batch)
        if here != epochs * there:
            yield _epochs_line("num_train_epochs", epochs, here, epochs * there, why, "max_train_steps")
    if "validation_epochs" in given.named and validation.validation_steps is None:
        epochs, here = validation.validation_epochs, math.ceil(validation.validation_epochs * examples / batch)
        if here != epochs * there:
            yield _epochs_line("validation_epochs", epochs, here, epochs * there, why, "validation_steps")


def _epochs_line(name: str, epochs: int, here: int, there: int, why: str, steps: str) -> str:
    one = "diffusers' script"
    return f"--{name} {epochs}: {here} steps here, {there} in {one}, which {why}; --{steps} {there} gives as many"


def _their_steps(config: Config, examples: int, devices: int) -> int:
    """Steps of one of their epochs: its last batch, and its last step, may be smaller than the others."""
    batches = math.ceil(math.ceil(examples / config.optim.train_batch_size) / devices)
    return math.ceil(batches / config.optim.gradient_accumulation_steps)
