"""--preserve_class: the prompts at which the LoRA is held to what the base model answers."""

from __future__ import annotations

import re

from flux_db.settings.concepts import Concept, concepts_of
from flux_db.settings.schema import Config

# Before the class in a prompt, these are no name of the subject.
COMMON = frozenset(
    [
        "a",
        "an",
        "the",
        "of",
        "my",
        "our",
        "your",
        "his",
        "her",
        "their",
        "its",
        "this",
        "that",
        "one",
        "some",
        "any",
        "every",
        "each",
        "and",
        "with",
    ]
)


def is_preserved(config: Config) -> bool:
    """Whether a class is held to the base model; then each concept has one."""
    return any(concept.class_word is not None for concept in concepts_of(config))


def subject_word(concept: Concept) -> str | None:
    """The trigger, if it is given, or else the word before the class in the prompt; None if that is none."""
    if concept.trigger is not None:
        return concept.trigger.strip()
    if not concept.class_word:
        return None
    found = re.search(rf"([\w-]+)\s+{_whole(concept.class_word)}", concept.prompt, re.IGNORECASE)
    return None if found is None or found[1].lower() in COMMON else found[1]


def preserved_prompt(prompt: str, concept: Concept) -> str | None:
    """A prompt with the class in the place of the trigger: "a photo of dog" for "a photo of sks dog" or "of sks".

    With the class "" the empty prompt, whatever the prompt is. None if the trigger is not in it.
    """
    name = concept.class_word
    if not name:
        return name
    trigger = subject_word(concept)
    if trigger is None:
        return None
    # a class word right after the trigger is not said twice
    pattern = rf"{_whole(trigger)}(?:\s+{_whole(name)})?"
    text, count = re.subn(pattern, lambda _: name.strip(), prompt, flags=re.IGNORECASE)
    return text if count else None


def names_subject(text: str, concept: Concept) -> bool:
    """Whether the trigger is a word of the text."""
    trigger = subject_word(concept)
    return trigger is not None and re.search(_whole(trigger), text, re.IGNORECASE) is not None


def _whole(words: str) -> str:
    """A pattern of these words, not inside of longer ones."""
    return rf"(?<!\w){re.escape(words.strip())}(?!\w)"
