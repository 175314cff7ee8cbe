"""Problems in the entries of --concepts, and between them and other settings."""

from __future__ import annotations

from collections.abc import Iterator

from flux_db.data import buckets
from flux_db.problem import Problem
from flux_db.settings.concepts import Concept, concepts_of, has_trigger, setting_flag, setting_name
from flux_db.settings.preserved import is_preserved, names_subject, subject_word
from flux_db.settings.schema import ConceptConfig, Config
from flux_db.size import LARGEST_SIDE, PIXELS_PER_TOKEN

# Flags of a run with one folder; each concept has its own.
NOT_BESIDE = {"instance_prompt": "prompt", "trigger_word": "trigger", "mask_dir": "mask_dir"}

MOST_REPEATS, MOST_WEIGHT = 10_000, 1000


def concept_problems(config: Config) -> list[Problem]:
    concepts = concepts_of(config)
    found = list(_preserve_problems(config, concepts))
    if not config.data.concepts:
        return found
    found += [
        Problem(
            f"--{flag} {value}: not together with --concepts, where each entry has its own {key}; leave it out",
            flag=flag,
            also=("concepts",),
        )
        for flag, key in NOT_BESIDE.items()
        if (value := getattr(config.data, flag)) is not None
    ]
    for concept, given in zip(concepts, config.data.concepts, strict=True):
        found += [
            Problem(f"{setting_name(config, concept, key)} {text}", flag="concepts")
            for key, text in _entry_problems(concept, given)
        ]
    return [*found, *_size_problems(config, concepts), *_beside_several(config)]


def _entry_problems(concept: Concept, given: ConceptConfig) -> Iterator[tuple[str, str]]:
    """(key, what is wrong)"""
    texts = {"dir": given.dir, "prompt": given.prompt, "trigger": given.trigger, "mask_dir": given.mask_dir}
    for key, text in texts.items():
        if text is not None and not text.strip():
            yield key, "is empty: give it a value or leave it out"
    if given.repeats is not None and not 1 <= given.repeats <= MOST_REPEATS:
        yield "repeats", f"{given.repeats}: must be from 1 to {MOST_REPEATS}"
    if not 0 < given.weight <= MOST_WEIGHT:
        yield "weight", f"{given.weight:g}: must be above 0, up to {MOST_WEIGHT}"
    if given.caption_dropout is not None and not 0 <= given.caption_dropout <= 1:
        yield "caption_dropout", f"{given.caption_dropout:g}: must be from 0 to 1"
    for place, side in enumerate(given.resolutions):
        if not 0 < side <= LARGEST_SIDE or side % PIXELS_PER_TOKEN:
            yield "resolutions", f"{side}: must be multiples of {PIXELS_PER_TOKEN}, up to {LARGEST_SIDE}"
        elif side in given.resolutions[:place]:
            yield "resolutions", f"{side}: is given twice"
    if concept.trigger is None and has_trigger(given.prompt):
        yield "prompt", f"{given.prompt}: needs the key trigger, which takes the place of {{trigger}}"
    if concept.trigger is not None and has_trigger(concept.trigger):
        yield "trigger", f"{concept.trigger}: must be a word of its own"


def _preserve_problems(config: Config, concepts: tuple[Concept, ...]) -> Iterator[Problem]:
    """Of --preserve_class, or the key class."""
    if not is_preserved(config):
        return
    without = [concept.name for concept in concepts if concept.class_word is None]
    if without:
        text = (
            f"--concepts: class is missing for {', '.join(without)}: if one concept has it, each needs it, because all"
            ' rows of a step are of one graph; class: "" holds the empty prompt'
        )
        yield Problem(text, flag="concepts")
    for concept in concepts:
        if concept.class_word is not None:
            yield from _class_problems(config, concept, concept.class_word)


def _class_problems(config: Config, concept: Concept, name: str) -> Iterator[Problem]:
    own, is_listed = setting_name(config, concept, "class"), bool(config.data.concepts)
    flag, word = setting_flag(config, "class"), subject_word(concept)
    of_subject = ("concepts",) if is_listed else ("instance_prompt", "trigger_word")
    also = (*of_subject, "preserve_class", "concepts")
    if config.data.with_prior_preservation:
        text = f"{own} {name}: --with_prior_preservation keeps the class too, by pictures of it; leave one of them out"
        yield Problem(text, flag=flag, also=("with_prior_preservation", "preserve_class"))
    if name == "" and concept.caption_dropout > 0:
        what = setting_name(config, concept, "caption_dropout")
        held = own if is_listed else f'{own} ""'
        text = f"{what} {concept.caption_dropout:g}: trains the empty prompt, which {held} holds to the base model; "
        dropout = ("caption_dropout", "preserve_class", "concepts")
        yield Problem(f"{text}leave one of them out", flag=setting_flag(config, "caption_dropout"), also=dropout)
    if has_trigger(name):
        yield Problem(f"{own} {name}: names the class, so without {{trigger}}", flag=flag, also=("preserve_class",))
    if name.strip() and word is None:
        prompt, trigger = setting_name(config, concept, "prompt"), "the key trigger" if is_listed else "--trigger_word"
        text = f"{own} {name}: no word for the subject right before {name} in {prompt} {concept.raw_prompt}; give it as"
        yield Problem(f"{text} {trigger}", flag=flag, also=also)
    if name.strip() and word is not None and names_subject(name, concept):
        text = f"{own} {name}: holds the trigger {word}, so it names the subject; give the class alone"
        yield Problem(text, flag=flag, also=also)


def _size_problems(config: Config, concepts: tuple[Concept, ...]) -> Iterator[Problem]:
    text, side = config.data.aspect_ratio_buckets, config.data.resolution
    if text is None or text.strip() == buckets.AUTO:
        return
    for concept in concepts:
        if concept.resolutions != (side,):
            shown = ", ".join(map(str, concept.resolutions))
            yield Problem(
                f"--concepts: {concept.name}: resolutions {shown}: --aspect_ratio_buckets names sizes of --resolution"
                f" {side} only; leave one of them out, or use --aspect_ratio_buckets {buckets.AUTO}",
                flag="concepts",
                also=("aspect_ratio_buckets", "resolution"),
            )


def _beside_several(config: Config) -> Iterator[Problem]:
    """What a run with more than one concept cannot have."""
    if len(config.data.concepts) < 2:
        return
    validation = config.validation
    if validation.validation_data_dir is not None:
        yield Problem(
            f"--validation_data_dir {validation.validation_data_dir}: its pictures belong to none of the several"
            " --concepts; use --validation_share, which holds out some of each",
            flag="validation_data_dir",
            also=("concepts", "validation_share"),
        )
    if validation.score_steps is not None:
        yield Problem(
            f"--score_steps {validation.score_steps}: scores compare samples with the pictures of one subject, and"
            " --concepts has several; leave it out",
            flag="score_steps",
            also=("concepts",),
        )
