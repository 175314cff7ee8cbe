"""Every command by its name, and the choice among them."""

from __future__ import annotations

import argparse
import signal
import sys

import flux_db.early_interrupt
import flux_db.missing_package  # noqa: F401  both before the other imports
from flux_db.child import end_with_parent
from flux_db.commands import demo, lora, plan, runs, training
from flux_db.commands.command import Command
from flux_db.console import program_name
from flux_db.errors import CommandParser, UserError, did_you_mean, run_guarded
from flux_db.interrupt import default_signals
from flux_db.settings.command_line import build_parser as build_trainer_parser
from flux_db.settings.secrets import hide_token

COMMANDS: dict[str, Command] = {**training.COMMANDS, **plan.COMMANDS, **lora.COMMANDS, **runs.COMMANDS, **demo.COMMANDS}


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return run_guarded(lambda: _run(words))


def _run(argv: list[str]) -> int | None:
    default_signals()
    if end_with_parent() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # its parent answers the person who pressed Ctrl-C
    name = argv[0] if argv else None
    if not argv:
        build_parser().print_help()
        return 2
    if not name.startswith("-") and name not in COMMANDS:
        raise UserError(f"no such command: {name}{did_you_mean(name, COMMANDS)}; there are {', '.join(COMMANDS)}")
    hide_token()
    if name not in COMMANDS:
        build_parser().parse_args(argv)
        return 0
    command = COMMANDS[name]
    if command.flags is not None:
        return command.run(command_parser(name).parse_args(argv[1:]))
    if command.takes_trainer_flags and (helps := [word for word in argv if word in ("-h", "--help", "--help-all")]):
        build_trainer_parser(f"{program_name()} {name}", command.description).parse_args(helps)
    return command.run(argv[1:])


def build_parser() -> argparse.ArgumentParser:
    """A parser that lists the commands."""
    prog = program_name()
    parser = CommandParser(prog=prog, description=f"{prog} COMMAND --help describes a command.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary)
    return parser


def command_parser(name: str) -> argparse.ArgumentParser:
    """Of a command with flags of its own; some need imports that take a while."""
    command = COMMANDS[name]
    parser = CommandParser(prog=f"{program_name()} {name}", description=command.description)
    command.flags(parser)
    return parser
