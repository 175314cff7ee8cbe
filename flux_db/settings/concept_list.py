"""The list of --concepts, read from its file or from the file of --config; every problem in it is collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from flux_db import plain_yaml
from flux_db.errors import did_you_mean
from flux_db.files import read_text
from flux_db.settings import raw_values
from flux_db.settings.schema import CONCEPT_KEYS, ConceptConfig

# Far above any use.
MOST = 1000

# In the place of what is missing, so that the other checks go on.
MISSING = "<missing>"


def _sides(raw: Any) -> tuple[int, ...]:
    sides = tuple(map(raw_values.whole_number, raw if isinstance(raw, list) else [raw]))
    if not sides:
        raise ValueError("expects a list of sides in pixels, such as [512, 768]")
    return sides


READERS: Mapping[str, Callable[[Any], Any]] = {
    "dir": raw_values.text,
    "prompt": raw_values.text,
    "trigger": raw_values.text,
    "class": raw_values.text,
    "repeats": raw_values.whole_number,
    "weight": raw_values.number,
    "mask_dir": raw_values.text,
    "caption_dropout": raw_values.number,
    "resolutions": _sides,
}


def read(raw: Any) -> tuple[tuple[ConceptConfig, ...], list[str]]:
    """The concepts, with faulty keys at their defaults, and what is wrong. A ValueError if it is no list at all.

    An entry without a folder is left out. [] is what the file of a run without concepts has.
    """
    if raw == []:
        return (), []
    file = raw_values.text(raw_values.given(raw)) if not isinstance(raw, list) else None
    entries = raw if file is None else _read_file(file)
    if not isinstance(entries, list) or not entries:
        what = "" if file is None else f"{file}: "
        raise ValueError(f"{what}expects a list with an entry for each concept, each with dir and prompt")
    if len(entries) > MOST:
        raise ValueError(f"{len(entries)} entries; at most {MOST} are possible")
    concepts, problems = [], []
    for number, entry in enumerate(entries, start=1):
        concept, found = _read_entry(entry)
        concepts += [concept] if concept.dir != MISSING else []
        problems += [f"entry {number}: {text}" for text in found]
    return tuple(concepts), problems


def _read_file(file: str) -> Any:
    """The list in a file of its own: alone, or under the key concepts, as in the file of --config."""
    try:
        content = plain_yaml.load(read_text(file), plain_yaml.SingleKeys)
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{file}: not valid YAML{line}: {error.problem}") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file}: not a text file in UTF-8") from None
    return content["concepts"] if isinstance(content, dict) and list(content) == ["concepts"] else content


def _read_entry(entry: Any) -> tuple[ConceptConfig, list[str]]:
    empty = ConceptConfig(dir=MISSING, prompt=MISSING)
    if not isinstance(entry, dict):
        return empty, [f"expects lines of the form key: value, not {raw_values.cut(repr(entry))}"]
    values: dict[str, Any] = {}
    problems = []
    for key, raw in entry.items():
        if key not in READERS:
            problems.append(f"{raw_values.cut(str(key))}: no such key{did_you_mean(str(key), READERS)}")
        elif raw is not None:
            try:
                values[CONCEPT_KEYS[key].name] = READERS[key](raw)
            except ValueError as error:
                problems.append(f"{key}: {error}")
    problems += [f"{key} is missing" for key in ("dir", "prompt") if entry.get(key) is None]
    return dataclasses.replace(empty, **values), problems
