"""The table of MindSpore's releases: it says what the installed one and the project say."""

import re

import program
import pytest
from test_repo import PROJECT, ROOT

from flux_db import releases
from flux_db.check.training_rules import training_problems
from flux_db.settings.schema import from_flat_dict


def test_the_table_has_what_the_installed_wheel_accepts():
    checker = pytest.importorskip("mindspore.run_check._check_version").AscendEnvChecker(None)
    found = {release.version: release.cann for release in releases.RELEASES}
    assert found[releases.installed()] == tuple(checker.version)


def test_the_project_installs_what_was_tried():
    (wanted,) = (line for line in PROJECT["dependencies"] if line.startswith("mindspore"))
    first, last = re.fullmatch(r"mindspore>=([\d.]+),<([\d.]+)", wanted).groups()
    inside = [version for version in releases.TRIED if first <= version or "2.10" in version]
    assert first == releases.TRIED[0] and releases.numbers(last) > releases.numbers(releases.TRIED[-1])
    assert inside == list(releases.TRIED) and releases.numbers(last) == (2, 11)
    first, last = re.fullmatch(r">=([\d.]+),<([\d.]+)", PROJECT["requires-python"]).groups()
    pythons = [release.pythons for release in releases.RELEASES if release.tried]
    assert first == "3.10" and last == "3.13" and max(releases.numbers(p[1]) for p in pythons) == (3, 12)


@pytest.mark.parametrize("page", ["README.md", "docs/devices.md"])
def test_pages_have_the_table(page):
    rows = (ROOT / page).read_text().splitlines()
    for release in releases.RELEASES:
        (row,) = (row for row in rows if row.startswith(f"| {release.version} |"))
        _, _, cann, driver, python, _, tried, _ = (cell.strip() for cell in row.split("|"))
        assert cann == ", ".join(release.cann)
        assert python == f"{max(release.pythons[0], '3.10', key=releases.numbers)} to {release.pythons[1]}"
        assert tried.startswith("yes" if release.tried else "no")
        newest = [releases.DRIVERS[c] for c in release.cann if c in releases.DRIVERS]
        assert driver == (f"{newest[-1]} with CANN {release.cann[-1]}" if release.cann[-1] in releases.DRIVERS else "")


@pytest.mark.parametrize(
    ("version", "warned"), [("2.7.1", False), ("2.10.0", False), ("2.7.2", True), ("2.11.0", True)]
)
def test_a_version_that_was_not_tried_is_a_warning(version, warned):
    assert (releases.warning(version) is not None) == warned


@pytest.mark.parametrize(
    ("cann", "driver", "warned"),
    [
        ("8.3.RC1", "25.3.RC1", False),
        ("8.3.RC1", "25.2.0", True),
        ("8.5.0", "25.5.0", False),
        ("9.0.0", "25.5.0", True),
        ("9.1.0", "25.5.0", False),  # its driver is not known
        (None, "25.5.0", False),
        ("8.5.0", None, False),
    ],
)
def test_a_driver_older_than_cann_wants_is_a_warning(cann, driver, warned):
    assert (releases.driver_warning(cann, driver) is not None) == warned


@pytest.mark.parametrize(
    ("version", "offered"), [("2.7.1", True), ("2.8.0", True), ("2.9.0", False), ("2.10.0", False)]
)
def test_o2_is_offered_where_mindspore_documents_it(monkeypatch, version, offered):
    monkeypatch.setattr(releases, "installed", lambda: version)
    required = {"pretrained_model_name_or_path": "-", "instance_data_dir": "-", "instance_prompt": "sks dog"}
    problems = training_problems(from_flat_dict(required | {"device": "Ascend", "jit_level": "O2"}))
    assert [f"MindSpore {version}" in str(problem) for problem in problems] == ([] if offered else [True])


def test_o2_takes_no_accumulated_gradients(monkeypatch):
    monkeypatch.setattr(releases, "installed", lambda: "2.8.0")
    required = {"pretrained_model_name_or_path": "-", "instance_data_dir": "-", "instance_prompt": "sks dog"}
    changes = {"device": "Ascend", "jit_level": "O2", "gradient_accumulation_steps": 2}
    (problem,) = training_problems(from_flat_dict(required | changes))
    assert "not with --gradient_accumulation_steps 2, whose graph branches; use O1" in problem


# Of mindone, which imports MindSpore's old modules, and of MindSpore, which calls an old name of Python's.
OTHERS = ("Module 'mindspore.common.api' is deprecated", "getName() is deprecated")


def test_a_run_calls_nothing_that_is_deprecated(world, tmp_path):
    """With all warnings shown, of Python and of MindSpore's log."""
    settings = world.settings(tmp_path / "out", max_train_steps=2, validation_prompt="a dog", validation_steps=2)
    settings |= {"validation_inference_steps": 2, "num_validation_images": 1}
    shown = program.environment(GLOG_v="2", PYTHONWARNINGS="always")
    done = program.run(program.trainer(settings), env=shown)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if "deprecat" in line]
    assert lines, "they are not shown"
    assert not [line for line in lines if not any(other in line for other in OTHERS)]
