"""--preserve_class: the prompts at which the LoRA is held to what the base model answers."""

from __future__ import annotations

import re

from flux_db.settings.derived import instance_prompt
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
    return config.data.preserve_class is not None


def subject_word(config: Config) -> str | None:
    """The trigger: --trigger_word, or else the word before the class in --instance_prompt; None if that is none."""
    data = config.data
    if data.trigger_word is not None:
        return data.trigger_word.strip()
    if not data.preserve_class:
        return None
    found = re.search(rf"([\w-]+)\s+{_whole(data.preserve_class)}", instance_prompt(config), re.IGNORECASE)
    return None if found is None or found[1].lower() in COMMON else found[1]


def preserved_prompt(prompt: str, config: Config) -> str | None:
    """A prompt with the class in the place of the trigger: "a photo of dog" for "a photo of sks dog" or "of sks".

    With --preserve_class "" the empty prompt, whatever the prompt is. None if the trigger is not in it.
    """
    name = config.data.preserve_class
    if not name:
        return name
    trigger = subject_word(config)
    if trigger is None:
        return None
    # a class word right after the trigger is not said twice
    pattern = rf"{_whole(trigger)}(?:\s+{_whole(name)})?"
    text, count = re.subn(pattern, lambda _: name.strip(), prompt, flags=re.IGNORECASE)
    return text if count else None


def names_subject(text: str, config: Config) -> bool:
    """Whether the trigger is a word of the text."""
    trigger = subject_word(config)
    return trigger is not None and re.search(_whole(trigger), text, re.IGNORECASE) is not None


def _whole(words: str) -> str:
    """A pattern of these words, not inside of longer ones."""
    return rf"(?<!\w){re.escape(words.strip())}(?!\w)"
