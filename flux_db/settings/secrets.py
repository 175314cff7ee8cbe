"""The hub's token on the command line, taken away from there: all users of a machine may read a process's words."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flux_db.errors import UserError
from flux_db.interrupt import start_anew

FLAG = "--hub_token"
VARIABLE = "HF_TOKEN"
LOGIN = f"log in with hf auth login, or set {VARIABLE}"


def hide_token() -> None:
    """If this process was started with a token among its words, start it anew with the token in its environment."""
    words, token = without_token(sys.orig_argv)
    if token is None:
        return
    os.environ[VARIABLE] = token
    start_anew(words)


def without_token(words: Sequence[str]) -> tuple[list[str], str | None]:
    """(the words without the flag and its value, the token or None)"""
    kept: list[str] = []
    token = None
    rest = iter(words)
    for word in rest:
        if word == FLAG:
            token = next(rest, "")
        elif word.startswith(f"{FLAG}="):
            token = word.partition("=")[2]
        else:
            kept.append(word)
            continue
        if not token or token.startswith("-"):
            raise UserError(f"{FLAG} needs a token; better still, {LOGIN}")
    return kept, token
