"""What a prompt asks for, in terms of the drawn world."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flux_db.demo.world import COLLARS, COLOURS, KINDS, NAMES, OPENINGS, POSES, WHERE, WORN


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The answers that the judge should give; a question that the prompt leaves open is not in `answers`."""

    answers: dict[str, str]
    unknown: frozenset[str]
    """Words that no caption of the world has, such as the word for a subject."""


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def _known_words() -> frozenset[str]:
    phrases = [*OPENINGS, *WORN, *(phrase for phrases in WHERE.values() for phrase in phrases)]
    poses = {pose for poses in POSES.values() for pose in poses}
    words_of_phrases = {word for phrase in phrases for word in words(phrase)}
    return frozenset(words_of_phrases | {"a", "an", *KINDS, *COLOURS, *NAMES, *poses})


KNOWN = _known_words()


def wanted(prompt: str) -> Wanted:
    """Read a prompt. A colour before the kind is the thing's, one before "collar" is the collar's."""
    found = words(prompt)
    text = " ".join(found)
    answers: dict[str, str] = {}
    for before, word in zip(["", *found], [*found, ""], strict=True):
        if word in KINDS:
            answers["kind"] = word
            if before in COLOURS:
                answers["colour"] = before
        if word == "collar" and before in COLLARS:
            answers["collar"] = before
    for place, phrases in WHERE.items():
        if any(f" {phrase} " in f" {text} " for phrase in phrases):
            answers["place"] = place
    return Wanted(answers=answers, unknown=frozenset(found) - KNOWN)
