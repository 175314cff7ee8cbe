"""Warnings about the subject: its word in prompt, captions and sample prompts, and the number of its pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from flux_db.data.dataset import Dataset
from flux_db.errors import UserError
from flux_db.problem import Problem
from flux_db.settings import preserved
from flux_db.settings.concepts import Concept, concepts_of, setting_flag, setting_name
from flux_db.settings.derived import validation_prompts
from flux_db.settings.schema import Config
from flux_db.settings.subject_word import names_subject, rare_word, subject_word

LEAST_PICTURES = 3
# In a message about many.
FILES_NAMED = 3
# After the subject's word, with these the prompt goes on about something else.
GOING_ON = preserved.COMMON | {
    *("in", "on", "at", "by", "near", "under", "over", "beside", "next", "from", "into"),
    *("is", "was", "wearing", "sitting", "standing", "lying"),
}


def subject_warnings(config: Config, dataset: Dataset) -> list[Problem]:
    """What is allowed, but hardly meant."""
    return [
        warning
        for number, concept in enumerate(concepts_of(config))
        for warning in _of_concept(config, dataset, number, concept)
    ] + list(_of_samples(config))


def _word(config: Config, concept: Concept) -> str | None:
    own = subject_word(concept.prompt, concept.trigger, config.data.class_prompt)
    return own or preserved.subject_word(concept)


def _of_concept(config: Config, dataset: Dataset, number: int, concept: Concept) -> Iterator[Problem]:
    word = _word(config, concept)
    if word is None:
        prompt, trigger = (setting_name(config, concept, key) for key in ("prompt", "trigger"))
        text = f'{prompt} "{concept.prompt}": has no rare word, such as sks, so the LoRA changes what these usual words'
        text += f" mean; put one before the class, as in a photo of sks dog, or name the subject's word with {trigger}"
        yield Problem(text, flag=setting_flag(config, "prompt"))
    own = [example for example in dataset.examples if example.concept == number]
    if (count := len({example.picture.digest for example in own})) < LEAST_PICTURES:
        pictures = "1 picture" if count == 1 else f"{count} pictures"
        text = f"{concept.name}: only {pictures} to train on: the LoRA repeats what is around the subject in them; five"
        yield Problem(f"{text} to twenty are a good start", flag=setting_flag(config, "dir"))
    if word is not None:
        examples = [*own, *(example for example in dataset.held_out if example.concept == number)]
        lacking = {e.picture.path: None for e in examples if not names_subject(e.prompt, word)}
        if lacking and names_subject(concept.prompt, word):
            shown = ", ".join(str(path) for path in list(lacking)[:FILES_NAMED])
            more = f" and {len(lacking) - FILES_NAMED} more" if len(lacking) > FILES_NAMED else ""
            text = (
                f"the caption of {shown}{more} lacks {word}, the subject's word: what such a picture shows is learned"
            )
            yield Problem(f"{text} for all prompts; add the word there", flag=setting_flag(config, "prompt"))


def _of_samples(config: Config) -> Iterator[Problem]:
    """Samples of another subject. Prompts of the class, which lack the subject's word, may be among them."""
    prompts: tuple[str, ...] = ()
    with suppress(UserError):  # a file that cannot be read is reported as a problem
        prompts = validation_prompts(config)
    words = {word: concept for concept in concepts_of(config) if (word := _word(config, concept)) is not None}
    if not prompts or not words:
        return
    hint = 'write it with {instance_prompt}, as in "{instance_prompt} in a bucket"'
    if not any(names_subject(prompt, word) for prompt in prompts for word in words):
        text = f"no sample shows the subject: no sample prompt has {' or '.join(words)}; {hint}"
        yield Problem(text, flag="validation_prompt")
        return
    for prompt in prompts:
        named = {word: concept for word, concept in words.items() if names_subject(prompt, word)}
        if not named and (other := rare_word(prompt)):
            text = f"has {other}, but the subject's word is {' or '.join(words)}; {hint}"
            yield Problem(f'sample prompt "{prompt}": {text}', flag="validation_prompt")
        for word, concept in named.items():
            wanted, own = _what_follows(prompt, word), _what_follows(concept.prompt, word)
            if wanted and own and not set(wanted) & set(own):
                text = f"asks for {word} {' '.join(wanted)}, but {word} {' '.join(own)} is trained; {hint}"
                yield Problem(f'sample prompt "{prompt}": {text}', flag="validation_prompt")


def _what_follows(prompt: str, word: str) -> list[str]:
    """The words for the class: those right after the subject's."""
    match = re.search(rf"(?<!\w){re.escape(word)}((?:\s+[\w-]+)*)", prompt, re.IGNORECASE)
    following: list[str] = []
    for text in match[1].lower().split() if match else ():
        if text in GOING_ON:
            break
        following.append(text)
    return following
