#!/usr/bin/env python
"""Give the program what hostile or careless people would, and see that it keeps its promises.

    python scripts/fuzz.py                                  # everything but what needs MindSpore: some minutes
    python scripts/fuzz.py --family weights --case 17       # one case, with its output
    python scripts/fuzz.py --tree ../other --json old.json  # another checkout, with its own .venv

A case holds if the program ends in time and by the right exit code, without a traceback, names the flag or file that
it refuses, prints nothing that could drive a terminal, changes no file but its own, and, where the input is sound, does
what it was asked for. The same seed gives the same cases.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from fuzzing.case import Plan
from fuzzing.families import FAMILIES, SLOW
from fuzzing.runner import HANG_SECONDS, Runner, Verdict, find_tree
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent

Chosen = list[tuple[str, int, Plan]]


def choose(families: Sequence[str], part: int = 1) -> Chosen:
    """The cases of the families, in order; of `part` cases in a row only the first."""
    return [(family, n, plan) for family in families for n, plan in enumerate(FAMILIES[family]()) if n % part == 0]


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    families = arguments.family or [name for name in FAMILIES if arguments.slow or name not in SLOW]
    chosen = choose(families, arguments.part)
    if arguments.case is not None:
        chosen = [case for case in chosen if case[1] == arguments.case]
    if not chosen:
        print("error: there is no such case", file=sys.stderr)
        return 2
    with work_folder(arguments.keep) as work:
        runner = Runner(
            find_tree(arguments.tree),
            work,
            jobs=min(arguments.jobs, len(chosen)),
            seconds=arguments.seconds,
            with_mindspore=any(plan.way == "mindspore" for *_, plan in chosen),
        )
        with closing(runner):
            verdicts = run(runner, chosen, arguments)
            unlike = compare(runner, chosen, verdicts, arguments)
    if arguments.case is not None:
        show(verdicts[0])
    report(verdicts, unlike, arguments)
    return 1 if unlike or not all(verdict.held for verdict in verdicts) else 0


@contextmanager
def work_folder(keep: bool) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        yield work
    finally:
        if keep:
            print(f"kept: {work}")
        else:
            shutil.rmtree(work)


def run(runner: Runner, chosen: Chosen, arguments: argparse.Namespace) -> list[Verdict]:
    verdicts = []
    with tqdm(total=len(chosen), desc="cases", unit="case", dynamic_ncols=True) as bar:
        for verdict in runner.run_all(chosen, arguments.seed):
            verdicts.append(verdict)
            bar.set_postfix(fell_short=sum(not v.held for v in verdicts), refresh=False)
            bar.update()
            if not arguments.keep:
                shutil.rmtree(verdict.folder)
    return verdicts


def compare(runner: Runner, chosen: Chosen, verdicts: Sequence[Verdict], arguments: argparse.Namespace) -> list[str]:
    """Start some of the forked cases as processes of their own; a line for each whose verdict is another then."""
    pairs = [(case, verdict) for case, verdict in zip(chosen, verdicts, strict=True) if case[2].way == "fork"]
    some = pairs[:: max(1, len(pairs) // arguments.starts)] if arguments.starts else []
    unlike = []
    for case, forked in tqdm(some, desc="processes of their own", unit="case", disable=not some):
        alone = runner.run(*case, arguments.seed, way="start")
        if summary(forked) != summary(alone):
            unlike.append(
                f"{forked.family} {forked.number}: {summary(forked)} when forked, {summary(alone)} when started"
            )
        if not arguments.keep:
            shutil.rmtree(alone.folder)
    return unlike


def summary(verdict: Verdict) -> str:
    kinds = sorted({problem.split(":")[0] for problem in verdict.problems})
    return f"exit code {verdict.outcome.code}, {', '.join(kinds) or 'held'}"


# --- what is printed -----------------------------------------------------------------------------------------------


def show(verdict: Verdict) -> None:
    """One case, with all that the program printed."""
    print(f"{verdict.family} {verdict.number}: {verdict.about}\n$ {verdict.command}")
    for name in ("stdout", "stderr"):
        text = getattr(verdict.outcome, name).decode("utf-8", "backslashreplace")
        shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
        print(f"--- {name}\n{shown}")
    print(f"--- exit code {verdict.outcome.code}, {verdict.outcome.seconds:.2f} s, {verdict.outcome.memory_mb:.0f} MB")


def report(verdicts: Sequence[Verdict], unlike: Sequence[str], arguments: argparse.Namespace) -> None:
    short = [verdict for verdict in verdicts if not verdict.held]
    for verdict in short:
        print(f"\n{verdict.family} {verdict.number}: {verdict.about}")
        print("\n".join(f"  {problem}" for problem in verdict.problems))
        print(f"  python scripts/fuzz.py --seed {arguments.seed} --family {verdict.family} --case {verdict.number}")
    for line in unlike:
        print(f"\nnot the same: {line}")
    print(f"\n{'family':14} {'cases':>6} {'held':>6}")
    for family in dict.fromkeys(verdict.family for verdict in verdicts):
        of_family = [verdict for verdict in verdicts if verdict.family == family]
        print(f"{family:14} {len(of_family):6} {sum(verdict.held for verdict in of_family):6}")
    print(f"\n{len(verdicts)} cases, {len(verdicts) - len(short)} held")
    if arguments.json:
        arguments.json.write_text(json.dumps([_as_json(verdict) for verdict in verdicts], indent=1) + "\n")


def _as_json(verdict: Verdict) -> dict[str, object]:
    return {
        "family": verdict.family,
        "case": verdict.number,
        "about": ascii(verdict.about)[1:-1],
        "held": verdict.held,
        "problems": [ascii(problem)[1:-1] for problem in verdict.problems],
        "code": verdict.outcome.code,
        "seconds": round(verdict.outcome.seconds, 3),
        "memory_mb": round(verdict.outcome.memory_mb),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the random cases (default: 0)")
    add("--family", action="append", choices=list(FAMILIES), help="only this one; may be repeated")
    add("--case", type=int, help="only the case of this number, and show its output")
    add("--part", type=int, default=1, metavar="N", help="only every Nth case")
    add("--slow", action="store_true", help="also the families that need MindSpore")
    add("--starts", type=int, default=0, metavar="N", help="run N of the cases again as processes of their own")
    add("--tree", type=Path, default=ROOT, help="the checkout to try (default: this one)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time (default: one for each core)")
    add("--seconds", type=float, default=HANG_SECONDS, help=f"longer is a hang (default: {HANG_SECONDS:g})")
    add("--keep", action="store_true", help="keep the folders of the cases")
    add("--json", type=Path, metavar="FILE", help="write the verdicts as JSON, too")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
