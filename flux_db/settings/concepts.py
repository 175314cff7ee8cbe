"""The concepts of a run: subjects and styles, each with all its settings. One folder with flags is a list of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from flux_db.settings.schema import ConceptConfig, Config

_TRIGGER = re.compile(r"\{trigger\}|\[trigger\]", re.IGNORECASE)

# In a prompt for samples, in the place of what the two flags say.
INSTANCE_PROMPT, CLASS_PROMPT = "{instance_prompt}", "{class_prompt}"

# Key of a concept -> the flag that says the same of a run with one folder.
FLAGS = {
    "dir": "instance_data_dir",
    "prompt": "instance_prompt",
    "trigger": "trigger_word",
    "class": "preserve_class",
    "repeats": "repeats",
    "mask_dir": "mask_dir",
    "caption_dropout": "caption_dropout",
}

# Keys that say where files lie; their content is compared by fingerprint.
PLACES = ("dir", "mask_dir")


@dataclass(frozen=True, kw_only=True)
class Concept:
    """A subject or a style."""

    name: str
    """Its folder's, for people; no two concepts have the same."""
    folder: str | None
    """None: the pictures are those of --dataset_name."""
    raw_prompt: str
    """With {trigger} in it."""
    trigger: str | None
    class_word: str | None
    """Held to the base model in the place of the trigger; "" is the empty prompt, None: nothing is held."""
    repeats: int
    weight: float
    """Factor on the loss."""
    mask_dir: str | None
    caption_dropout: float
    resolutions: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return self.fill_trigger(self.raw_prompt)

    def fill_trigger(self, text: str) -> str:
        """A prompt or caption with the trigger in the place of {trigger} or [trigger]."""
        return replace_trigger(text, self.trigger)


def has_trigger(text: str) -> bool:
    return _TRIGGER.search(text) is not None


def replace_trigger(text: str, word: str | None) -> str:
    return text if word is None else _TRIGGER.sub(lambda _: word, text)


def concepts_of(config: Config) -> tuple[Concept, ...]:
    """In the order of the list; with one folder or dataset, the one that the flags describe."""
    data = config.data
    given = data.concepts or (
        ConceptConfig(
            dir=data.instance_data_dir or "",
            prompt=data.instance_prompt or "",
            trigger=data.trigger_word,
            mask_dir=data.mask_dir,
        ),
    )
    names = _names([concept.dir for concept in given])
    return tuple(_resolved(config, concept, name) for concept, name in zip(given, names, strict=True))


def _resolved(config: Config, given: ConceptConfig, name: str) -> Concept:
    data = config.data
    return Concept(
        name=name,
        folder=given.dir or None,
        raw_prompt=given.prompt,
        trigger=given.trigger,
        class_word=data.preserve_class if given.class_word is None else given.class_word,
        repeats=data.repeats if given.repeats is None else given.repeats,
        weight=given.weight,
        mask_dir=given.mask_dir,
        caption_dropout=data.caption_dropout if given.caption_dropout is None else given.caption_dropout,
        resolutions=given.resolutions or (data.resolution,),
    )


def _names(folders: list[str]) -> list[str]:
    """The last part of each path; a number behind it where that is another's too."""
    names: list[str] = []
    for folder in folders:
        own = PurePath(folder).name or "pictures"
        tries = (own if n == 1 else f"{own} {n}" for n in range(1, len(folders) + 1))
        names.append(next(name for name in tries if name not in names))
    return names


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings as two runs are compared by them: a list of one as its flags, and without places of files."""
    concepts = settings.get("concepts")
    if not isinstance(concepts, list) or not all(isinstance(concept, Mapping) for concept in concepts):
        return dict(settings)
    if len(concepts) == 1 and _is_said_by_flags(settings, concepts[0]):
        given = {flag: concepts[0][key] for key, flag in FLAGS.items() if key in concepts[0]}
        return {**settings, **given, "concepts": []}
    bare = [{key: value for key, value in concept.items() if key not in PLACES} for concept in concepts]
    return {**settings, "concepts": bare}


def _is_said_by_flags(settings: Mapping[str, Any], concept: Mapping[str, Any]) -> bool:
    own_sizes = concept.get("resolutions") in (None, [settings.get("resolution")])
    return own_sizes and concept.get("weight", 1.0) == 1


def setting_name(config: Config, concept: Concept, key: str) -> str:
    """What a message calls a setting of a concept: a key of its entry, or the flag that was given in its place."""
    return f"--concepts: {concept.name}: {key}" if config.data.concepts else f"--{FLAGS[key]}"


def setting_flag(config: Config, key: str) -> str:
    """The flag to change for it."""
    return "concepts" if config.data.concepts else FLAGS[key]
