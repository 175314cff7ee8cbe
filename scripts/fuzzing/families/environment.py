"""What surrounds the program: locale, HOME, TMPDIR, closed and full outputs, limits. Always real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from fuzzing import lora_files, tensors
from fuzzing.case import Bench, Case, Expect, Plan, fine, plan
from fuzzing.families.pictures import saved
from fuzzing.families.runs import write_run
from fuzzing.looks import can_start, page_is_harmless
from fuzzing.world import picture

LOCALES: dict[str, tuple[Mapping[str, str | None], str]] = {
    "C": ({"LANG": "C"}, "utf-8"),
    "POSIX": ({"LC_ALL": "POSIX"}, "utf-8"),
    "none at all": ({"LANG": None}, "utf-8"),
    "one that is not there": ({"LANG": "xx_YY.UTF-8"}, "utf-8"),
    "C, really": ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, "ascii"),
    "ASCII": ({"PYTHONIOENCODING": "ascii"}, "ascii"),
    "strict ASCII": ({"PYTHONIOENCODING": "ascii:strict"}, "ascii"),
    "GBK": ({"PYTHONIOENCODING": "gbk"}, "gbk"),
    "strict GBK": ({"PYTHONIOENCODING": "gbk:strict"}, "gbk"),
    "Shift JIS": ({"PYTHONIOENCODING": "shift_jis"}, "shift_jis"),
    "Latin-1": ({"PYTHONIOENCODING": "latin-1"}, "latin-1"),
}

PLACES: dict[str, Mapping[str, str | None]] = {
    "no HOME": {"HOME": None},
    "a HOME that is not there": {"HOME": "/no/such/home"},
    "a HOME that is a file": {"HOME": "/etc/passwd"},
    "an empty HOME": {"HOME": ""},
    "a TMPDIR that is not there": {"TMPDIR": "/no/such/tmp"},
    "a TMPDIR that is a file": {"TMPDIR": "/etc/passwd"},
    "no PATH": {"PATH": None},
    "a COLUMNS that is no number": {"COLUMNS": "wide"},
    "COLUMNS of 0": {"COLUMNS": "0", "LINES": "0"},
    "a TERM of nobody": {"TERM": "nobody"},
    "threads that are no number": {"OMP_NUM_THREADS": "many", "OPENBLAS_NUM_THREADS": "many"},
}

# What msrun sets for its workers; by hand it may be anything.
CARDS: dict[str, Mapping[str, str | None]] = {
    "cards that are no number": {"MS_WORKER_NUM": "many"},
    "no devices": {"MS_WORKER_NUM": "0"},
    "cards below 0": {"MS_WORKER_NUM": "-1"},
    "an empty number of devices": {"MS_WORKER_NUM": ""},
}

# It works, or it says in a line why not.
CLEAR = Expect(codes=(0, 1, 2))
# However it ends, it ends in words: what could be said was said, or there was nobody to hear it.
ANY = Expect(codes=(0, 1, 2, 141))


def plans() -> Iterator[Plan]:
    for about, (variables, encoding) in LOCALES.items():
        for name, build in COMMANDS.items():
            yield plan(f"{name} in the locale {about}", around, build, variables, encoding, way="start")
    for about, variables in PLACES.items():
        for name in ("check", "info"):
            yield plan(f"{name} with {about}", around, COMMANDS[name], variables, "utf-8", way="start")
    for about, variables in CARDS.items():
        yield plan(f"check with {about}", devices, variables, way="start")
    for stream in ("closed", "broken pipe", "full disk"):
        for name, build in COMMANDS.items():
            yield plan(f"{name}, stdout {stream}", output, build, {"stdout": stream}, way="start")
        yield plan(f"check, stderr {stream}", output, COMMANDS["check"], {"stderr": stream}, way="start")
        yield plan(f"a refusal, stderr {stream}", output, a_refusal, {"stderr": stream}, way="start")
        both = {"stdout": stream, "stderr": stream}
        yield plan(f"check, both {stream}", output, COMMANDS["check"], both, way="start")
    for about, limits in LIMITS.items():
        for name, build in COMMANDS.items():
            yield plan(f"{name} with {about}", limited, build, limits, way="start")
    for name, build in COMMANDS.items():
        yield plan(f"{name} in a folder that is gone", lost, build, way="start")


def check(bench: Bench) -> Case:
    """With letters that not every locale has, in names, captions and prompts."""
    pictures = bench.world.copy_pictures(bench.folder / "pictures")
    (pictures / "Hündchen 狗.png").write_bytes(saved(picture(5), "PNG"))
    (pictures / "dog1.txt").write_text("un café 狗 🐕", encoding="utf-8")
    return bench.check(fine(can_start), instance_data_dir=pictures, output_dir=bench.folder / "out")


def info(bench: Bench) -> Case:
    content = lora_files.make(bench.world, bench.rng)
    path = bench.write("狗.safetensors", tensors.file_of(content, {"prompt": "café 狗 🐕"}))
    return bench.run(fine(), "info", path)


def report(bench: Bench) -> Case:
    run = write_run(bench.folder / "狗")
    (run / "config.yaml").write_text("instance_prompt: café 狗 🐕\n", encoding="utf-8")
    return bench.run(fine(page_is_harmless("狗/report.html")), "report", run, writes=["狗/report.html"])


def help_text(bench: Bench) -> Case:
    return bench.run(fine(), "check", "--help")


def a_refusal(bench: Bench) -> Case:
    return bench.check(Expect(codes=(2,)), rank=0)


COMMANDS: dict[str, Callable[[Bench], Case]] = {"check": check, "info": info, "report": report, "help": help_text}


def around(bench: Bench, build: Callable[[Bench], Case], variables: Mapping[str, str | None], encoding: str) -> Case:
    case = build(bench)
    return case.but(environment=variables, encoding=encoding, expect=replace(CLEAR, look=case.expect.look))


def devices(bench: Bench, variables: Mapping[str, str | None]) -> Case:
    case = bench.check(Expect(codes=(2,), names=("MS_WORKER_NUM", "--cards", "DEVICES")))
    return case.but(environment=variables)


def output(bench: Bench, build: Callable[[Bench], Case], streams: Mapping[str, str]) -> Case:
    # Python ends with 120 if it could not write its last words: with no one to tell, that is as good as any
    expect = replace(ANY, codes=(*ANY.codes, 120)) if "stderr" in streams else ANY
    return build(bench).but(expect=expect, writes_anyway=True, **streams)


def limited(bench: Bench, build: Callable[[Bench], Case], limits: Mapping[str, int]) -> Case:
    return build(bench).but(expect=ANY, writes_anyway=True, limits=limits)


def lost(bench: Bench, build: Callable[[Bench], Case]) -> Case:
    case = build(bench)
    return case.but(lost_cwd=True, expect=replace(CLEAR, look=case.expect.look))


LIMITS: dict[str, Mapping[str, int]] = {
    "files of 4 kB at most": {"FSIZE": 4096},
    "24 open files": {"NOFILE": 24},
}
