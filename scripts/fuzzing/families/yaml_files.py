"""--config: YAML that is no YAML, that explodes, that means something else than it says, or is no file at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fuzzing import hostile
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused
from fuzzing.hostile import KINDS

# Lines that no setting of the name takes.
WRONG_TYPES = (
    "rank: [4]", "rank: {a: 1}", "rank: true", "rank: 4.5", "rank: 2001-01-01", "rank: .nan", "rank: '4x'",
    "rank: !!binary aGVsbG8=", "rank: !!set {1, 2}", "rank: [[[[4]]]]", "learning_rate: .inf", "learning_rate: -.inf",
    "learning_rate: 1e400", "learning_rate: .nan", "learning_rate: [1]", "learning_rate: true", "instance_prompt: 5",
    "instance_prompt: [a, b]", "instance_prompt: 2001-01-01", "instance_prompt: {a: b}", "instance_prompt: true",
    "center_crop: 'yes'", "center_crop: 1", "center_crop: []", "optimizer: []", "optimizer: 3", "optimizer: null dog",
    "validation_prompt: {a: b}", "validation_prompt: [[a]]", "validation_prompt: [1]", "validation_prompt: 7",
    "output_dir: 5", "output_dir: []", "report_to: {a: b}", "report_to: [1]", "resolution: 1:30", "repeats: 1000000000",
    "rank: 99999999999999999999", "seed: -1", "device: [CPU]", "mixed_precision: true", "resolution: 102400",
)  # fmt: skip

# Files that are not YAML, or not of the kind that is expected.
NOT_SETTINGS = {
    "a list": "- rank\n- 4\n",
    "a word": "rank\n",
    "a number": "4\n",
    "two documents": "rank: 4\n---\nrank: 8\n",
    "an unclosed quote": 'instance_prompt: "a dog\n',
    "an unclosed bracket": "validation_prompt: [a, b\n",
    "a tab": "rank:\n\t4\n",
    "a key twice": "rank: 4\nrank: 8\n",
    "a key and its alias": "rank: 4\nlora_rank: 8\n",
    "an unknown key": "ranks: 4\n",
    "an unknown key with an escape sequence": '"\\e[31mranks": 4\n',
    "a key that is a list": "? [a, b]\n: 4\n",
    "a key that is a mapping": "? {a: b}\n: 4\n",
    "a key that is null": "~: 4\n",
    "a number as key": "4: 4\n",
    "a tag of Python": "rank: !!python/object/apply:os.system ['touch owned']\n",
    "an unknown tag": "rank: !something 4\n",
    "a bad bool": "center_crop: !!bool maybe\n",
    "a bad int": "rank: !!int x\n",
    "a bad float": "learning_rate: !!float x\n",
    "a bad timestamp": "rank: !!timestamp x\n",
    "a month that is none": "instance_prompt: 2001-13-45\n",
    "bad base64": "instance_prompt: !!binary é\n",
    "an empty int": "rank: !!int ''\n",
    "a sexagesimal that ends": "rank: !!int '1:'\n",
    "5000 digits": f"rank: {'9' * 5000}\n",
    "a directive": "%YAML 9.9\n---\nrank: 4\n",
    "a bad directive": "%TAG ! \n",
    "an alias without anchor": "rank: *nobody\n",
    "a list that holds itself": "validation_prompt: &a [*a]\n",
    "a mapping that merges itself": "a: &a\n  <<: *a\n",
    "a merge of a number": "<<: 4\nrank: 4\n",
    "a merge of lists": "<<: [[1], [2]]\n",
    "NUL": "rank: 4\0\n",
    "a NUL in a text": 'instance_prompt: "a\\0dog"\n',
    "a lone surrogate": 'instance_prompt: "a \\ud800 dog"\n',
    "a NUL in a path": 'instance_data_dir: "a\\0dog"\n',
    "a lone surrogate in a path": 'output_dir: "a \\udc80 \\ud800"\n',
    "aliases that explode": hostile.bomb(),
    "aliases that explode in a setting": hostile.bomb() + "validation_prompt: *a29\n",
    "aliases that explode in a key": hostile.bomb(8) + "? *a7\n: 4\n",
    "merges that explode": "\n".join(
        ["m0: &m0 {x: 1}", *(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 10)}]}}" for i in range(1, 12))]
    ),
    "lists 100,000 deep": f"rank: {hostile.deep('[', ']', 100_000)}\n",
    "mappings 5,000 deep": f"rank: {hostile.deep('{a: ', '}', 5000, '1')}\n",
    "lists 900 deep": f"rank: {hostile.deep('[', ']', 900)}\n",
    "indented 3,000 deep": "".join(f"{' ' * i}a:\n" for i in range(3000)),
    "sequences in a row": f"rank: {'- ' * 5000}4\n",
    "a key of 300 kB": f"{'k' * 300_000}: 4\n",
    "1,000 unknown keys": "".join(f"k{i}: 1\n" for i in range(1000)),
}

# Sound, though odd.
SOUND = {
    "a byte-order mark": "\ufeffrank: 8\n",
    "lines that end as on Windows": "rank: 8\r\nseed: 7\r\n",
    "comments and empty lines": "# none\n\nrank: 8  # eight\n",
    "an anchor that is used": "validation_prompt: &p a dog\ntrigger_word: null\n",
    "numbers as text": 'rank: "8"\nlearning_rate: "1e-4"\nadam_epsilon: 1e-8\n',
    "other letters": "instance_prompt: 一只 sks 狗\n",
    "JSON": '{"rank": 8, "seed": 7}\n',
    "nothing": "",
    "only a comment": "# nothing\n",
    "null": "~\n",
}


def plans() -> Iterator[Plan]:
    for line in WRONG_TYPES:
        yield plan(line[:60], config, refused(line.split(":")[0], "settings.yaml"), f"{line}\n")
    for about, text in NOT_SETTINGS.items():
        yield plan(about, config, refused("settings.yaml", "--instance_data_dir"), text)
    for about, text in SOUND.items():
        yield plan(about, config, fine(), text)
    for about, data in (
        ("Latin-1", "instance_prompt: é\n".encode("latin-1")),
        ("UTF-16", "rank: 8\n".encode("utf-16")),
        ("UTF-8 of surrogates", b"instance_prompt: a \xed\xa0\x80 dog\n"),
        ("20 MB of text", b"instance_prompt: " + b"x" * 20_000_000 + b"\n"),
        ("ESC", b"instance_prompt: a \x1b[31mdog\n"),
        ("a page", hostile.HTML),
    ):
        yield plan(about, config, refused("settings.yaml"), data)
    for about in KINDS:
        expect = either("settings.yaml") if about in ("an empty file", "a link to /dev/null") else None
        yield plan(f"the file is {about}", special, about, expect or refused("settings.yaml"))
    yield plan("through a pipe", through_pipe)
    yield plan("through a pipe, half of it wrong", through_pipe_wrong)
    for n in range(40):
        yield plan(f"a sound file with {1 + n % 6} changes", mutated, 1 + n % 6)


def config(bench: Bench, expect: Expect, content: str | bytes) -> Case:
    """The flag that the file sets is not given besides, so that it counts."""
    text = content if isinstance(content, str) else ""
    named = {name: None for name in bench.world.settings if f"{name}:" in text}
    bench.write("settings.yaml", content)
    return bench.check(expect, config="settings.yaml", **named)


def special(bench: Bench, about: str, expect: Expect) -> Case:
    KINDS[about](bench.path("settings.yaml"))
    return bench.check(expect, config="settings.yaml")


def through_pipe(bench: Bench) -> Case:
    """`--config <(...)`: what it says must count, although it can be read only once."""
    case = bench.check(fine(_seven_times), config="/dev/stdin", resolution=None)
    return case.but(stdin=b"resolution: 48\nrepeats: 7\n")


def through_pipe_wrong(bench: Bench) -> Case:
    return bench.check(refused("rank"), config="/dev/stdin", rank=None).but(stdin=b"resolution: 48\nrank: 0\n")


def _seven_times(_folder: Path, stdout: str) -> str | None:
    return None if "each 7 times" in stdout and "48 x 48" in stdout else "the settings of the pipe were lost"


def mutated(bench: Bench, changes: int) -> Case:
    """A sound file in which letters were changed: nobody knows what it means, but it must end well."""
    flags = [word.removeprefix("--") for word in bench.flags(output_dir=None)]
    text = "".join(f"{name}: {value!r}\n" for name, value in zip(flags[::2], flags[1::2], strict=True))
    letters = list(text)
    for _ in range(changes):
        place = bench.rng.randrange(len(letters))
        letters[place] = bench.rng.choice("\n \t:[]{}&*!|>'\"%@`#,?-0aé\0\x1b\u2028") * bench.rng.choice((0, 1, 1, 5))
    bench.write("settings.yaml", "".join(letters))
    return bench.run(either(), "check", "--config", "settings.yaml", "--output_dir", "out", writes=["out"])
