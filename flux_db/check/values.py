"""Every problem in the values of the settings, found before any file is looked at.

A check returns its problems as values; the line of each names the flag, the value and what to do.
"""

from typing import Any

from flux_db.check import folders
from flux_db.check.bounds import out_of_bounds
from flux_db.check.concepts import concept_problems
from flux_db.check.picture_rules import picture_problems
from flux_db.check.rule import Rule, broken
from flux_db.check.training_rules import training_problems
from flux_db.check.validation_rules import validation_problems
from flux_db.errors import did_you_mean
from flux_db.problem import Problem
from flux_db.settings.schema import TRACKERS, Config, to_flat_dict

# The one text that may be empty.
EMPTY_PROMPT = ("preserve_class", "")

# Prodigy's learning rate is a factor on the step size that it finds itself: its authors use 1.
LEAST_PRODIGY_RATE = 0.1


def warnings(config: Config) -> list[Problem]:
    """What is allowed, but hardly meant."""
    optim = config.optim
    return broken(
        Rule(
            optim.optimizer == "prodigy" and optim.learning_rate < LEAST_PRODIGY_RATE,
            "learning_rate",
            f" {optim.learning_rate:g}: Prodigy finds its step size itself and takes this as a factor on it, usually 1;"
            f" below {LEAST_PRODIGY_RATE} it learns next to nothing",
        ),
        Rule(
            optim.lr_warmup_steps > 0 and optim.lr_scheduler == "constant",
            "lr_warmup_steps",
            f" {optim.lr_warmup_steps} is ignored: --lr_scheduler constant has no warm-up; constant_with_warmup has",
        ),
    )


def check_values(config: Config) -> list[Problem]:
    """Problems in the values alone; of the file system only links are looked at."""
    values = to_flat_dict(config)
    return [
        *out_of_bounds(values),
        *_empty_texts(values),
        *picture_problems(config),
        *training_problems(config),
        *concept_problems(config),
        *folders.problems(config),
        *validation_problems(config),
        *_hub_problems(config),
        *_unknown_changes(config),
        *_unknown_trackers(config),
    ]


def _empty_texts(values: dict[str, Any]) -> list[Problem]:
    return [
        Problem(f"--{name} is empty: give it a value or leave it out", flag=name)
        for name, value in values.items()
        for text in (value if isinstance(value, list) else [value])
        if isinstance(text, str) and not text.strip() and (name, text) != EMPTY_PROMPT
    ]


def _hub_problems(config: Config) -> list[Problem]:
    hub = config.hub
    return broken(
        Rule(
            bool(hub.hub_model_id) and not hub.push_to_hub,
            "hub_model_id",
            f" {hub.hub_model_id}: needs --push_to_hub; add that or leave it out",
            ("push_to_hub",),
        ),
    )


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
