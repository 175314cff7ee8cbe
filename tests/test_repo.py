"""The repository as a whole: the direction of imports, the tests, the dependencies."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it along on 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "train_dreambooth_lora_flux.py"
PACKAGE = ROOT / "flux_db"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))} | {ENTRY.stem: ENTRY}

# From the ground up. A module imports only from packages above its own, and in its own only from modules before it.
PACKAGES = {
    "": "early_interrupt missing_package garbage releases size step_inputs problem terminal console progress files"
    " output_folder"
    " plain_json plain_yaml png_text stream streams errors atomic file_memo interrupt line_file child weight_file",
    "settings": "schema raw_values concept_list concepts layer_patterns lora_layers prompt_lines derived subject_word"
    " preserved secrets peer_flags command_line resume_rules",
    "model": "flux_dev expected_weights int8 part_weights model_folder parts folder_copy quantize picture_processor"
    " vae_tiles scoring_folder identity device late_scipy lazy_mindone quiet repeated_calls fingerprint compile_hook"
    " compile_watch compile_cache cpu_conv formulations int8_linear cpu_layers device_kernels dinov2 operators runtime"
    " empty_network gathered_linear sharding filling loading flow optim dropout preservation adapter text_encoder"
    " sampler",
    "data": "captions near_duplicates pixels pictures masks buckets hf_dataset selection draw_order dataset timesteps"
    " encode_cache encode blank_cache batches",
    "check": "folders concepts rule bounds picture_rules training_rules validation_rules values peer_notes model device"
    " device_memory disk remedies memory hub_model compile_time plan_text files pictures everything plan contact_sheet"
    " subject dry_run",
    "lora": "layer_names peft_settings lora_file trained_file convert describe drawn_with merge resize init_lora"
    " generate_flags generate",
    "run": "lock status checkpoint saved_state sample_files metrics_file trackers metrics_log record",
    "report": "charts page usage memory_chart thumbnails run_page comparison_page sample_sheet model_card hub",
    "demo": "brush creatures things places world judge tiny_model pictures",
    "score": "samples measures prompts judged encoders embedded scorer runs",
    "training": "warm_start build class_pictures earlier resume scoring prepare snapshot failure checkpoints"
    " text_vectors sample_rounds validation_loss early_stop validation compiling loop run patient_msrun worker_logs"
    " launch",
    "graph": "ir ascend_graph",
    "parity": "golden compare",
    "doctor": "result table machine operators step links examination simulated_step simulation",
    "commands": "command training plan lora runs demo table",
}
# In the root of the package, but above most of it: the heart, whose path is public, and the way in.
PLACES = {"flux_db.train_step": "model.train_step", "flux_db.__main__": "commands.__main__"}

# Imported within a second, to find mistakes before MindSpore is loaded.
LIGHT = ("settings", "data", "check", "run", "report")
SLOW = ("mindspore", "mindone", "transformers", "torch")

# What the import name does not say.
DISTRIBUTIONS = {"PIL": "pillow", "pillow_heif": "pillow-heif", "yaml": "pyyaml"}


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
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in SOURCES else node.module for full in names}
    return frozenset(found)


def own_imports(name: str, *, at_start_only: bool = False) -> set[str]:
    return {module for module in imports(name, at_start_only=at_start_only) if module in SOURCES} - {"flux_db"}


def foreign_packages(name: str) -> set[str]:
    return {module.split(".")[0] for module in imports(name)} - set(sys.stdlib_module_names) - {"flux_db"}


def place(name: str) -> tuple[int, int]:
    """Number of its package, and of itself in that."""
    package, _, stem = PLACES.get(name, name).removeprefix("flux_db.").rpartition(".")
    modules = [
        *PACKAGES[package].split(),
        *(other.split(".")[-1] for other in PLACES.values() if other.split(".")[0] == package),
    ]
    return list(PACKAGES).index(package), modules.index(stem)


# ---- Imports ----


MODULES = sorted(name for name, path in SOURCES.items() if path.name != "__init__.py" and path != ENTRY)


def test_every_source_is_in_its_package():
    listed = {
        f"flux_db.{package}.{name}".replace("..", ".") for package in PACKAGES for name in PACKAGES[package].split()
    }
    assert sorted(listed | set(PLACES)) == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_upwards(name):
    wrong = sorted(other for other in own_imports(name) if place(other) >= place(name))
    assert not wrong, f"{name} must not import {wrong}"


def test_every_package_says_its_purpose_in_one_line_and_does_nothing_else():
    for name, path in SOURCES.items():
        if path.name == "__init__.py" and name != "flux_db":
            assert re.fullmatch(r'"""[^\n]+"""\n', path.read_text(encoding="utf-8")), name


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[1] in LIGHT])
def test_light_packages_import_no_mindspore_at_the_start(name):
    """A mistake in the settings is reported within a second; MindSpore alone takes several to import."""
    reached, waiting = set(), {name}
    while waiting:
        reached.add(one := waiting.pop())
        waiting |= own_imports(one, at_start_only=True) - reached
    assert not {(one, m) for one in reached for m in imports(one, at_start_only=True) if m.split(".")[0] in SLOW}


def test_the_script_checks_the_settings_before_mindspore_is_imported():
    assert not {m for m in imports(ENTRY.stem, at_start_only=True) if m.split(".")[0] in SLOW}
    assert {"flux_db.settings.command_line", "flux_db.check.everything"} <= own_imports(ENTRY.stem)


@pytest.mark.parametrize("name", SOURCES)
def test_neither_torch_nor_pickle(name):
    modules = {module.split(".")[0] for module in imports(name)}
    assert not modules & {"torch", "diffusers", "peft", "pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}


# ---- Tests ----


# Of no single package: the program as a whole, the repository, and what tests share.
WHOLE = "test_docs test_endings test_full_disk test_fuzz test_repo test_signals"
SHARED = "conftest fake_hub picture_files program scoring_models step_formula world"


def test_tests_mirror_the_packages():
    """tests/data tests flux_db/data and so on; modules in the root of flux_db are tested in the root of tests."""
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")} - {"interop"}
    assert folders == set(PACKAGES) - {""}
    root = {path.stem for path in (ROOT / "tests").glob("*.py")} - {*WHOLE.split(), *SHARED.split()}
    ground_floor = {f"test_{name}" for name in (*PACKAGES[""].split(), "train_step")}
    assert root <= ground_floor


def test_test_files_import_from_shared_files_only_and_have_names_of_their_own():
    for path in (ROOT / "tests").rglob("test_*.py"):
        found = re.findall(r"^(?:from|import) (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert not set(found) - {"test_repo"}, path
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_the_longest_test_files_exist():
    names = re.search(r'LONGEST = """(.*?)"""', (ROOT / "tests" / "conftest.py").read_text(), flags=re.DOTALL)[1]
    assert not [name for name in names.split() if not (ROOT / "tests" / f"{name}.py").is_file()]


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
    return set(map(distribution, PROJECT["dependencies"]))


def optional() -> set[str]:
    """Packages that an extra brings to users."""
    extras = PROJECT["optional-dependencies"]
    return {distribution(line) for name, lines in extras.items() if name not in ("test", "interop") for line in lines}


def distribution(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower()


def test_everything_imported_is_declared():
    used = {DISTRIBUTIONS.get(package, package).lower() for name in SOURCES for package in foreign_packages(name)}
    assert not used - declared() - optional()


def test_optional_packages_are_imported_only_when_they_are_asked_for():
    early = {module.split(".")[0] for name in SOURCES for module in imports(name, at_start_only=True)}
    assert not early & optional()


def test_nothing_is_declared_in_vain():
    used = {DISTRIBUTIONS.get(package, package).lower() for name in SOURCES for package in foreign_packages(name)}
    assert not declared() - used


def test_every_file_beside_the_sources_is_installed():
    """`pip install .` copies only what pyproject.toml lists; scripts/check_install.sh tries it."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = tomllib.loads(text)["tool"]["setuptools"]["package-data"]
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    installed = {
        path
        for package, patterns in listed.items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    assert others and others <= installed, sorted(others - installed)
