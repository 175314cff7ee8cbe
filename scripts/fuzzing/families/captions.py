"""Captions and masks: text files, metadata.jsonl, metadata.csv, mask folders, all beside sound pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

from PIL import Image

from fuzzing import hostile
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused
from fuzzing.families.pictures import png
from fuzzing.hostile import KINDS
from fuzzing.looks import counts, table_is_harmless
from fuzzing.world import SIDE

TEXTS: dict[str, bytes] = {
    "Latin-1": "un café".encode("latin-1"),
    "UTF-16": "a dog".encode("utf-16"),
    "UTF-8 of a surrogate": b"a \xed\xa0\x80 dog",
    "cut in a letter": "a café".encode()[:-1],
}
SOUND_TEXTS: dict[str, bytes] = {
    "a byte-order mark": b"\xef\xbb\xbfa dog",
    "several lines": b"a dog\r\non the beach\n",
    "empty": b"",
    "spaces": b" \n\t ",
    "100 kB": b"word " * 20_000,
}

ROW = '{"file_name": "dog1.png", "text": "a dog"}\n'
JSON_LINES: dict[str, bytes] = {
    "not JSON": b"file_name: dog1.png\n",
    "a list": b'["dog1.png", "a dog"]\n',
    "a number": b"4\n",
    "null": b"null\n",
    "cut": ROW[:20].encode(),
    "no file_name": b'{"text": "a dog"}\n',
    "no text": b'{"file_name": "dog1.png"}\n',
    "a picture that is not there": b'{"file_name": "dog9.png", "text": "a dog"}\n',
    "a picture elsewhere": b'{"file_name": "../../../etc/passwd", "text": "a dog"}\n',
    "an absolute path": b'{"file_name": "/etc/passwd", "text": "a dog"}\n',
    "file_name a list": b'{"file_name": ["dog1.png"], "text": "a dog"}\n',
    "file_name null": b'{"file_name": null, "text": "a dog"}\n',
    "file_name empty": b'{"file_name": "", "text": "a dog"}\n',
    "file_name with NUL": b'{"file_name": "dog1.png\\u0000x", "text": "a dog"}\n',
    "file_name half a letter": b'{"file_name": "\\ud800.png", "text": "a dog"}\n',
    "file_name of 100 kB": b'{"file_name": "' + b"x" * 100_000 + b'", "text": "a dog"}\n',
    "text a number": b'{"file_name": "dog1.png", "text": 5}\n',
    "text a list": b'{"file_name": "dog1.png", "text": ["a"]}\n',
    "text half a letter": b'{"file_name": "dog1.png", "text": "a \\ud800 dog"}\n',
    "lists 100,000 deep": hostile.deep("[", "]", 100_000).encode() + b"\n",
    "objects 100,000 deep": hostile.deep('{"a":', "}", 100_000, "1").encode() + b"\n",
    "5000 digits": b'{"file_name": "dog1.png", "text": ' + b"9" * 5000 + b"}\n",
    "two captions": (ROW + ROW.replace("a dog", "a cat")).encode(),
    "Latin-1": ROW.replace("a dog", "café").encode("latin-1"),
    "UTF-16": ROW.encode("utf-16"),
    "escape sequences": b'{"file_name": "\\u001b[31m.png", "text": "a dog"}\n',
    "line breaks": b'{"file_name": "a\\nerror: b.png", "text": "a dog"}\n',
}
SOUND_JSON_LINES: dict[str, bytes] = {
    "one row": ROW.encode(),
    "a prompt": b'{"file_name": "dog1.png", "prompt": "a dog"}\n',
    "empty lines": b"\n\n" + ROW.encode() + b"\n",
    "a byte-order mark": b"\xef\xbb\xbf" + ROW.encode(),
    "lines of Windows": ROW.replace("\n", "\r\n").encode(),
    "more fields": b'{"file_name": "dog1.png", "text": "a dog", "width": NaN, "more": {"a": [1]}}\n',
    "U+2028": '{"file_name": "dog1.png", "text": "a\u2028dog"}\n'.encode(),
    "text null": b'{"file_name": "dog1.png", "text": null}\n',
    "the same twice": ROW.encode() * 2,
    "nothing": b"",
}

CSV: dict[str, bytes] = {
    "nothing": b"",
    "no header": b"dog1.png,a dog\n",
    "other columns": b"name,words\ndog1.png,a dog\n",
    "semicolons": b"file_name;text\ndog1.png;a dog\n",
    "an unclosed quote": b'file_name,text\ndog1.png,"a dog\ndog2.png,a cat\n',
    "an unclosed quote at the end": b'file_name,text\ndog1.png,a dog\ndog2.png,"a cat\n',
    "a field of 200 kB": b"file_name,text\ndog1.png," + b"x" * 200_000 + b"\n",
    "no text": b"file_name\ndog1.png\n",
    "a row without a name": b"file_name,text\n,a dog\n",
    "a picture that is not there": b"file_name,text\ndog9.png,a dog\n",
    "a picture elsewhere": b"file_name,text\n../x.png,a dog\n",
    "two captions": b"file_name,text\ndog1.png,a dog\ndog1.png,a cat\n",
    "Latin-1": "file_name,text\ndog1.png,café\n".encode("latin-1"),
    "UTF-16": "file_name,text\ndog1.png,a dog\n".encode("utf-16"),
    "escape sequences": b"file_name,text\n\x1b[31m.png,a dog\n",
    "too many fields": b"file_name,text\ndog1.png,a dog, on the beach\n",
}
SOUND_CSV: dict[str, bytes] = {
    "one row": b"file_name,text\ndog1.png,a dog\n",
    "quotes": b'file_name,text\ndog1.png,"a ""good"" dog, really"\n',
    "a line break in a field": b'file_name,text\ndog1.png,"a dog\non the beach"\n',
    "lines of Windows": b"file_name,text\r\ndog1.png,a dog\r\n",
    "a byte-order mark": b"\xef\xbb\xbffile_name,text\ndog1.png,a dog\n",
    "a header alone": b"file_name,text\n",
}


def plans() -> Iterator[Plan]:
    for about, data in TEXTS.items():
        yield plan(f"a text file, {about}", beside, "dog1.txt", data, refused("dog1.txt"))
    for about, data in SOUND_TEXTS.items():
        yield plan(f"a text file, {about}", beside, "dog1.txt", data, fine(counts(3)))
    yield plan("a text file, NUL", beside, "dog1.txt", b"a\0dog", either("dog1.txt"))
    yield plan("a trigger without its word", beside, "dog1.txt", b"a {trigger} dog", refused("--trigger_word"))
    for name, wrong, sound in (
        ("metadata.jsonl", JSON_LINES, SOUND_JSON_LINES),
        ("metadata.csv", CSV, SOUND_CSV),
    ):
        for about, data in wrong.items():
            yield plan(f"{name}: {about}", beside, name, data, refused(name))
        for about, data in sound.items():
            yield plan(f"{name}: {about}", beside, name, data, fine(counts(3)))
    for name in ("dog1.txt", "metadata.jsonl", "metadata.csv"):
        for about in KINDS:
            yield plan(f"{name} is {about}", special, name, about)
    for about, text in (*hostile.TEXTS.items(), ("a plus", "+1+1"), ("an at sign", "@SUM(1)"), ("a minus", "-1+1")):
        yield plan(f"a caption with {about}", spoken, "txt", text)
        yield plan(f"a row with {about}", spoken, "jsonl", text)
    for n in range(20):
        yield plan("rows with changed letters", mutated, ("metadata.jsonl", "metadata.csv")[n % 2])


def mask_plans() -> Iterator[Plan]:
    for about, build in MASKS.items():
        yield plan(about, build)
    for about in KINDS:
        yield plan(f"a mask that is {about}", special_mask, about)
        yield plan(f"a sidecar that is {about}", special_sidecar, about)
        if about != "a folder":
            yield plan(f"a mask folder that is {about}", special_mask_folder, about)


def beside(bench: Bench, name: str, content: bytes, expect: Expect) -> Case:
    bench.world.copy_pictures(bench.folder / "pictures")
    bench.write(f"pictures/{name}", content)
    return bench.check(expect, instance_data_dir="pictures")


def special(bench: Bench, name: str, about: str) -> Case:
    bench.world.copy_pictures(bench.folder / "pictures")
    KINDS[about](bench.path(f"pictures/{name}"))
    harmless = ("a folder", "an empty file")
    expect = either(name) if about in harmless else refused(name)
    return bench.check(expect, instance_data_dir="pictures")


def spoken(bench: Bench, kind: str, text: str) -> Case:
    """Text from a file that would do something elsewhere: it must arrive as text."""
    if kind == "jsonl":
        content = json.dumps({"file_name": "dog1.png", "text": text}).encode()
        return beside(bench, "metadata.jsonl", content, either("metadata.jsonl", look=table_is_harmless))
    return beside(bench, "dog1.txt", text.encode(), either("dog1.txt", look=table_is_harmless))


def mutated(bench: Bench, name: str) -> Case:
    sound = (ROW * 3 if name.endswith("jsonl") else "file_name,text\ndog1.png,a dog\n" * 2).encode()
    content = bytearray(sound)
    for _ in range(bench.rng.randint(1, 4)):
        content[bench.rng.randrange(len(content))] = bench.rng.choice(b'"{}[],:\\\n\r\0\x1b a\xff\xc3')
    return beside(bench, name, bytes(content), either(name, "--trigger_word", look=table_is_harmless))


# --- masks ---------------------------------------------------------------------------------------------------------


def masked(bench: Bench, content: bytes | Image.Image, expect: Expect, name: str = "masks/dog1.png") -> Case:
    if isinstance(content, Image.Image):
        content.save(bench.path(name), "PNG")
    else:
        bench.write(name, content)
    return bench.check(expect, mask_dir="masks")


def special_mask(bench: Bench, about: str) -> Case:
    KINDS[about](bench.path("masks/dog1.png"))
    expect = refused("--mask_dir") if about == "a folder" else refused("dog1.png")
    return bench.check(expect, mask_dir="masks")


def special_mask_folder(bench: Bench, about: str) -> Case:
    KINDS[about](bench.path("masks"))
    return bench.check(refused("--mask_dir"), mask_dir="masks")


def special_sidecar(bench: Bench, about: str) -> Case:
    bench.world.copy_pictures(bench.folder / "pictures")
    KINDS[about](bench.path("pictures/dog1.mask.png"))
    expect = either("dog1.mask.png") if about == "a folder" else refused("dog1.mask.png")
    return bench.check(expect, instance_data_dir="pictures")


def grey(value: int, size: tuple[int, int] = (SIDE, SIDE), mode: str = "L") -> Image.Image:
    return Image.new("L", size, value).convert(mode)


def inside_the_pictures(bench: Bench) -> Case:
    pictures = bench.world.copy_pictures(bench.folder / "pictures")
    (pictures / "masks").mkdir()
    grey(255).save(pictures / "masks" / "dog1.png")
    return bench.check(refused("--mask_dir"), instance_data_dir="pictures", mask_dir="pictures/masks")


def linked_inside_the_pictures(bench: Bench) -> Case:
    case = inside_the_pictures(bench)
    os.symlink("pictures/masks", bench.folder / "masks")
    return case.but(words=tuple(word.replace("pictures/masks", "masks") for word in case.words))


def two_of_one(bench: Bench) -> Case:
    grey(255).convert("RGB").save(bench.path("masks/dog1.jpg"))
    return masked(bench, grey(255), refused("--mask_dir"))


def sidecar(bench: Bench) -> Case:
    pictures = bench.world.copy_pictures(bench.folder / "pictures")
    grey(255).save(pictures / "dog1.mask.png")
    return bench.check(fine(counts(3)), instance_data_dir="pictures")


MASKS: dict[str, Callable[[Bench], Case]] = {
    "a white mask": lambda bench: masked(bench, grey(255), fine(counts(3))),
    "a black mask": lambda bench: masked(bench, grey(0), fine(counts(3))),
    "a mask of 16 bits": lambda bench: masked(bench, Image.new("I;16", (SIDE, SIDE), 65535), fine(counts(3))),
    "a mask of one bit": lambda bench: masked(bench, grey(255, mode="1"), fine(counts(3))),
    "a mask with alpha": lambda bench: masked(bench, grey(255, mode="LA"), fine(counts(3))),
    "a small mask": lambda bench: masked(bench, grey(255, (8, 8)), fine(counts(3))),
    "a mask of another shape": lambda bench: masked(bench, grey(255, (SIDE, 2 * SIDE)), refused("dog1.png")),
    "a thread of a mask": lambda bench: masked(bench, grey(255, (1, 5000)), refused("dog1.png")),
    "a mask of no picture": lambda bench: masked(bench, grey(255), refused("--mask_dir"), "masks/cat.png"),
    "no mask at all": lambda bench: masked(bench, b"text", refused("--mask_dir"), "masks/dog1.txt"),
    "a page": lambda bench: masked(bench, hostile.HTML, refused("dog1.png")),
    "a mask of 60,000 x 60,000": lambda bench: masked(bench, png(60_000, 60_000), refused("dog1.png")),
    "a mask cut short": lambda bench: masked(bench, png(SIDE, SIDE, b""), refused("dog1.png")),
    "a mask inside of the pictures": inside_the_pictures,
    "a mask inside of the pictures, by a link": linked_inside_the_pictures,
    "two masks of one picture": two_of_one,
    "a sidecar": sidecar,
}
