"""What the base model is called and how it is licensed, without a path of this machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from flux_db.files import read_text

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_FLUX = "https://huggingface.co/black-forest-labs"
DEV, SCHNELL = "black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"

_LONGEST_NAME = 200

_CARD_LIMIT = 2**20

# `name: text` in the YAML of a model card. Not read as YAML, because its aliases may expand to any number of values
# and some thousand brackets take minutes.
_FIELD = re.compile(r"""^(\w+): +(["']?)([^\s"'#&*!|>%@`\[\]{}][^"'\n]{0,199}?)\2(?:\s+#.*|\s*)$""", re.MULTILINE)


class Licence(NamedTuple):
    """The fields of a model card; name and link belong to the identifier `other`."""

    license: str
    license_name: str | None = None
    license_link: str | None = None


LICENCES = {
    DEV: Licence("other", "flux-1-dev-non-commercial-license", f"{_FLUX}/FLUX.1-dev/blob/main/LICENSE.md"),
    SCHNELL: Licence("apache-2.0"),
}


def base_model_name(name_or_path: str) -> str:
    """The model's name on the hub where it can be known, otherwise the name of its folder; never a path."""
    if not os.path.isdir(name_or_path) and HUB_NAME.fullmatch(name_or_path):
        return name_or_path
    folder = Path(name_or_path).absolute()
    if match := re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", f"{folder.as_posix()}/"):
        return f"{match[1]}/{match[2]}"  # the hub's own download folder
    for known in LICENCES:
        if folder.name.lower() == known.split("/")[1].lower():
            return known
    name = _stated_name(folder)
    return name if name and HUB_NAME.fullmatch(name) and not os.path.exists(name) else folder.name


def is_hub_name(name: str) -> bool:
    return HUB_NAME.fullmatch(name) is not None


def licence(name_or_path: str) -> Licence:
    """The base model's licence: of FLUX.1 itself, or as the model's own card says; otherwise `other`."""
    name = base_model_name(name_or_path)
    if name in LICENCES:
        return LICENCES[name]
    fields = _card_fields(Path(name_or_path, "README.md"))
    return Licence(*(fields.get(name) for name in Licence._fields)) if "license" in fields else Licence("other")


def _card_fields(card: Path) -> dict[str, str]:
    """The plain texts at the head of a model card; empty if there is none that can be read."""
    try:
        text = read_text(card, _CARD_LIMIT)
    except (OSError, ValueError):
        return {}
    head, *rest = text.removeprefix("---").split("\n---", maxsplit=1)
    return {match[1]: match[3] for match in _FIELD.finditer(head)} if rest and text.startswith("---") else {}


def _stated_name(folder: Path) -> str | None:
    try:
        name = json.loads(read_text(folder / "model_index.json")).get("_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return name if isinstance(name, str) and len(name) <= _LONGEST_NAME else None
