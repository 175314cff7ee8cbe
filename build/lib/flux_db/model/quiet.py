"""Remarks of mindone and transformers, kept off the terminal; warnings are printed as one line each."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from flux_db.console import say
from flux_db.model import lazy_mindone

# mindone is imported only inside `quiet`, so this comes first
lazy_mindone.install()

# loading.py compares the weights itself and refuses what is wrong: mindone's report does not know T5's tied embedding.
_JUDGED = re.compile(r"Some weights of .* were not (initialized from|used when)", re.DOTALL)
# Remarks for the authors of the code.
_ABOUT_CODE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, SyntaxWarning, ResourceWarning)


class quiet:
    """Keep mindone's and transformers' remarks on import and loading off the terminal.

    Errors still raise, and warnings are printed at the end, because they may be about the result.
    """

    def __enter__(self) -> None:
        sys.stdout.flush()  # what was printed before is not a remark
        self._stdout = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        self._filters = warnings.catch_warnings(record=True)
        self._warnings = self._filters.__enter__()
        warnings.simplefilter("always")
        self._records: list[logging.LogRecord] = []
        self._make_record = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._keep_record)

    def __exit__(self, *_: object) -> None:
        logging.setLogRecordFactory(self._make_record)
        self._filters.__exit__(None, None, None)
        sys.stdout.flush()
        os.dup2(self._stdout, 1)
        os.close(self._stdout)
        for text in dict.fromkeys(self._remarks()):
            say(f"warning: {text}")

    def _keep_record(self, *args: Any, **options: Any) -> logging.LogRecord:
        record = self._make_record(*args, **options)
        if record.levelno < logging.ERROR:
            if record.levelno >= logging.WARNING:
                self._records.append(record)
            record.levelno = -1  # below the level of every handler
        return record

    def _remarks(self) -> Iterator[str]:
        texts = [(record.name, record.getMessage()) for record in self._records]
        texts += [
            (warning.category.__name__, str(warning.message))
            for warning in self._warnings
            if not issubclass(warning.category, _ABOUT_CODE)
        ]
        for source, text in texts:
            if not _JUDGED.match(text):
                yield f"{source}: {' '.join(text.split())[:500]}"
