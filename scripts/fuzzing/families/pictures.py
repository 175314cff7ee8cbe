"""The pictures: every format, cut, changed, too large, or no picture at all; and names that no one would choose."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image, PngImagePlugin

from fuzzing import hostile
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused
from fuzzing.hostile import KINDS
from fuzzing.looks import counts, table_is_harmless
from fuzzing.world import picture

FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP", "tif": "TIFF"}

# File name -> mode and options to save with; all of them can be trained on.
SOUND: dict[str, tuple[str, dict]] = {
    "a.jpg": ("RGB", {}),
    "grey.jpg": ("L", {}),
    "cmyk.jpg": ("CMYK", {}),
    "progressive.JPEG": ("RGB", {"progressive": True}),
    "a.png": ("RGB", {}),
    "alpha.png": ("RGBA", {}),
    "grey-alpha.png": ("LA", {}),
    "palette.png": ("P", {}),
    "one-bit.png": ("1", {}),
    "sixteen-bit.png": ("I;16", {}),
    "a.webp": ("RGB", {}),
    "lossless.webp": ("RGBA", {"lossless": True}),
    "a.bmp": ("RGB", {}),
    "a.tif": ("RGB", {}),
    "lzw.tiff": ("RGB", {"compression": "tiff_lzw"}),
    "float.tif": ("F", {}),
    "animated.webp": ("RGB", {"save_all": True, "append_images": [picture(5)]}),
    "several.tif": ("RGB", {"save_all": True, "append_images": [picture(5)]}),
    "turned.jpg": ("RGB", {"exif": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"}),
    "odd-exif.jpg": ("RGB", {"exif": b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01"}),
    "odd-orientation.jpg": (
        "RGB",
        {"exif": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0"},
    ),
    "odd-icc.png": ("RGB", {"icc_profile": b"no profile"}),
}

NAMES = [
    *(f"{text}.png" for text in hostile.TEXTS.values() if "/" not in text),
    os.fsdecode(b"\xff\xfe.png"),
    "x" * 251 + ".png",
    "-rf.png",
    " .png",
    "..png",
    "a:b.png",
    "é.png",
    "e\u0301.png",
    "🐕.png",
    "CON.png",
    "%s%n.png",
    "{trigger}.png",
    "a.mask.mask.png",
    "=1+1.png",
    "+1.png",
    "@SUM(1).png",
]


def plans() -> Iterator[Plan]:
    for name, (mode, options) in SOUND.items():
        yield plan(name, sound, name, mode, options)
    yield plan("all formats at once", all_at_once)
    for extension in FORMATS:
        for share in (0.02, 0.3, 0.7, 0.99):
            yield plan(f"{extension}, {share:.0%} of it", cut, extension, share)
        for changes in (1, 3, 10, 100):
            yield plan(f"{extension} with {changes} bytes changed", changed, extension, changes)
    for about in KINDS:
        yield plan(f"a picture that is {about}", special, about)
        yield plan(f"a folder that is {about}", special_folder, about)
    for name in NAMES:
        yield plan(f"named {name[:40]!r}", named, name)
    for about, name, content in _not_pictures():
        yield plan(about, no_picture, name, content)
    for about, build in _folders().items():
        yield plan(about, folder, build)


def with_picture(bench: Bench, name: str, content: bytes, expect: Expect) -> Case:
    bench.world.copy_pictures(bench.folder / "pictures")
    bench.write(f"pictures/{name}", content)
    return bench.check(expect, instance_data_dir="pictures")


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def sound(bench: Bench, name: str, mode: str, options: dict) -> Case:
    kind = FORMATS[{"jpeg": "jpg", "tiff": "tif"}.get(name.split(".")[-1].lower(), name.split(".")[-1])]
    image = picture(4, mode=mode if mode != "I;16" else "I")
    return with_picture(bench, name, saved(image.convert(mode), kind, **options), fine(counts(4)))


def all_at_once(bench: Bench) -> Case:
    for number, (extension, kind) in enumerate(FORMATS.items()):
        bench.write(f"pictures/sub/{number}.{extension.upper()}", saved(picture(number), kind))
    return bench.check(fine(counts(len(FORMATS))), instance_data_dir="pictures")


def cut(bench: Bench, extension: str, share: float) -> Case:
    content = saved(picture(4), FORMATS[extension])
    # of a BMP or TIFF the last rows may be missing, of a JPEG the end mark: that is for the library to say
    expect = refused(f"bad.{extension}") if share < 0.9 else either(f"bad.{extension}")
    return with_picture(bench, f"bad.{extension}", content[: max(1, int(len(content) * share))], expect)


def changed(bench: Bench, extension: str, changes: int) -> Case:
    content = bytearray(saved(picture(4), FORMATS[extension]))
    for _ in range(changes):
        content[bench.rng.randrange(len(content))] = bench.rng.randrange(256)
    return with_picture(bench, f"bad.{extension}", bytes(content), either(f"bad.{extension}"))


def special(bench: Bench, about: str) -> Case:
    bench.world.copy_pictures(bench.folder / "pictures")
    KINDS[about](bench.path("pictures/bad.png"))
    # a folder of that name is a folder, and empty
    expect = fine(counts(3)) if about == "a folder" else refused("bad.png")
    return bench.check(expect, instance_data_dir="pictures")


def special_folder(bench: Bench, about: str) -> Case:
    KINDS[about](bench.path("bad"))
    return bench.check(refused("bad"), instance_data_dir="bad")


def named(bench: Bench, name: str) -> Case:
    return with_picture(bench, name, saved(picture(4), "PNG"), either("--instance_data_dir", look=table_is_harmless))


def no_picture(bench: Bench, name: str, content: Callable[[], bytes]) -> Case:
    return with_picture(bench, name, content(), refused(name))


def _not_pictures() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """What, its name, and its content."""
    yield "a page", "bad.jpg", lambda: hostile.HTML
    yield "an LFS pointer", "bad.png", lambda: hostile.LFS_POINTER
    yield "PostScript", "bad.jpg", lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\nshowpage\n"
    yield "PDF", "bad.png", lambda: b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n"
    yield "SVG", "bad.png", lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    yield "a GIF by another name", "bad.png", lambda: saved(picture(1), "GIF")
    yield "a zip file", "bad.webp", lambda: b"PK\x03\x04" + b"\0" * 100
    yield "text", "bad.bmp", lambda: b"not a picture"
    yield "a PNG of 60,000 x 60,000", "bad.png", lambda: png(60_000, 60_000)
    yield "a PNG of 2^31 - 1", "bad.png", lambda: png(2**31 - 1, 2**31 - 1)
    yield "a PNG without width", "bad.png", lambda: png(0, 10)
    yield "a PNG without data", "bad.png", lambda: png(64, 64, data=b"")
    yield "a PNG whose text explodes", "bad.png", lambda: png(64, 64, text=zlib.compress(b"\0" * 300_000_000, 9))
    yield "a JPEG of 65,535 x 65,535", "bad.jpg", lambda: jpeg_of(65_535, 65_535)
    yield "a BMP of 2^31 - 1", "bad.bmp", lambda: bmp(2**31 - 1, 2**31 - 1)
    yield "a BMP of minus 64", "bad.bmp", lambda: bmp(-64, -64)
    yield "a TIFF that points at itself", "bad.tif", lambda: b"II*\0\x08\0\0\0" + struct.pack("<HI", 0, 8)
    yield "a TIFF with 65,535 tags", "bad.tif", lambda: b"II*\0\x08\0\0\0" + struct.pack("<H", 65_535)
    yield "a WEBP without a chunk", "bad.webp", lambda: b"RIFF\xff\xff\xff\xffWEBPVP8 "


def png(width: int, height: int, data: bytes = b"\0" * 64, text: bytes | None = None) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    about = chunk(b"zTXt", b"prompt\0\0" + text) if text else b""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", size) + about + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def jpeg_of(width: int, height: int) -> bytes:
    content = bytearray(saved(picture(1), "JPEG"))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def bmp(width: int, height: int) -> bytes:
    content = bytearray(saved(picture(1), "BMP"))
    content[18:26] = struct.pack("<ii", width, height)
    return bytes(content)


def folder(bench: Bench, build: Callable[[Path], Expect]) -> Case:
    target = bench.world.copy_pictures(bench.folder / "pictures")
    return bench.check(build(target), instance_data_dir="pictures")


def _folders() -> dict[str, Callable[[Path], Expect]]:
    def link_to_itself(pictures: Path) -> Expect:
        (pictures / "loop").symlink_to(".")
        return fine(counts(3))

    def link_to_the_parent(pictures: Path) -> Expect:
        (pictures / "up").symlink_to("..")
        return either("--instance_data_dir")

    def only_others(pictures: Path) -> Expect:
        for path in pictures.iterdir():
            path.rename(path.with_suffix(".heic"))
        return refused("--instance_data_dir")

    def only_hidden(pictures: Path) -> Expect:
        for path in pictures.iterdir():
            path.rename(path.with_name(f".{path.name}"))
        return refused("--instance_data_dir")

    def the_same_twice(pictures: Path) -> Expect:
        (pictures / "again.png").write_bytes((pictures / "dog1.png").read_bytes())
        return fine(counts(4))

    def linked_from_elsewhere(pictures: Path) -> Expect:
        (pictures / "dog1.png").rename(pictures.parent / "elsewhere.png")
        (pictures / "linked.png").symlink_to("../elsewhere.png")
        return fine(counts(3))

    def one_pixel(pictures: Path) -> Expect:
        picture(1, (1, 1)).save(pictures / "pixel.png")
        return fine(counts(4))

    def a_thread(pictures: Path) -> Expect:
        picture(1, (1, 20_000)).save(pictures / "thread.png")
        return either("thread.png")

    def ten_folders_deep(pictures: Path) -> Expect:
        deep = pictures.joinpath(*"abcdefghij")
        deep.mkdir(parents=True)
        picture(7).save(deep / "deep.png")
        return fine(counts(4))

    def text_in_the_picture(pictures: Path) -> Expect:
        about = PngImagePlugin.PngInfo()
        about.add_text("prompt", hostile.TERMINAL)
        picture(7).save(pictures / "told.png", pnginfo=about)
        return fine(counts(4))

    found = locals()
    return {name.replace("_", " "): build for name, build in found.items() if callable(build)}
