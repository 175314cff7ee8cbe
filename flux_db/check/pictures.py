"""Problems with the pictures, found before any model is loaded."""

from __future__ import annotations

import collections
import math
import os
from pathlib import Path

from flux_db.check import folders
from flux_db.check.values import MOST_STEPS, check_values
from flux_db.data import buckets
from flux_db.data.dataset import choose_sizes, number_of_devices
from flux_db.data.draw_order import DrawOrder
from flux_db.data.pictures import Inspection, find_pictures
from flux_db.data.selection import (
    FILES_NAMED,
    Survey,
    find_subject,
    held_out_pictures,
    held_out_place,
    inspect_subject,
    masks_in_use,
    trained_pictures,
)
from flux_db.errors import UserError
from flux_db.problem import Problem, under_flag
from flux_db.settings.derived import fill_trigger, global_batch, instance_prompt
from flux_db.settings.preserved import preserved_prompt, subject_word
from flux_db.settings.schema import Config

# By repeats. More in an epoch help nobody, and each has its place in memory.
MOST_EXAMPLES = 1_000_000


def check_pictures(config: Config) -> list[Problem]:
    """Problems with the pictures; looked for before any model is loaded."""
    return survey(config).problems


def survey(config: Config) -> Survey:
    data = config.data
    if (data.instance_data_dir is None) == (data.dataset_name is None) or folders.problems(config):
        return Survey(None, None, [])  # the other checks report it: exactly one is needed, apart from all other folders
    if data.instance_data_dir is not None and not os.path.isdir(data.instance_data_dir):
        return Survey(None, None, [])  # check_files reports it
    found = subject = None
    try:
        found = find_subject(config)
        subject = inspect_subject(config, found)
        problems: list[str] = [*subject.problems, *masks_in_use(config, found.folder, subject.pictures).problems]
    except UserError as error:
        problems = list(error.problems)
    if found and data.dataset_name is None:
        problems += folders.strays(config, "instance_data_dir", (s.path for s in found.sources))
    if data.with_prior_preservation and data.class_data_dir:
        # damaged class pictures are replaced, and missing ones made: only captions could stop the run
        classes = find_pictures(Path(data.class_data_dir), may_be_empty=True)
        strays = folders.strays(config, "class_data_dir", (s.path for s in classes.sources))
        problems += [under_flag(problem, "class_data_dir") for problem in (*classes.problems, *strays)]
    if not problems:
        problems += [*_held_out_problems(config, subject), *_preserve_problems(config, subject)]
    if not problems and not check_values(config):
        problems += _length_problems(config, subject)
    flag = "instance_data_dir" if data.dataset_name is None else "dataset_name"
    return Survey(found, subject, [under_flag(problem, flag) for problem in problems])


def _held_out_problems(config: Config, subject: Inspection) -> list[Problem]:
    """Problems with the pictures of the validation loss."""
    folder, share = config.validation.validation_data_dir, config.validation.validation_share
    if folder is not None:
        # check_files reports a missing folder
        seen = held_out_pictures(config, subject) if os.path.isdir(folder) else Inspection((), (), ())
        problems = [*seen.problems, *folders.strays(config, "validation_data_dir", (p.path for p in seen.pictures))]
        return [under_flag(problem, "validation_data_dir") for problem in problems]
    places = sorted(held_out_place(picture) for picture in subject.pictures)
    if share > 0 and places[0] >= share:
        smallest = math.ceil(places[0] * 1000 + 1e-6) / 1000
        hint = f"{smallest} holds out one" if smallest < 1 and places[-1] >= smallest else "use --validation_data_dir"
        return [
            Problem(
                f"--validation_share {share}: holds out none of the {len(places)} pictures; {hint}",
                flag="validation_share",
            )
        ]
    if share > 0 and places[-1] < share:
        return [
            Problem(
                f"--validation_share {share}: holds out all {len(places)} pictures; nothing is left to train on",
                flag="validation_share",
            )
        ]
    return []


def _preserve_problems(config: Config, subject: Inspection) -> list[Problem]:
    """Captions that --preserve_class cannot tell from the class: trained on and held back they would contradict."""
    if not config.data.preserve_class or subject_word(config) is None:  # check_values reports the latter
        return []
    trained = trained_pictures(config, subject)
    wrong = [p for p in trained if preserved_prompt(fill_trigger(p.caption or "", config), config) is None]
    if preserved_prompt(instance_prompt(config), config) is not None:
        wrong = [p for p in wrong if p.caption]
    if not wrong:
        return []
    shown = ", ".join(str(p.path) for p in wrong[:FILES_NAMED])
    more = f" and {len(wrong) - FILES_NAMED} more" if len(wrong) > FILES_NAMED else ""
    text = (
        f"--preserve_class {config.data.preserve_class}: the trigger {subject_word(config)} is not in the caption of "
        f"{shown}{more}; without it the caption is the class's own, which is held to the base model; add it there"
    )
    return [Problem(text, flag="preserve_class", also=("instance_prompt", "trigger_word"))]


def _length_problems(config: Config, subject: Inspection) -> list[Problem]:
    """Problems with the number of examples and steps, which without the pictures cannot be known."""
    optim, repeats = config.optim, config.data.repeats
    trained = trained_pictures(config, subject)
    if repeats > 1 and repeats * len(trained) > MOST_EXAMPLES:
        return [
            Problem(
                f"--repeats {repeats}: makes {repeats * len(trained)} examples of the {len(trained)} pictures; at most"
                f" {MOST_EXAMPLES} are possible",
                flag="repeats",
            )
        ]
    if optim.max_train_steps is not None:
        return []
    sizes = choose_sizes(config, trained)
    counts = collections.Counter(buckets.nearest(p.size, sizes) for p in trained)
    groups = tuple(tuple(range(count * repeats)) for count in counts.values())
    batch = global_batch(config, number_of_devices())
    steps = DrawOrder(seed=config.output.seed, global_batch=batch, groups=groups).steps(optim.num_train_epochs)
    if steps > MOST_STEPS:
        return [
            Problem(
                f"--num_train_epochs {optim.num_train_epochs}: makes {steps} steps; at most {MOST_STEPS} are possible",
                flag="num_train_epochs",
            )
        ]
    if optim.lr_warmup_steps > steps:
        return [
            Problem(
                f"--lr_warmup_steps {optim.lr_warmup_steps}: longer than the run of --num_train_epochs"
                f" {optim.num_train_epochs}, which has {steps} steps; shorten the warm-up",
                flag="lr_warmup_steps",
                also=("num_train_epochs",),
            )
        ]
    return []
