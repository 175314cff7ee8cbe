"""From the command line and a YAML file to a Config: defaults < YAML < command line.

All problems are collected and raised as one UserError.
"""

import argparse
import ast
import dataclasses
import functools
import hashlib
import inspect
import math
import os
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from flux_db import plain_yaml
from flux_db.atomic import write_file
from flux_db.errors import UserError, did_you_mean
from flux_db.files import read_file_or_pipe
from flux_db.problem import Problem
from flux_db.settings import concept_list, peer_flags, raw_values
from flux_db.settings.peer_flags import PEER_FLAGS
from flux_db.settings.raw_values import NO_VALUE
from flux_db.settings.schema import SECTIONS, ConceptConfig, Config, from_flat_dict, is_required, to_flat_dict

Check = Callable[[Config], Sequence[Problem]]

# One of these must be given; on the command line it takes the place of the others in the YAML file, and of what
# belongs to them.
SOURCES_OF_PICTURES: dict[str, tuple[str, ...]] = {
    "instance_data_dir": (),
    "dataset_name": (),
    "concepts": ("instance_prompt", "trigger_word", "mask_dir"),
}

CONCEPTS = "concepts"

# Far above any file of settings, and parsed within a few seconds.
CONFIG_LIMIT = 2**20

# Of keys that are no settings so many are named, each with the setting that it may be meant for.
MOST_UNKNOWN = 20

# A flag with a meaning of its own alone, turned off.
OFF = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One setting as the command line and YAML see it."""

    name: str
    section: type
    annotation: Any
    required: bool
    help: str
    aliases: tuple[str, ...]
    basic: bool
    """Whether --help shows it; --help-all shows every flag."""
    near: tuple[str, ...]
    """What people write who mean it."""
    alone: str | None = None
    """What the flag means without a value, if it means something: such a flag can also be turned off, by --no-."""
    unless: str | None = None
    """The setting that takes its place, if it is required only without that."""


@dataclasses.dataclass(frozen=True)
class Given:
    """The settings as they were given. A faulty one is at its default."""

    config: Config
    problems: tuple[Problem, ...]
    """With the command line and the YAML file themselves."""
    faulty: frozenset[str]
    """Settings whose value could not be read."""
    named: frozenset[str] = frozenset()
    """Settings that the command line or the YAML file gives."""
    typed: frozenset[str] = frozenset()
    """Those of the command line."""
    notes: tuple[str, ...] = ()
    """Lines for the user about settings that became others than the YAML file says."""
    has_file: bool = False
    """Whether there is a YAML file."""
    ignored: tuple[str, ...] = ()
    """A line for each flag of another script that changes nothing here."""

    def problems_by(self, *checks: Check) -> list[Problem]:
        """All problems, those that the checks find included."""
        # A faulty setting has its default here: what a check says about that is not the user's doing.
        found = (problem for run in checks for problem in run(self.config))
        return [*self.problems, *(problem for problem in found if not problem.flags & self.faulty)]

    def checked(self, *checks: Check) -> Config:
        """The settings, if the checks find nothing wrong; otherwise all problems together as a UserError."""
        if problems := self.problems_by(*checks):
            raise UserError(problems)
        return self.config


def parse_config(argv: Sequence[str], *, checks: Sequence[Check] = ()) -> Config:
    """The checked settings of a run; `checks` run on them, and their problems are raised together with all others."""
    return read_config(argv).checked(*checks)


def read_config(argv: Sequence[str]) -> Given:
    """Read command line and YAML file, once: the file may be a pipe. Raises if --config cannot be read."""
    given, problems = _read_command_line(argv)
    file = given.pop("config", None)
    try:
        from_file, file_problems = _read_yaml(file) if file is not None else ({}, [])
    except UserError as error:
        # Without the file nothing can be said about what is missing or contradictory.
        raise UserError([*problems, *error.problems]) from None
    problems += file_problems
    for name, others in SOURCES_OF_PICTURES.items():
        if name in given:
            for other in {*SOURCES_OF_PICTURES, *others} - given.keys():
                from_file.pop(other, None)

    values: dict[str, Any] = {}
    faults: list[Problem] = []
    theirs: list[tuple[str, str, Any]] = []
    for source, label in ((from_file, f"{file}: "), (given, "--")):
        for name, raw in source.items():
            if name in PEER_FLAGS:
                theirs.append((name, f"{label}{name}", raw))
                continue
            try:
                if name == CONCEPTS:
                    values[name], texts = concept_list.read(raw)
                    # the other checks look at the entries that are there
                    (problems if values[name] else faults).extend(
                        Problem(f"{label}{name}: {text}", flag=name) for text in texts
                    )
                else:
                    values[name] = _convert(read_flags()[name], raw)
            except ValueError as error:
                faults.append(Problem(f"{label}{name}: {error}", flag=name))
    unread = {fault.flag for fault in faults}
    given_names = {name for name, value in values.items() if value != ()}
    missing = [f for f in read_flags().values() if f.required and not {f.name, f.unless} & given_names]
    faults += [
        Problem(f"--{flag.name} is required: {flag.help}", flag=flag.name)
        for flag in missing
        if not {flag.name, flag.unless} & unread
    ]

    config = from_flat_dict(values | {flag.name: "<missing>" for flag in missing})
    faulty = frozenset(fault.flag for fault in faults)
    judged = [peer_flags.judge(*flag, config) for flag in theirs]
    problems += [line for line in judged if isinstance(line, Problem)]
    problems = [problem if isinstance(problem, Problem) else Problem(problem) for problem in problems]
    ignored = tuple(line for line in judged if not isinstance(line, Problem))
    return Given(
        config,
        (*problems, *faults),
        faulty,
        named=frozenset(values),
        typed=frozenset(values) & given.keys(),
        has_file=file is not None,
        ignored=ignored,
    )


def lasting_flags(argv: Sequence[str], stored: Callable[[], Path]) -> list[str]:
    """The command line for another process. A --config that can be read only once gives way to the file `stored()`."""
    words, kept, files = iter(argv), [], []
    for word in words:
        if word == "--config":
            files.append(next(words))
        elif word.startswith("--config="):
            files.append(word.partition("=")[2])
        else:
            kept.append(word)
    lasts = all(_is_lasting(Path(os.path.expanduser(file))) for file in files)
    return list(argv) if lasts else [*kept, "--config", str(stored())]


def _is_lasting(path: Path) -> bool:
    """Whether the same content can be read from the path later and by other processes."""
    return path.is_file() and path.absolute().parts[1] not in ("dev", "proc")


def store_config(config: Config, folder: Path) -> Path:
    """Write the settings to a file for --config that no other run writes to."""
    text = to_yaml(config).encode()
    path = folder / f"config-{hashlib.sha256(text).hexdigest()[:12]}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def to_yaml(config: Config) -> str:
    """All settings as a file for --config, one block for each section."""
    values = to_flat_dict(config)
    blocks = []
    for section in SECTIONS.values():
        part = {field.name: values[field.name] for field in dataclasses.fields(section)}
        text = yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=math.inf)
        blocks.append(f"# {_title(section)}\n{text}")
    return "\n".join(blocks)


@functools.cache
def read_flags() -> dict[str, Flag]:
    """Every setting by name, read from the dataclasses of schema.py."""
    return {
        field.name: Flag(
            name=field.name,
            section=section,
            annotation=field.type,
            required=is_required(field),
            help=_field_texts(section)[field.name],
            aliases=field.metadata.get("aliases", ()),
            basic=field.metadata.get("basic", False),
            near=tuple(field.metadata.get("near", "").split()),
            alone=field.metadata.get("alone"),
            unless=field.metadata.get("unless"),
        )
        for section in SECTIONS.values()
        for field in dataclasses.fields(section)
    }


@functools.cache
def _field_texts(section: type) -> dict[str, str]:
    """Field name -> the text under it, which Python itself does not keep."""
    (class_node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(class_node, ast.ClassDef)
    return {
        node.target.id: " ".join(text.value.value.split())
        for node, text in zip(class_node.body, class_node.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _title(section: type) -> str:
    return (section.__doc__ or "").splitlines()[0]


class _Formatter(argparse.HelpFormatter):
    """Shows `--rank, --lora_rank N`, where argparse would repeat the N and put it in brackets."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return " ".join(filter(None, [", ".join(action.option_strings), action.metavar]))


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        full = build_parser(whole_help=True)
        full.prog, full.description = parser.prog, parser.description
        full.print_help()
        parser.exit()


def build_parser(
    prog: str = "train_dreambooth_lora_flux.py",
    purpose: str = "Train a DreamBooth LoRA for FLUX.1.",
    *,
    whole_help: bool = False,
) -> argparse.ArgumentParser:
    """A parser that leaves values as text and exits for nothing but --help and --help-all. Other commands take the
    same flags."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE.yaml] [flags]",
        description=f"{purpose} Flags override the YAML file, which overrides the defaults.",
        formatter_class=_Formatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    config_help = "YAML file of settings; its keys are the names of the flags."
    every = f"show all {len(read_flags())} flags and exit"
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help=every)
    parser.add_argument("--config", metavar="FILE.yaml", nargs="?", const=NO_VALUE, help=config_help)
    groups = {section: parser.add_argument_group(_title(section)) for section in SECTIONS.values()}
    for flag in read_flags().values():
        options = [f"--{name}" for name in (flag.name, *flag.aliases)]
        kind = _without_none(flag.annotation)
        text = f"{flag.help}{_default_note(flag)}".replace("%", "%%")
        text = text if whole_help or flag.basic else argparse.SUPPRESS
        group = groups[flag.section]
        if kind is bool:
            group.add_argument(*options, dest=flag.name, action=argparse.BooleanOptionalAction, help=text)
        else:
            action = "append" if get_origin(kind) is tuple and flag.name != CONCEPTS else "store"
            const = NO_VALUE if flag.alone is None else flag.alone
            group.add_argument(
                *options, dest=flag.name, action=action, nargs="?", const=const, metavar=_metavar(kind), help=text
            )
        if flag.alone is not None:
            group.add_argument(
                f"--no-{flag.name}", dest=flag.name, action="store_const", const=OFF, help=argparse.SUPPRESS
            )
    for name in PEER_FLAGS:
        parser.add_argument(f"--{name}", nargs="?", const=NO_VALUE, help=argparse.SUPPRESS)
    return parser


def _default_note(flag: Flag) -> str:
    if flag.required:
        return " (required)"
    default = next(f.default for f in dataclasses.fields(flag.section) if f.name == flag.name)
    if default is None or default == ():
        return ""
    if isinstance(default, tuple):
        default = ",".join(default)
    return f" (default: {('no', 'yes')[default] if isinstance(default, bool) else default})"


def _metavar(kind: Any) -> str:
    if kind == tuple[ConceptConfig, ...]:
        return "FILE.yaml"
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _read_command_line(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Flag name -> raw value of the flags given, and what is wrong with the rest."""
    parser = build_parser()
    try:
        namespace, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        # With values left as text, all that argparse still refuses is a value for a switch: --cache_latents=true.
        switch, _, negated = (error.argument_name or "").partition("/")
        raise UserError(f"{switch} takes no value; write {switch} or {negated}") from None
    problems = []
    words: list[str] = []
    after_unknown = False
    for token in rest:
        if token.startswith("--"):
            option = token.split("=")[0]
            problems.append(f"{option}: {_why_unknown(option, _all_options(), prefix='--')}")
        elif not after_unknown:
            words.append(token)
        after_unknown = token.startswith("--") and "=" not in token
    if words:
        hint = "a value with spaces goes in quotes, and a switch takes no value"
        problems.append(f"words that belong to no flag: {' '.join(words)}; {hint}")
    return {name: value for name, value in vars(namespace).items() if value is not None}, problems


def _all_options() -> list[str]:
    switches = [f"--no-{flag.name}" for flag in read_flags().values() if flag.annotation is bool or flag.alone]
    return ["--config", *switches, *(f"--{name}" for name in _names())]


def _names() -> dict[str, str]:
    """Every name under which a setting is known -> its own name."""
    return {name: flag.name for flag in read_flags().values() for name in (flag.name, *flag.aliases)}


def _why_unknown(name: str, known: Iterable[str], prefix: str = "") -> str:
    near = {f"{prefix}{other}": f"{prefix}{flag.name}" for flag in read_flags().values() for other in flag.near}
    return f"no such setting{did_you_mean(name, known, near)}"


def _read_yaml(file: Any) -> tuple[dict[str, Any], list[str]]:
    """Flag name -> raw value of the keys given, and what is wrong with the rest; a UserError if it cannot be read."""
    if file is NO_VALUE:
        raise UserError("--config needs the path of a YAML file")
    try:
        text = read_file_or_pipe(os.path.expanduser(file), CONFIG_LIMIT).decode("utf-8-sig")
        content = plain_yaml.load(text, plain_yaml.SingleKeys)
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"--config {file}: not valid YAML{line}: {error.problem}") from None
    except OSError as error:
        raise UserError(f"--config {file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {file}: not a text file in UTF-8") from None
    if not isinstance(content, dict | None):
        raise UserError(f"--config {file}: expects lines of the form name: value")
    content = content or {}
    names = _names() | {name: name for name in PEER_FLAGS}
    values: dict[str, Any] = {}
    unknown = [key for key in content if str(key) not in names]
    problems = [
        f"{file}: {raw_values.cut(str(key))}: {_why_unknown(str(key), names)}" for key in unknown[:MOST_UNKNOWN]
    ]
    if len(unknown) > MOST_UNKNOWN:
        problems.append(f"{file}: {len(unknown) - MOST_UNKNOWN} more keys that are no settings")
    for key, raw in content.items():
        name = names.get(str(key))
        if name in values:
            problems.append(f"{file}: {key}: is another name of {name}, which is given as well; keep one")
        elif name is not None and raw is not None:
            values[name] = raw
    return values, problems


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType):
        (annotation,) = (kind for kind in get_args(annotation) if kind is not types.NoneType)
    return annotation


def _convert(flag: Flag, raw: Any) -> Any:
    """A setting's value from the text of a flag or from what YAML made of it; a ValueError says what is expected."""
    kind = _without_none(flag.annotation)
    if get_origin(kind) is tuple:
        return tuple(raw_values.text(raw_values.given(item)) for item in (raw if isinstance(raw, list) else [raw]))
    if flag.alone is not None and isinstance(raw, bool | int):  # YAML: true, false, 12
        raw = str(raw) if not isinstance(raw, bool) else flag.alone if raw else OFF
    if get_origin(kind) is Literal:
        return raw_values.choice(get_args(kind), raw_values.given(raw))
    read = {bool: raw_values.switch, int: raw_values.whole_number, float: raw_values.number, str: raw_values.text}
    return read[kind](raw_values.given(raw))
