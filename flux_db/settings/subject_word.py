"""The rare word that names a subject in prompts, such as sks in "a photo of sks dog": found, and taken out."""

from __future__ import annotations

import re

from flux_db.settings.concepts import concepts_of
from flux_db.settings.schema import Config

# Words that people use for it and that the rules below would miss.
USUAL = frozenset({"sks", "ohwx", "zwx", "tok", "olis", "ukj"})

_ARTICLES = frozenset({"a", "an", "the"})


def subject_word(prompt: str, trigger_word: str | None = None, class_prompt: str | None = None) -> str | None:
    """The subject's word; None if it cannot be distinguished from the others.

    It is the rare word of --trigger_word, or all of that; otherwise the one word of the instance prompt that the class
    prompt lacks; otherwise its rare word.
    """
    if trigger_word:
        return rare_word(trigger_word) or trigger_word.strip()
    own = [word for word in _words(prompt) if word.lower() not in _ARTICLES]
    if class_prompt:
        of_class = {word.lower() for word in _words(class_prompt)}
        different = [word for word in own if word.lower() not in of_class]
        if len(different) == 1:
            return different[0]
    return rare_word(prompt)


def word_of(config: Config) -> str | None:
    """The subject's word in the settings of a run; of several concepts, the first one's."""
    concept = concepts_of(config)[0]
    return subject_word(concept.prompt, concept.trigger, config.data.class_prompt)


def names_subject(prompt: str, word: str) -> bool:
    return _pattern(word).search(prompt) is not None


def without_subject(prompt: str, word: str) -> str:
    """The prompt without the word, which a network that has not been trained on the subject does not know."""
    return " ".join(_pattern(word).sub(" ", prompt).split())


def _words(text: str) -> list[str]:
    return re.findall(r"[^\s,.;:!?\"']+", text)


def rare_word(text: str) -> str | None:
    """The first word that is none of a language."""
    return next((word for word in _words(text) if _israre_word(word)), None)


def _israre_word(word: str) -> bool:
    """A usual one, or no word of a language: with a digit or brackets, or of three and more letters without a vowel."""
    plain = word.lower()
    if plain in USUAL or re.search(r"[\d<>\[\]{}]", plain):
        return True
    return re.fullmatch(r"[b-df-hj-np-tv-xz]{3,}", plain) is not None


def _pattern(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
