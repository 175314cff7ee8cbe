"""Every command by its name, and the choice among them."""

from __future__ import annotations

import argparse
import signal
import sys

import flux_db.early_interrupt  # noqa: F401  before the other imports
from flux_db.child import end_with_parent
from flux_db.commands import demo, lora, plan, runs, training
from flux_db.commands.command import Command
from flux_db.console import program_name
from flux_db.errors import UserError, did_you_mean, run_guarded
from flux_db.interrupt import default_signals
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
        build_parser(None).print_help()
        return 2
    if not name.startswith("-") and name not in COMMANDS:
        raise UserError(f"no such command: {name}{did_you_mean(name, COMMANDS)}; there are {', '.join(COMMANDS)}")
    hide_token()
    if name in COMMANDS and COMMANDS[name].flags is None:
        return COMMANDS[name].run(argv[1:])
    arguments = build_parser(name).parse_args(argv)
    return COMMANDS[arguments.command].run(arguments)


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """A parser of all commands, with the flags of the chosen one: some need imports that take a while."""
    prog = program_name()
    parser = argparse.ArgumentParser(prog=prog, description=f"{prog} COMMAND --help describes a command.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.summary, description=command.description, usage=command.usage)
        if name == chosen and command.flags:
            command.flags(one)
    return parser
