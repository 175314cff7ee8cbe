"""Which pictures are used for what: trained on, of the class, held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flux_db.data import hf_dataset
from flux_db.data.masks import Masks, find_masks
from flux_db.data.pictures import Found, Inspection, Picture, Source, find_pictures, inspect_pictures
from flux_db.file_memo import FileMemo, open_memo
from flux_db.output_folder import PICTURES_SEEN
from flux_db.problem import Problem
from flux_db.settings.concepts import Concept, concepts_of, has_trigger
from flux_db.settings.derived import cache_path, class_path
from flux_db.settings.schema import Config

# In a message about many.
FILES_NAMED = 20


def pictures_seen(config: Config) -> FileMemo:
    """What is known of pictures that have not changed."""
    return open_memo(cache_path(config) / PICTURES_SEEN)


class Subject(NamedTuple):
    """A concept's pictures, found and inspected."""

    concept: Concept
    found: Found
    inspection: Inspection

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return self.inspection.pictures


def read_subjects(config: Config) -> tuple[Subject, ...]:
    """The pictures of every concept, in order."""
    return tuple(read_subject(config, concept) for concept in concepts_of(config))


def read_subject(config: Config, concept: Concept) -> Subject:
    found = find_subject(config, concept)
    return Subject(concept, found, inspect_pictures(found, _warn_below(config, concept), pictures_seen(config)))


def _warn_below(config: Config, concept: Concept) -> int:
    """The short side below which a picture is scaled up; with several sizes it depends on them, and is found later."""
    several = config.data.aspect_ratio_buckets or len(concept.resolutions) > 1
    return 0 if several else concept.resolutions[0]


def masks_in_use(config: Config, concept: Concept, folder: Path, pictures: Sequence[Picture]) -> Masks:
    data = config.data
    if data.unmasked_weight == 1:
        return Masks({}, (), ())
    # of several concepts only one may have alpha channels
    alpha_may_lack = data.alpha_mask and len(data.concepts) > 1
    mask_dir = Path(concept.mask_dir) if concept.mask_dir else None
    return find_masks(pictures, folder, mask_dir, data.alpha_mask, alpha_may_lack=alpha_may_lack)


def find_subject(config: Config, concept: Concept) -> Found:
    """The pictures of a concept and their captions; those of a dataset are written to a folder first."""
    found = find_pictures(Path(concept.folder) if config.data.dataset_name is None else hf_dataset.export(config))
    return _with_trigger_checked(config, concept, found)


def _with_trigger_checked(config: Config, concept: Concept, found: Found) -> Found:
    without_word = [s.path for s in found.sources if concept.trigger is None and _has_trigger(s)]
    if without_word:
        shown = ", ".join(str(path) for path in without_word[:FILES_NAMED])
        more = f" and {len(without_word) - FILES_NAMED} more" if len(without_word) > FILES_NAMED else ""
        name = f"--concepts: {concept.name}: trigger" if config.data.concepts else "--trigger_word"
        text = f"{name} is missing: {{trigger}} is in the captions of {shown}{more}"
        problem = Problem(text, flag="concepts" if config.data.concepts else "trigger_word")
        found = replace(found, problems=(*found.problems, problem))
    return found


def _has_trigger(source: Source) -> bool:
    return source.caption is not None and has_trigger(source.caption)


def trained_pictures(config: Config, subject: Subject) -> list[Picture]:
    """The pictures of a concept that are not held out."""
    held_out = _held_out(config, subject)
    return [p for p in subject.pictures if p.digest not in held_out]


def _held_out(config: Config, subject: Subject) -> set[str]:
    """Of --validation_share, by their content: a new picture moves no other, unless one is all that is held out."""
    share, places = config.validation.validation_share, {p.digest: held_out_place(p) for p in subject.pictures}
    chosen = {digest for digest, place in places.items() if place < share}
    if share > 0 and not chosen and len(places) > 1:
        return {min(places, key=lambda digest: places[digest])}
    return chosen


def held_out_place(picture: Picture) -> float:
    """From 0 to 1, by the picture's content alone; below --validation_share the picture is held out."""
    return int(hashlib.sha256(f"held out {picture.digest}".encode()).hexdigest()[:12], 16) / 16**12


def held_out_pictures(config: Config, subject: Subject) -> Inspection:
    """The concept's pictures of the validation loss. --validation_data_dir is for runs with one concept."""
    folder = config.validation.validation_data_dir
    if folder is not None:
        found = _with_trigger_checked(config, subject.concept, find_pictures(Path(folder)))
        return inspect_pictures(found, config.data.resolution, pictures_seen(config))
    held_out = _held_out(config, subject)
    return Inspection(tuple(p for p in subject.pictures if p.digest in held_out), (), ())


def sound_class_pictures(config: Config) -> list[Picture]:
    """The class pictures that can be opened."""
    found = find_pictures(class_path(config), may_be_empty=True)
    return list(inspect_pictures(found, config.data.resolution, pictures_seen(config)).pictures)


def lacks_class_images(config: Config) -> bool:
    """Whether class pictures must be drawn before training."""
    return config.data.with_prior_preservation and len(sound_class_pictures(config)) < config.data.num_class_images


class Survey(NamedTuple):
    """The pictures of the concepts, where all could be looked for, and the problems with all pictures."""

    subjects: tuple[Subject, ...] | None
    problems: list[Problem]
