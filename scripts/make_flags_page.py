#!/usr/bin/env python
"""Write docs/flags.md from the settings: every flag with its value, default and help.

    python scripts/make_flags_page.py            # writes docs/flags.md
    python scripts/make_flags_page.py --stdout   # prints it instead

The same settings give the same bytes. A test compares the page with what this script writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flux_db.settings.command_line import Flag, read_flags  # noqa: E402  a script finds its package beside it
from flux_db.settings.peer_flags import PEER_FLAGS  # noqa: E402
from flux_db.settings.schema import SECTIONS, ConceptConfig  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"

INTRODUCTION = """\
# Flags

<!-- Written by scripts/make_flags_page.py. Edit flux_db/settings/schema.py instead, then run the script again. -->

All flags of `train_dreambooth_lora_flux.py`. `python -m flux_db check`, `prepare`, `encode` and `class-images` take the
same ones. The names are those of diffusers' and mindone's scripts where these have one.

- `--config FILE.yaml` reads settings from a file. Its keys are the names of the flags, without the dashes. Flags
  override the file, and the file overrides the defaults. `--help` shows the flags that most runs set, `--help-all` all.
- N is a whole number, X a number. A switch takes no value; `--no-` before its name turns it off. In a YAML file a
  switch is `true` or `false`.
- A flag marked *repeatable* may be given several times. In a YAML file it takes a list.
- `--hub_token` is also accepted. It is not a setting: the program removes it from its command line and never stores it.
"""

PEERS_INTRODUCTION = """\
## Flags of other scripts

diffusers' and mindone's scripts have these flags, which are no settings here. A value that changes nothing is ignored
with a line that says so; any other is rejected with the reason.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_section(section) for section in SECTIONS.values()), _peers()])


def _section(section: type) -> str:
    flags = [flag for flag in read_flags().values() if flag.section is section]
    rows = [f"| {_names(flag)} | {_value(flag)} | {_default(flag)} | {_prose(flag.help)} |" for flag in flags]
    head = ["| Flag | Value | Default | Meaning |", "|---|---|---|---|"]
    title = (section.__doc__ or "").splitlines()[0]
    return "\n".join([f"## {title}", "", *head, *rows, ""])


def _peers() -> str:
    flags = {name: flag for name, flag in PEER_FLAGS.items() if name != "hub_token"}
    cells = [(flag.when, flag.reason, "" if flag.when == "always" else flag.instead) for flag in flags.values()]
    rows = [f"| `--{name}` | {' | '.join(map(_prose, row))} |" for name, row in zip(flags, cells, strict=True)]
    head = ["| Flag | Ignored | Reason | Otherwise |", "|---|---|---|---|"]
    return "\n".join([PEERS_INTRODUCTION, *head, *rows, ""])


def _names(flag: Flag) -> str:
    return ", ".join(f"`--{name}`" for name in (flag.name, *flag.aliases))


def _value(flag: Flag) -> str:
    alone = f"; alone: `{flag.alone}`" if flag.alone is not None else ""
    return _kind(_without_none(flag.annotation)) + alone


def _kind(kind: Any) -> str:
    if kind == tuple[ConceptConfig, ...]:
        return "file; in YAML also a list"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "text, repeatable"
    return {bool: "switch", int: "N", float: "X", str: "text"}[kind]


def _default(flag: Flag) -> str:
    if flag.required:
        return "required"
    default = next(field.default for field in dataclasses.fields(flag.section) if field.name == flag.name)
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        default = ",".join(default)
    return "" if default is None or default == "" else f"`{default}`"


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType):
        (annotation,) = (kind for kind in get_args(annotation) if kind is not types.NoneType)
    return annotation


def _prose(text: str) -> str:
    """A help text as a cell of a table, flags in it as code."""
    return re.sub(r"--[a-z][a-z_-]*\w", r"`\g<0>`", text.replace("|", r"\|"))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdout", action="store_true", help="print the page instead of writing it")
    if parser.parse_args(argv).stdout:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), encoding="utf-8")
        print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
