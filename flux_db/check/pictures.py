"""Problems with the pictures, found before any model is loaded."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence

from flux_db.check import folders
from flux_db.check.bounds import MOST_STEPS
from flux_db.check.values import check_values
from flux_db.data.dataset import choose_all_sizes, number_of_devices, sizes_of
from flux_db.data.draw_order import DrawOrder
from flux_db.data.pictures import Inspection, find_pictures
from flux_db.data.selection import (
    FILES_NAMED,
    Subject,
    Survey,
    held_out_pictures,
    masks_in_use,
    read_subject,
    trained_pictures,
)
from flux_db.errors import UserError
from flux_db.problem import Problem, under_flag
from flux_db.settings.concepts import Concept, concepts_of, setting_name
from flux_db.settings.derived import class_path, global_batch
from flux_db.settings.preserved import preserved_prompt, subject_word
from flux_db.settings.schema import Config
from flux_db.size import Size

# By repeats. More in an epoch help nobody, and each has its place in memory.
MOST_EXAMPLES = 1_000_000


def check_pictures(config: Config) -> list[Problem]:
    """Problems with the pictures; looked for before any model is loaded."""
    return survey(config).problems


def survey(config: Config) -> Survey:
    data = config.data
    sources = (data.instance_data_dir is not None, data.dataset_name is not None, bool(data.concepts))
    if sum(sources) != 1 or folders.problems(config):
        return Survey(None, [])  # the other checks report it: exactly one is needed, apart from all other folders
    concepts = concepts_of(config)
    # check_files reports the missing ones
    there = [concept for concept in concepts if concept.folder is None or os.path.isdir(concept.folder)]
    subjects, problems = [], []
    for concept in there:
        subject, found = _survey_concept(config, concept)
        subjects += [subject] if subject else []
        problems += found
    if data.with_prior_preservation and there:
        # damaged class pictures are replaced, and missing ones made: only captions could stop the run
        classes = find_pictures(class_path(config), may_be_empty=True)
        strays = folders.strays(config, "class_data_dir", (s.path for s in classes.sources))
        problems += [under_flag(problem, "class_data_dir") for problem in (*classes.problems, *strays)]
    whole = tuple(subjects) if len(subjects) == len(concepts) else None
    if whole and not problems:
        problems += [*_held_out_problems(config, whole), *(p for s in whole for p in _preserve_problems(config, s))]
        if not problems and not check_values(config):
            problems += _length_problems(config, whole)
    return Survey(whole, [under_flag(problem, _source_flag(config)) for problem in problems])


def _source_flag(config: Config) -> str:
    if config.data.concepts:
        return "concepts"
    return "instance_data_dir" if config.data.dataset_name is None else "dataset_name"


def _survey_concept(config: Config, concept: Concept) -> tuple[Subject | None, list[str]]:
    try:
        subject = read_subject(config, concept)
    except UserError as error:
        return None, list(error.problems)
    masks = masks_in_use(config, concept, subject.found.folder, subject.pictures)
    problems: list[str] = [*subject.inspection.problems, *masks.problems]
    if config.data.dataset_name is None:
        problems += folders.strays(config, "instance_data_dir", (s.path for s in subject.found.sources))
    if config.data.concepts:  # problems of masks name the flag of a run with one folder
        problems = [_renamed(problem) for problem in problems]
    return subject, problems


def _renamed(problem: str) -> str:
    if isinstance(problem, Problem) and problem.flag == "mask_dir":
        return Problem(problem.replace("--mask_dir", "--concepts: mask_dir", 1), flag="concepts")
    return problem


def _held_out_problems(config: Config, subjects: Sequence[Subject]) -> list[Problem]:
    """Problems with the pictures of the validation loss."""
    folder, share = config.validation.validation_data_dir, config.validation.validation_share
    if folder is not None:
        # check_files reports a missing folder, and check_values one beside several concepts
        is_usable = os.path.isdir(folder) and len(subjects) == 1
        seen = held_out_pictures(config, subjects[0]) if is_usable else Inspection((), (), ())
        problems = [*seen.problems, *folders.strays(config, "validation_data_dir", (p.path for p in seen.pictures))]
        return [under_flag(problem, "validation_data_dir") for problem in problems]
    for subject in subjects if share > 0 else ():
        count, trained = len(subject.pictures), len(trained_pictures(config, subject))
        if count and trained in (0, count):
            of = f" of the concept {subject.concept.name}" if len(subjects) > 1 else ""
            text = f"holds out all {count} pictures{of}; nothing of it is left to train on"
            if trained:
                text = f"needs at least two different pictures{of}, one to hold out; or use --validation_data_dir"
            text = f"--validation_share {share}: {text}"
            return [Problem(text, flag="validation_share", also=("concepts",))]
    return []


def _preserve_problems(config: Config, subject: Subject) -> list[Problem]:
    """Captions that --preserve_class cannot tell from the class: trained on and held back they would contradict."""
    concept = subject.concept
    if not concept.class_word or subject_word(concept) is None:  # check_values reports the latter
        return []
    trained = trained_pictures(config, subject)
    wrong = [p for p in trained if preserved_prompt(concept.fill_trigger(p.caption or ""), concept) is None]
    if preserved_prompt(concept.prompt, concept) is not None:
        wrong = [p for p in wrong if p.caption]
    if not wrong:
        return []
    shown = ", ".join(str(p.path) for p in wrong[:FILES_NAMED])
    more = f" and {len(wrong) - FILES_NAMED} more" if len(wrong) > FILES_NAMED else ""
    text = (
        f"{setting_name(config, concept, 'class')} {concept.class_word}: the trigger {subject_word(concept)} is not"
        f" in the caption of {shown}{more}; without it the caption is the class's own, which is held to the base model;"
        " add it there"
    )
    return [Problem(text, flag="preserve_class", also=("instance_prompt", "trigger_word", "concepts"))]


def _length_problems(config: Config, subjects: Sequence[Subject]) -> list[Problem]:
    """Problems with the number of examples and steps, which without the pictures cannot be known."""
    optim, sizes = config.optim, choose_all_sizes(config, subjects)
    counts: collections.Counter[Size] = collections.Counter()
    for subject in subjects:
        for picture in trained_pictures(config, subject):
            counts.update(dict.fromkeys(sizes_of(picture.size, subject.concept, sizes), subject.concept.repeats))
    total, pictures = counts.total(), sum(len(trained_pictures(config, subject)) for subject in subjects)
    if total > MOST_EXAMPLES and total > pictures:
        name = "--concepts: repeats and resolutions" if config.data.concepts else f"--repeats {config.data.repeats}"
        return [
            Problem(
                f"{name}: makes {total} examples of the {pictures} pictures; at most {MOST_EXAMPLES} are possible",
                flag="repeats",
                also=("concepts",),
            )
        ]
    if optim.max_train_steps is not None:
        return []
    groups = tuple(tuple(range(count)) for count in counts.values())
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
