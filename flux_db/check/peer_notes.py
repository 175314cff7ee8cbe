"""Where a command line of diffusers' or mindone's script means nothing or something else here: a line for each."""

from __future__ import annotations

from collections.abc import Iterator

from flux_db.console import say
from flux_db.settings.command_line import Given

# Defaults of both scripts that differ from this program's, beside --lora_alpha and --learning_rate.
THEIR_RANK, THEIR_ALPHA = 4, 4
THEIR_DEFAULTS = {"rank": THEIR_RANK, "guidance_scale": 3.5, "train_batch_size": 4}
THEIR_WARMUP = 500

THERE = "diffusers' and mindone's scripts"


def say_notes(given: Given) -> None:
    for line in (*given.notes, *notes(given)):
        say(f"note: {line}")


def notes(given: Given) -> list[str]:
    """Lines to print; none about defaults if there is a YAML file, which those scripts do not have."""
    return [*given.ignored, *([] if given.has_file else _defaults(given)), *_epochs(given)]


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


def _epochs(given: Given) -> Iterator[str]:
    config = given.config
    if not config.data.with_prior_preservation:
        return
    flags = {
        "num_train_epochs": config.optim.max_train_steps is None,
        "validation_epochs": "validation_epochs" in given.named and config.validation.validation_steps is None,
    }
    if used := [f"--{name}" for name, is_used in flags.items() if is_used]:
        yield (
            f"{' and '.join(used)}: an epoch is a pass over the pictures of the subject; in {THERE} over as many as the"
            " larger of subject and class has"
        )
