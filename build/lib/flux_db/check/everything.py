"""All checks of a run together: every problem at once, and the pictures that were looked at on the way."""

from __future__ import annotations

from flux_db.check.files import check_files
from flux_db.check.memory import memory_problems
from flux_db.check.pictures import survey
from flux_db.check.values import check_values
from flux_db.data.selection import Survey
from flux_db.errors import UserError
from flux_db.problem import Problem
from flux_db.settings.command_line import Check, Given
from flux_db.settings.schema import Config


def check_everything(given: Given, *more: Check) -> tuple[Config, Survey]:
    """The settings and the pictures, if nothing is wrong with them; otherwise all problems as one UserError."""
    problems, seen = find_problems(given, *more)
    if problems:
        raise UserError(problems)
    return given.config, seen


def find_problems(given: Given, *more: Check) -> tuple[list[Problem], Survey]:
    seen = survey(given.config)
    return given.problems_by(check_values, check_files, memory_problems, lambda _: seen.problems, *more), seen
