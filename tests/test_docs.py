"""README.md and docs/ say what is true: commands parse, and files, flags, links and modules exist."""

import ast
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
from test_repo import ENTRY, MODULES, ROOT, place

from flux_db.check.values import check_values
from flux_db.commands import plan
from flux_db.commands.table import COMMANDS, command_parser
from flux_db.lora import generate_flags
from flux_db.settings.command_line import parse_config, read_flags
from flux_db.settings.peer_flags import PEER_FLAGS

sys.path.insert(0, str(ROOT / "scripts"))
import make_flags_page

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = {path: path.read_text(encoding="utf-8") for path in (README, *DOCS)}
ALL = "\n".join(PAGES.values())
LONGEST_README = 147

# What the flags of a command, or of a script, are read from.
FLAG_SOURCES = (
    *(ROOT / "flux_db" / "commands").glob("*.py"),
    ROOT / "flux_db" / "lora" / "generate_flags.py",
    *(ROOT / "scripts").glob("*.py"),
    *(ROOT / "scripts").glob("*.sh"),
)

Words = tuple[str, ...]


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- Commands ----


def fenced(text: str) -> list[Words]:
    """Every command in a fenced block, with its continuation lines, as words; without variables set before it."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines for command in _commands(line)]


def inline(text: str) -> list[Words]:
    """Every command in the running text and in tables."""
    spans = re.findall(r"(?<!`)`((?:bash|python|flux-db|msrun) [^`]+)`", text)
    return [command for span in spans for command in _commands(span)]


def _commands(line: str) -> list[Words]:
    found, words = [], []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            words.append(word)
        elif words:
            found.append(tuple(words))
            words = []
    return [_without_variables(command) for command in found]


def _without_variables(words: list[str]) -> Words:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return tuple(words)


@cache
def commands(*, in_text: bool) -> list[Words]:
    found = fenced(ALL) + (inline(ALL) if in_text else [])
    return list(dict.fromkeys(found))


def own_command(words: Words) -> Words | None:
    """Name and flags of a command of flux_db; None for any other program."""
    if words[:3] == ("python", "-m", "flux_db"):
        return words[3:]
    return words[1:] if words[0] == "flux-db" else None


def trainer_flags(words: Words) -> list[str] | None:
    """The trainer's flags on a command line; None if it does not train, check or prepare."""
    if ENTRY.name in words:
        return list(words[words.index(ENTRY.name) + 1 :])
    if words[0] == "bash" and re.fullmatch(r"scripts/train_\w+\.sh", words[1]):
        return list(words[2:])
    own = own_command(words)
    if own and own[0] == "launch":
        return list(own[own.index("--") + 1 :])
    if own and own[0] == "plan":
        return plan.build_parser().parse_known_args(own[1:])[1]
    return list(own[1:]) if own and COMMANDS[own[0]].flags is None and own[0] != "generate" else None


def is_help(words: Words) -> bool:
    return "--help" in words


TRAINING = [words for words in commands(in_text=False) if trainer_flags(words) is not None and not is_help(words)]
OTHERS = [words for words in commands(in_text=False) if own_command(words) and words not in TRAINING]


def test_readme_starts_with_demo_and_test():
    assert fenced(PAGES[README])[:2] == [("bash", "scripts/demo.sh"), ("bash", "scripts/test.sh")]


def test_readme_trains_and_checks():
    starts = {words[:4] for words in fenced(PAGES[README])}
    assert any(words[:2] == ("python", ENTRY.name) for words in starts)
    assert any((own_command(words) or ("",))[0] == "check" for words in starts)


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_training_command_parses(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse_config(trainer_flags(words), checks=(check_values,))


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_other_command_parses(words):
    name, *flags = own_command(words)
    parser = generate_flags.build_parser() if name == "generate" else command_parser(name)
    parser.parse_args(flags)


def test_commands_of_the_program_exist():
    named = {own[0] for words in commands(in_text=True) if (own := own_command(words))}
    named -= {"COMMAND", "--help"}
    assert {"check", "generate", "export", "info", "fuse", "push", "report", "selftest"} <= named <= set(COMMANDS)


@pytest.mark.parametrize("words", commands(in_text=True), ids=" ".join)
def test_command_names_files_and_flags_of_scripts_that_exist(words):
    named = [word for word in words if re.fullmatch(r"(scripts|configs|tests)/[\w./-]+|\w+\.py", word)]
    assert not [word for word in named if not (ROOT / word).is_file()]
    script = next((word for word in words if re.fullmatch(r"scripts/\w+\.(py|sh)", word)), None)
    if script is None or script.startswith("scripts/train_"):
        return
    source = (ROOT / script).read_text(encoding="utf-8")
    assert not [word for word in words if word.startswith("--") and word.partition("=")[0] not in source]


def test_tests_chosen_by_name_exist():
    chosen = [words[words.index("-k") + 1] for words in commands(in_text=True) if "-k" in words]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name in chosen if not re.search(rf"def test_\w*{name}", sources)]


# ---- Names ----


def test_named_files_exist():
    named = re.findall(r"`((?:scripts|configs|tests|docs|flux_db)/[\w./-]+)`", ALL)
    assert not {name for name in named if not (ROOT / name).exists()}


def test_readme_names_exactly_the_configs_there_are():
    there = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert set(re.findall(r"configs/\w+\.yaml", PAGES[README])) == there
    assert set(re.findall(r"configs/\w+\.yaml", ALL)) == there


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_flags_exist(path):
    known = {name for flag in read_flags().values() for name in (flag.name, *flag.aliases)} | {*PEER_FLAGS}
    for source in FLAG_SOURCES:
        known |= set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", source.read_text(encoding="utf-8")))
    known |= {"config", "help", "help-all"}
    named = {name.removeprefix("no-") for name in re.findall(r"(?<![\w-])--([a-z][\w-]*\w)(?![\w-])", PAGES[path])}
    assert not named - known


def test_flags_page_is_what_the_settings_say():
    text = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert text == make_flags_page.page(), "run python scripts/make_flags_page.py"


def test_architecture_lists_the_modules_there_are_in_their_order():
    expected = [name.removeprefix("flux_db.").replace(".", "/") + ".py" for name in sorted(MODULES, key=place)]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", PAGES[ROOT / "docs" / "architecture.md"], flags=re.MULTILINE)
    assert [name for name, _ in rows] == expected
    assert len({purpose for _, purpose in rows}) == len(rows)


def test_devices_page_lists_the_differences_between_cpu_and_ascend():
    # from its text: importing it would take MindSpore
    source = (ROOT / "flux_db" / "model" / "device_kernels.py").read_text(encoding="utf-8")
    differences = ast.literal_eval(re.search(r"^DIFFERENCES = ({.*?^})", source, flags=re.MULTILINE | re.DOTALL)[1])
    section = PAGES[ROOT / "docs" / "devices.md"].partition("## The graph of Ascend")[2]
    rows = dict(re.findall(r"^\| ([\w ]+) \| ((?:Ascend|CPU): .+) \|$", section, flags=re.MULTILINE))
    assert rows == differences and len(rows) < 9


# ---- Links ----


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.+?) *$", outside, flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        number = sum(other == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", other) is not None for other in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def links(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", PAGES[path], flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_resolve(path):
    for link in links(path):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_relative_to(ROOT) and target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_readme_links_to_every_page():
    assert {f"docs/{path.name}" for path in DOCS} <= {link.partition("#")[0] for link in links(README)}


# ---- Form ----


def test_readme_is_short():
    assert len(PAGES[README].splitlines()) <= LONGEST_README


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_page_names_no_place_of_a_machine(path):
    assert not re.search(r"(?<![\w.:/~])/(work|home|root|tmp|Users)\b", PAGES[path])


@pytest.mark.parametrize("path", [path for path in PAGES if path.name != "flags.md"], ids=page_name)
def test_a_card_is_a_model_card(path):
    """What computes is a device; the product is called an Ascend card."""
    text = re.sub(r"`[^`]*`", "", PAGES[path])
    assert not re.findall(r".*(?<!model )(?<!Model )(?<!Ascend )\bcards?\b.*", text)
