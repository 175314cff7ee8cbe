"""A rule that settings may break, and the problem that follows."""

from typing import NamedTuple

from flux_db.problem import Problem


class Rule(NamedTuple):
    """One thing that settings may have wrong."""

    broken: bool
    flag: str
    text: str
    """What follows the flag in the message."""
    also: tuple[str, ...] = ()

    @property
    def problem(self) -> Problem:
        return Problem(f"--{self.flag}{self.text}", flag=self.flag, also=self.also)


def broken(*rules: Rule) -> list[Problem]:
    return [rule.problem for rule in rules if rule.broken]
