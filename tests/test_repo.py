"""The repository as a whole: the direction of imports, the dependencies, and a README that tells the truth."""

import ast
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from flux_db.__main__ import COMMANDS
from flux_db.check.values import check
from flux_db.settings.command_line import parse_config, read_flags

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it along on 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "train_dreambooth_lora_flux.py"
SOURCES = {path.stem: path for path in sorted((ROOT / "flux_db").glob("*.py"))} | {ENTRY.stem: ENTRY}
README = (ROOT / "README.md").read_text(encoding="utf-8")

# From the ground up. A file imports only from rows above its own.
ROWS = """
__init__
console files plain_yaml streams plain_json
errors atomic stream buckets flow cpu_ops likeness lora_names base_model expected_weights charts html_page line_file
config captions order lock interrupt changes run_state checkpoint sample_files tiny_model worker_logs weight_file
metrics_file hub_token child lora_settings part_weights folders
model_files images hf_dataset runtime optim trackers sheet demo_pictures golden lora_file
preflight masks saved_state
cli dataset contact_sheet models lora sharding train_step report export lora_convert hub
plan encode sample build launch lora_info card fuse run_files thumbnails
check batches validate validation_loss state prior html_report selftest generate_flags
earlier
resume
prepare trainer generate html_compare
pipeline lora_commands
__main__
train_dreambooth_lora_flux
"""
ROW = {name: number for number, row in enumerate(ROWS.strip().splitlines()) for name in row.split()}

# What the import name does not say.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}


@cache
def imports(name: str, *, at_start_only: bool = False) -> frozenset[str]:
    """Dotted names of the modules that a source imports; those inside functions as well, unless told otherwise."""
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    if at_start_only:
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function in functions:
            function.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{SOURCES[name].name}: imports are written in full: from flux_db.x import y"
            assert node.module is not None
            found.add(node.module)
            if node.module == "flux_db":
                found |= {f"flux_db.{alias.name}" for alias in node.names if alias.name in SOURCES}
    return frozenset(found)


def own_imports(name: str, *, at_start_only: bool = False) -> set[str]:
    dotted = imports(name, at_start_only=at_start_only)
    return {module.removeprefix("flux_db.") for module in dotted if module.startswith("flux_db.")}


def foreign_packages(name: str) -> set[str]:
    return {module.split(".")[0] for module in imports(name)} - set(sys.stdlib_module_names) - {"flux_db"}


# ---- Imports ----


def test_every_source_has_a_row():
    assert sorted(ROWS.split()) == sorted(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_imports_come_from_rows_above(name):
    wrong = sorted(other for other in own_imports(name) if ROW[other] >= ROW[name])
    assert not wrong, f"{name}.py must not import {wrong}"


@pytest.mark.parametrize("name", SOURCES)
def test_neither_torch_nor_pickle(name):
    modules = {module.split(".")[0] for module in imports(name)}
    assert not modules & {"torch", "diffusers", "peft", "pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}


def test_settings_are_checked_before_mindspore_is_imported():
    """A mistake in the settings is told within a second; MindSpore alone takes several to import."""
    reached, waiting = set(), {ENTRY.stem, "dataset", "check"}  # the script imports these two first of all, inside main
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= own_imports(name, at_start_only=True) - reached
    assert {"cli", "config", "preflight", "images"} <= reached
    slow = ("mindspore", "mindone", "transformers")
    wrong = {(name, m) for name in reached for m in imports(name, at_start_only=True) if m.startswith(slow)}
    assert not wrong


# ---- Tests ----


STARTS = re.compile(r"subprocess\.(run|Popen|call|check_\w+|get\w*output)|os\.(system|popen|spawn\w+)")
TESTS = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "program.py"]


@pytest.mark.parametrize("path", [*TESTS, ROOT / "scripts" / "crash_test.py"], ids=lambda path: path.name)
def test_what_a_test_starts_does_not_inherit_the_tests_environment(path):
    """MindSpore changes it. Tests start the program through program.py, or name the environment themselves."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "subprocess"]
    starts = [node for node in nodes if isinstance(node, ast.Call) and STARTS.fullmatch(ast.unparse(node.func))]
    assert not [ast.unparse(call) for call in starts if "env" not in {keyword.arg for keyword in call.keywords}]


# ---- pyproject.toml ----


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared() -> set[str]:
    return {re.match(r"[\w.-]+", line)[0].lower() for line in PROJECT["dependencies"]}


def optional() -> set[str]:
    """Packages that an extra of the same name brings."""
    return set(PROJECT["optional-dependencies"]) - {"test", "interop"}


def test_everything_imported_is_declared():
    used = {DISTRIBUTIONS.get(package, package).lower() for name in SOURCES for package in foreign_packages(name)}
    assert not used - declared() - optional()


def test_optional_packages_are_imported_only_when_they_are_asked_for():
    early = {module.split(".")[0] for name in SOURCES for module in imports(name, at_start_only=True)}
    assert not early & optional()


def test_nothing_is_declared_in_vain():
    used = {DISTRIBUTIONS.get(package, package).lower() for name in SOURCES for package in foreign_packages(name)}
    assert not declared() - used


# ---- README.md ----


def commands() -> list[list[str]]:
    """Every command line in a fenced block, with its continuation lines, as words."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


TRAINING = [words for words in commands() if ENTRY.name in words]


def test_readme_starts_with_demo_and_test():
    assert commands()[:2] == [["bash", "scripts/demo.sh"], ["bash", "scripts/test.sh"]]


def test_readme_has_training_commands():
    assert any(words[:2] == ["python", ENTRY.name] for words in TRAINING)


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_readme_command_parses(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse_config(words[words.index(ENTRY.name) + 1 :], checks=(check,))


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_readme_command_names_files_that_exist(words):
    named = [word for word in words if re.fullmatch(r"(scripts|configs|tests)/[\w./-]+|\w+\.py", word)]
    assert not [word for word in named if not (ROOT / word).is_file()]


def test_readme_names_commands_that_exist():
    named = {words[3] for words in commands() if words[:3] == ["python", "-m", "flux_db"]}
    assert {"generate", "export", "info", "fuse", "push"} <= named <= set(COMMANDS)


def test_readme_names_exactly_the_configs_there_are():
    named = set(re.findall(r"configs/\w+\.yaml", README))
    assert named == {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}


def test_readme_flags_exist():
    known = {name for flag in read_flags().values() for name in (flag.name, *flag.aliases)} | {"config", "help"}
    elsewhere = {"size", "seed", "big-t5", "interop", "kills", "sizes"}  # flux_db's commands and scripts
    elsewhere |= {"hub_token"}  # taken from the command line before it is parsed
    elsewhere |= {"model", "lora", "prompt", "num", "format", "scale"}  # generate, export, fuse
    elsewhere |= {"worker_num", "local_worker_num", "master_port", "log_dir", "join"}  # msrun
    named = {name.removeprefix("no-") for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", README)}
    assert not named - known - elsewhere


def test_readme_file_tree_is_complete_and_in_order():
    (tree,) = re.findall(r"^flux_db/\n((?:  \S+\.py .*\n)+)", README, flags=re.MULTILINE)
    listed = re.findall(r"^  (\S+)\.py ", tree, flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "flux_db").glob("*.py"))
    assert listed == sorted(listed, key=ROW.get), "the tree is in the order of the rows"
