"""`plan`: whether a run fits, before there is a card, a model or a download."""

from __future__ import annotations

import argparse
import json

from flux_db.commands.command import Command, whole_number
from flux_db.console import printable, program_name
from flux_db.errors import CommandParser, UserError


def plan(argv: list[str]) -> int:
    """Compute whether a run fits into a card; takes the trainer's flags, of which none is needed.

    Needs no card, no weights and no download: the config.json of the model's parts are enough, and for a model that is
    not here FLUX.1-dev's sizes are built in. Prints what each stage of the run takes, the flags that would make it fit
    in the order of their price, and what loading, disk and compiling take. The exit code is 0 if it fits, otherwise
    1."""
    own, flags = build_parser().parse_known_args(argv)
    from flux_db.check import device_memory, plan_text
    from flux_db.check.values import check_values
    from flux_db.settings.command_line import SOURCES_OF_PICTURES, read_config, read_flags

    given = read_config(flags)
    required = {*SOURCES_OF_PICTURES, *(name for name, flag in read_flags().items() if flag.required)}
    if problems := [problem for problem in given.problems_by(check_values) if problem.flag not in required]:
        raise UserError(problems)
    try:
        model = device_memory.read_model(given.config)
    except (ValueError, KeyError) as problem:
        name = given.config.model.pretrained_model_name_or_path
        raise UserError(f"--pretrained_model_name_or_path {name}: {problem}") from problem
    if own.json:
        print(json.dumps(plan_text.as_json(given.config, model, own.cards, own.card), indent=2))
    else:
        print(*map(printable, plan_text.lines(given.config, model, own.cards, own.card)), sep="\n")
    return 0 if device_memory.budget(given.config, model, own.cards).fits(own.card) else 1


def build_parser() -> argparse.ArgumentParser:
    """Of its own flags; the others are the trainer's."""
    parser = CommandParser(
        prog=f"{program_name()} plan",
        description=plan.__doc__,
        usage="%(prog)s [--card 64|32] [--cards N] [--json] [FLAGS OF THE TRAINER]",
        allow_abbrev=False,
    )
    parser.add_argument("--card", type=whole_number(1024), default=64, help="GB of each card (default: 64)")
    parser.add_argument("--cards", "--devices", type=whole_number(4096), default=1, help="how many (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables; sizes are in bytes")
    return parser


COMMANDS = {"plan": Command(plan)}
