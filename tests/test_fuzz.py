"""The fuzzer: a fixed part of its cases holds, and a program that breaks a promise is found out."""

import shutil
import subprocess
import sys
from pathlib import Path

import program
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import fuzz  # noqa: E402  a script finds its parts beside it
from fuzzing.case import Bench, Expect, either, fine, plan, refused  # noqa: E402
from fuzzing.families import FAMILIES, SLOW  # noqa: E402
from fuzzing.runner import Runner, Tree, dice, find_tree  # noqa: E402

# Cases that start processes of their own, or libraries that take long to import.
LONG = ("environment", "hub", "datasets")
PART = 8
SEED = 11


def kinds(verdict):
    return {problem.split(":")[0] for problem in verdict.problems}


# ---- This program ----


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """Two at a time, as the suite itself runs on two cores."""
    runner = Runner(find_tree(ROOT), tmp_path_factory.mktemp("fuzz"), jobs=2)
    yield runner
    runner.close()


def test_there_are_a_thousand_cases_and_none_twice():
    chosen = fuzz.choose([name for name in FAMILIES if name not in SLOW])
    assert len(chosen) >= 1000
    assert len({(family, number) for family, number, _ in chosen}) == len(chosen)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*SLOW, *LONG)])
def test_fixed_part_holds(family, runner):
    verdicts = []
    for verdict in runner.run_all(fuzz.choose([family], PART), SEED):
        verdicts.append(verdict)
        shutil.rmtree(verdict.folder)
    short = [f"case {v.number}, {v.about}: {'; '.join(v.problems)}" for v in verdicts if not v.held]
    assert not short, (
        f"{len(short)} of {len(verdicts)} fell short\n" + "\n".join(short).encode("unicode_escape").decode()
    )


def test_a_fork_and_a_process_of_its_own_end_alike(runner):
    for family, number in (("flags", 0), ("flags", 5), ("yaml", 50), ("loras", 1)):
        case = next(case for case in fuzz.choose([family]) if case[1] == number)
        forked, alone = (runner.run(*case, SEED + 1, way=way) for way in ("fork", "start"))
        assert fuzz.summary(forked) == fuzz.summary(alone)
        assert forked.outcome.stderr == alone.outcome.stderr.replace(b"-start", b"-fork")


def test_the_same_seed_gives_the_same_files(runner, tmp_path):
    def built(name, seed):
        folder = tmp_path / name
        folder.mkdir()
        family, number, plan = fuzz.choose(["yaml"])[-1]  # the last one is random
        plan.build(Bench(folder=folder, rng=dice(seed, family, number), world=runner.world))
        return (folder / "settings.yaml").read_bytes()

    assert built("a", 1) == built("b", 1) != built("c", 2)


# ---- A program that breaks its promises ----

BROKEN = """
import os, subprocess, sys, time
from pathlib import Path

word = sys.argv[1]
if word == "tiny-model":
    Path(sys.argv[2]).mkdir()
elif word == "traceback":
    raise ValueError("out of the blue")
elif word == "hang":
    time.sleep(60)
elif word == "writes":
    Path("elsewhere").write_text("mine")
elif word == "changes":
    Path("input").write_text("mine")
elif word == "removes":
    Path("input").unlink()
elif word == "escape":
    print("\\x1b[31mred")
elif word == "overwrites":
    print("harmless\\rother")
elif word == "flood":
    print("word " * 100_000)
elif word == "memory":
    print(len(b"x" * 400_000_000))
elif word == "leaves":
    subprocess.Popen(["sleep", "60"])
elif word == "secret":
    print("hf_secret")
elif word == "fails":
    sys.exit("error: something")
elif word == "refuses":
    print("error: --flag: no", file=sys.stderr)
    sys.exit(2)
elif word == "mute":
    sys.exit(2)
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    tree = tmp_path_factory.mktemp("broken")
    (tree / "flux_db").mkdir()
    (tree / "flux_db" / "__init__.py").write_text("")
    (tree / "flux_db" / "__main__.py").write_text(BROKEN)
    runner = Runner(Tree(folder=tree, python=sys.executable), tmp_path_factory.mktemp("fuzz"), seconds=3)
    yield runner
    runner.close()


def run(runner, number, word, expect, **more):
    def build(bench):
        bench.write("input", "yours")
        return bench.run(expect, word).but(**more)

    return runner.run("broken", number, plan(word, build), SEED)


@pytest.mark.parametrize(
    ("word", "expect", "kind"),
    [
        ("traceback", fine(), "traceback"),
        ("traceback", Expect(codes=(1,)), "traceback"),
        ("hang", refused(), "hang"),
        ("writes", fine(), "files"),
        ("changes", fine(), "files"),
        ("removes", fine(), "files"),
        ("escape", fine(), "unprintable"),
        ("overwrites", fine(), "unprintable"),
        ("flood", fine(), "flood"),
        ("memory", fine(), "memory"),
        ("leaves", fine(), "left behind"),
        ("secret", fine(), "told"),
        ("fails", refused(), "exit code"),
        ("fails", either(), "exit code"),
        ("refuses", fine(), "exit code"),
        ("refuses", refused("--other"), "not named"),
        ("mute", refused(), "silent"),
        ("nothing", refused("--flag"), "silent"),
        ("nothing", fine(lambda folder, stdout: "not right"), "wrong result"),
    ],
)
def test_a_broken_promise_is_found(broken, request, word, expect, kind):
    number = request.node.callspec.indices["word"]
    verdict = run(broken, number, word, expect, memory_mb=300, hidden=("hf_secret",))
    assert kinds(verdict) == {kind} or (word == "traceback" and kind in kinds(verdict)), verdict.problems


def test_a_kept_promise_holds(broken):
    assert run(broken, 100, "refuses", refused("--flag")).held
    assert run(broken, 101, "nothing", fine()).held
    assert run(broken, 102, "writes", fine(), writes=("elsewhere",)).held
    assert run(broken, 103, "fails", Expect(codes=(1,))).held


# ---- The command line ----


def test_one_case_is_shown_with_its_output(tmp_path):
    words = [sys.executable, str(ROOT / "scripts" / "fuzz.py"), "--family", "flags", "--case", "0"]
    done = subprocess.run(
        [*words, "--json", str(tmp_path / "a.json")],
        capture_output=True,
        text=True,
        check=False,
        env=program.environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run can start" in done.stdout and done.stdout.endswith("1 cases, 1 held\n")
    assert '"held": true' in (tmp_path / "a.json").read_text()


def test_a_case_that_falls_short_ends_with_1_and_the_command_to_repeat_it(broken):
    words = [sys.executable, str(ROOT / "scripts" / "fuzz.py"), "--tree", str(broken.tree.folder), "--seed", "4"]
    done = subprocess.run(
        [*words, "--family", "flags", "--case", "0"],
        capture_output=True,
        text=True,
        check=False,
        env=program.environment(),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "--seed 4 --family flags --case 0" in done.stdout and done.stdout.endswith("1 cases, 0 held\n")
