"""Files of prompts: one on each line, or so it should be."""

from __future__ import annotations

from collections.abc import Iterator

from fuzzing import hostile
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused
from fuzzing.hostile import KINDS
from fuzzing.looks import can_start

SOUND: dict[str, bytes] = {
    "two lines": b"a dog\na cat\n",
    "a byte-order mark": b"\xef\xbb\xbfa dog\n",
    "lines of Windows": b"a dog\r\na cat\r\n",
    "comments": b"# none\n\n  a dog  \n",
    "other letters": "一只狗\n".encode(),
    "the same twice": b"a dog\na dog\n",
    "no line break at the end": b"a dog",
}
REFUSED: dict[str, bytes] = {
    "only comments": b"# none\n\n   \n",
    "Latin-1": "un café\n".encode("latin-1"),
    "UTF-16": "a dog\n".encode("utf-16"),
    "UTF-8 of a surrogate": b"a \xed\xa0\x80 dog\n",
    "cut in a letter": "un café".encode()[:-1],
    "a trigger without its word": b"a {trigger}\n",
    "a page of noise": bytes(range(256)) * 10,
}


def plans() -> Iterator[Plan]:
    for about, data in SOUND.items():
        yield plan(f"check: {about}", checked, data, fine(can_start))
    for about, data in REFUSED.items():
        names = ("--validation_prompts_file", "--prompts_file", "--trigger_word")
        yield plan(f"check: {about}", checked, data, refused(*names))
        if "trigger" not in about:
            yield plan(f"generate: {about}", generated, data, refused(*names))
    for about in KINDS:
        yield plan(f"check: {about}", special, "check", about)
        yield plan(f"generate: {about}", special, "generate", about)
    for about, text in hostile.TEXTS.items():
        yield plan(f"check: {about}", checked, text.encode() + b"\n", either("--validation_prompts_file"))
    yield plan("check: NUL", checked, b"a\0dog\n", either("--validation_prompts_file"))
    yield plan("check: 100,000 lines", checked, b"a dog\n" * 100_000, either("--validation_prompts_file"))
    yield plan("check: a line of 1 MB", checked, b"a dog " * 200_000, either("--validation_prompts_file"))


def checked(bench: Bench, content: bytes, expect: Expect) -> Case:
    bench.write("prompts.txt", content)
    return bench.check(expect, validation_prompts_file="prompts.txt")


def generated(bench: Bench, content: bytes, expect: Expect) -> Case:
    bench.write("prompts.txt", content)
    return generate(bench, expect)


def generate(bench: Bench, expect: Expect) -> Case:
    return bench.run(expect, "generate", "--model", bench.world.model, "--prompts_file", "prompts.txt", "-o", "made")


def special(bench: Bench, command: str, about: str) -> Case:
    KINDS[about](bench.path("prompts.txt"))
    expect = refused("--validation_prompts_file", "--prompts_file")
    if command == "generate":
        return generate(bench, expect)
    return bench.check(expect, validation_prompts_file="prompts.txt")
