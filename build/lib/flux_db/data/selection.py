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
from flux_db.settings.derived import cache_path, has_trigger
from flux_db.settings.schema import Config

# In a message about many.
FILES_NAMED = 20


def pictures_seen(config: Config) -> FileMemo:
    """What is known of pictures that have not changed."""
    return open_memo(cache_path(config) / PICTURES_SEEN)


def inspect_subject(config: Config, found: Found) -> Inspection:
    return inspect_pictures(found, _warn_below(config), pictures_seen(config))


def _warn_below(config: Config) -> int:
    """The short side below which a picture is scaled up; with buckets it depends on the shape, and is found later."""
    return 0 if config.data.aspect_ratio_buckets else config.data.resolution


def masks_in_use(config: Config, folder: Path, pictures: Sequence[Picture]) -> Masks:
    data = config.data
    if data.unmasked_weight == 1:
        return Masks({}, (), ())
    return find_masks(pictures, folder, Path(data.mask_dir) if data.mask_dir else None, data.alpha_mask)


def find_subject(config: Config) -> Found:
    """The pictures of the subject and their captions; those of a dataset are written to a folder first."""
    data = config.data
    found = find_pictures(Path(data.instance_data_dir) if data.dataset_name is None else hf_dataset.export(config))
    return _with_trigger_checked(config, found)


def _with_trigger_checked(config: Config, found: Found) -> Found:
    without_word = [s.path for s in found.sources if config.data.trigger_word is None and _has_trigger(s)]
    if without_word:
        shown = ", ".join(str(path) for path in without_word[:FILES_NAMED])
        more = f" and {len(without_word) - FILES_NAMED} more" if len(without_word) > FILES_NAMED else ""
        text = f"--trigger_word is missing: {{trigger}} is in the captions of {shown}{more}"
        problem = Problem(text, flag="trigger_word")
        found = replace(found, problems=(*found.problems, problem))
    return found


def _has_trigger(source: Source) -> bool:
    return source.caption is not None and has_trigger(source.caption)


def trained_pictures(config: Config, subject: Inspection) -> list[Picture]:
    """The pictures of the subject that are not held out."""
    return [p for p in subject.pictures if held_out_place(p) >= config.validation.validation_share]


def held_out_place(picture: Picture) -> float:
    """From 0 to 1, by the picture's content alone; below --validation_share the picture is held out."""
    return int(hashlib.sha256(f"held out {picture.digest}".encode()).hexdigest()[:12], 16) / 16**12


def held_out_pictures(config: Config, subject: Inspection) -> Inspection:
    """The pictures of the validation loss."""
    folder = config.validation.validation_data_dir
    if folder is not None:
        found = _with_trigger_checked(config, find_pictures(Path(folder)))
        return inspect_pictures(found, config.data.resolution, pictures_seen(config))
    share = config.validation.validation_share
    return Inspection(tuple(p for p in subject.pictures if held_out_place(p) < share), (), ())


def sound_class_pictures(config: Config) -> list[Picture]:
    """The class pictures that can be opened."""
    found = find_pictures(Path(config.data.class_data_dir), may_be_empty=True)
    return list(inspect_pictures(found, config.data.resolution, pictures_seen(config)).pictures)


def lacks_class_images(config: Config) -> bool:
    """Whether class pictures must be drawn before training."""
    return config.data.with_prior_preservation and len(sound_class_pictures(config)) < config.data.num_class_images


class Survey(NamedTuple):
    """The pictures of the subject, where they could be looked for, and the problems with all pictures."""

    found: Found | None
    subject: Inspection | None
    problems: list[Problem]
