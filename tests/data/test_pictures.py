"""Pictures as people have them: every awkward file gives its documented result, and never a traceback."""

import hashlib
import json
import os
import struct
import subprocess
import unicodedata
import warnings

import numpy as np
import program
import pytest
from picture_files import BLUE, GREEN, MODES, RED, YELLOW, cut, noise, png, save
from PIL import Image

from flux_db.data import pictures, pixels
from flux_db.data.pictures import Source, find_pictures, inspect_pictures
from flux_db.data.pixels import crop_box, load_rgb, load_upright, resize_and_crop
from flux_db.errors import UserError
from flux_db.size import Size


def corners():
    """A 16 x 8 picture (in its upright state) with a colour in each corner: red, green / blue, yellow."""
    image = Image.new("RGB", (16, 8))
    for box, colour in [((0, 0), RED), ((8, 0), GREEN), ((0, 4), BLUE), ((8, 4), YELLOW)]:
        image.paste(colour, (*box, box[0] + 8, box[1] + 4))
    return image


def near(pixel, colour, tolerance=6):
    return all(abs(a - b) <= tolerance for a, b in zip(pixel, colour, strict=True))


def names(found):
    return [source.path.relative_to(found.folder).as_posix() for source in found.sources]


def captions(found):
    return {source.path.name: source.caption for source in found.sources}


def inspect(folder, resolution=1):
    return inspect_pictures(find_pictures(folder), resolution)


# ---- finding ----


def test_finds_pictures_of_every_extension_and_case_and_counts_the_rest(tmp_path):
    for name in ["a.jpg", "b.JPEG", "c.png", "d.WebP", "e.bmp", "f.tif", "g.TIFF"]:
        save(tmp_path / name)
    save(tmp_path / "anim.gif")
    save(tmp_path / "a.mask.png", mode="L", colour=255)
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "orphan.txt").write_text("a caption of nothing")
    (tmp_path / "no_extension").write_text("x")
    found = find_pictures(tmp_path)
    assert names(found) == ["a.jpg", "b.JPEG", "c.png", "d.WebP", "e.bmp", "f.tif", "g.TIFF"]
    assert [path.name for path in found.ignored] == ["anim.gif", "no_extension", "notes.md", "orphan.txt"]
    assert found.problems == ()
    assert len(inspect(tmp_path).pictures) == 7


def test_natural_order_of_names_and_folders(tmp_path):
    given = ["img10.png", "img2.png", "IMG3.png", "dir10/a.png", "dir9/b.png", "img2b.png", "07.png", "7a.png"]
    for name in given:
        save(tmp_path / name)
    expected = ["07.png", "7a.png", "dir9/b.png", "dir10/a.png", "img2.png", "img2b.png", "IMG3.png", "img10.png"]
    assert names(find_pictures(tmp_path)) == expected


def test_hidden_files_and_folders_do_not_exist(tmp_path):
    for name in ["seen.png", ".hidden.png", ".cache/x.png", "sub/._seen.png"]:
        save(tmp_path / name)
    (tmp_path / ".DS_Store").write_text("x")
    found = find_pictures(tmp_path)
    assert (names(found), found.ignored) == (["seen.png"], ())


@pytest.mark.parametrize("name", ["a picture (1).jpg", "小狗.png", "chien_été.webp", "🐶.bmp", "a.b.c.jpg", "50%.png"])
def test_unusual_names(tmp_path, name):
    save(tmp_path / "sub folder" / name)
    (tmp_path / "sub folder" / name).with_suffix(".txt").write_text("a dog")
    found = find_pictures(tmp_path)
    assert captions(found) == {name: "a dog"}
    assert [picture.path.name for picture in inspect(tmp_path).pictures] == [name]


def test_links_are_followed_but_not_round_in_circles(tmp_path):
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    save(elsewhere / "there.png")
    save(folder / "sub" / "here.png", colour=RED)
    (folder / "link.png").symlink_to(elsewhere / "there.png")
    (folder / "far").symlink_to(elsewhere)
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "broken.png").symlink_to(elsewhere / "gone.png")
    found = find_pictures(folder)
    assert names(found) == ["broken.png", "far/there.png", "link.png", "sub/here.png"]
    pictures, problems, _ = inspect_pictures(found, 1)
    assert len(pictures) == 3
    assert problems == (f"{folder / 'broken.png'}: cannot be read (No such file or directory)",)


def test_missing_and_empty_folders(tmp_path):
    missing = tmp_path / "missing"
    assert find_pictures(missing).problems == (f"{missing}: no such folder",)
    assert find_pictures(missing, may_be_empty=True).problems == ()
    (tmp_path / "notes.md").write_text("x")
    for may_be_empty in (False, True):
        file = find_pictures(tmp_path / "notes.md", may_be_empty=may_be_empty)
        assert file.problems == (f"{tmp_path / 'notes.md'}: not a folder",)
    (problem,) = find_pictures(tmp_path).problems
    assert "no pictures" in problem and "1 other files" in problem
    assert find_pictures(tmp_path, may_be_empty=True).problems == ()


def test_a_folder_that_may_not_be_read_is_a_problem(tmp_path, monkeypatch):
    save(tmp_path / "a.png")
    locked = save(tmp_path / "locked" / "b.png").parent
    scandir = os.scandir

    def refuse(path):  # not chmod: root may read everything
        if str(path) == str(locked):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = find_pictures(tmp_path)
    assert (names(found), found.problems) == (["a.png"], (f"{locked}: cannot be read (Permission denied)",))


# ---- captions ----


@pytest.mark.parametrize(
    ("data", "caption"),
    [
        (b"a dog", "a dog"),
        (b"\xef\xbb\xbfa dog\r\n", "a dog"),
        (b"  a dog,\r\n on a bench \n\n", "a dog, on a bench"),
        ("un été à Zürich 小狗".encode(), "un été à Zürich 小狗"),
    ],
    ids=["plain", "BOM and CRLF", "several lines", "unicode"],
)
def test_text_captions(tmp_path, data, caption):
    save(tmp_path / "a.JPG")
    (tmp_path / "a.txt").write_bytes(data)
    found = find_pictures(tmp_path)
    assert (captions(found), found.problems, found.ignored) == ({"a.JPG": caption}, (), ())


def test_captions_that_are_links_out_of_the_folder_are_not_read(tmp_path):
    own, secret = tmp_path / "own", tmp_path / "secret"
    secret.write_text('{"file_name": "b.png", "text": "root:x:0:0"}')
    for name in ("a.png", "b.png"):
        save(own / name)
    for name in ("a.txt", "metadata.jsonl"):
        (own / name).symlink_to(secret)
    found = find_pictures(own)
    assert captions(found) == {"a.png": None, "b.png": None}
    why = "is a link out of the folder, and is not read; put the file itself here"
    assert found.problems == (f"{own / 'a.txt'}: {why}", f"{own / 'metadata.jsonl'}: {why}")


def test_a_caption_may_be_a_link_to_beside_the_target_of_its_picture(tmp_path):
    save(tmp_path / "store" / "a.png")
    (tmp_path / "store" / "a.txt").write_text("a dog")
    (tmp_path / "own").mkdir()
    for name in ("a.png", "a.txt"):
        (tmp_path / "own" / name).symlink_to(tmp_path / "store" / name)
    found = find_pictures(tmp_path / "own")
    assert (captions(found), found.problems) == ({"a.png": "a dog"}, ())


@pytest.mark.parametrize("data", ["Zürich".encode("latin-1"), "a dog".encode("utf-16")], ids=["latin-1", "utf-16"])
def test_a_caption_that_is_not_utf8_is_a_problem(tmp_path, data):
    save(tmp_path / "a.jpg")
    (tmp_path / "a.txt").write_bytes(data)
    assert find_pictures(tmp_path).problems == (f"{tmp_path / 'a.txt'}: not UTF-8 text; save it as UTF-8",)


@pytest.mark.parametrize("data", [b"", b" \r\n", b"\xef\xbb\xbf"], ids=["empty", "blank", "only a BOM"])
def test_an_empty_caption_counts_as_none_and_is_warned_of(tmp_path, data):
    save(tmp_path / "a.jpg")
    (tmp_path / "a.txt").write_bytes(data)
    pictures, problems, warned = inspect(tmp_path)
    assert pictures[0].caption is None and problems == ()
    assert warned == (f"{tmp_path / 'a.jpg'}: empty caption in {tmp_path / 'a.txt'}",)


def test_metadata_jsonl_in_root_and_sub_folder(tmp_path):
    for name in ["a.jpg", "b.jpg", "sub/c.jpg", "sub/d.jpg", "e.jpg"]:
        save(tmp_path / name)
    rows = [
        {"file_name": "a.jpg", "text": "one"},
        {"file_name": "./b.jpg", "prompt": "two\u2028lines", "more": [1]},
        {"file_name": "sub/../sub/c.jpg", "text": "three", "prompt": "not this"},
    ]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n\r\n")
    (tmp_path / "sub" / "metadata.jsonl").write_text('{"file_name": "d.jpg", "text": "four"}')
    found = find_pictures(tmp_path)
    expected = {"a.jpg": "one", "b.jpg": "two lines", "c.jpg": "three", "d.jpg": "four", "e.jpg": None}
    assert (captions(found), found.problems, found.ignored) == (expected, (), ())


def test_metadata_csv(tmp_path):
    for name in ["a.jpg", "b.jpg"]:
        save(tmp_path / name)
    data = b'\xef\xbb\xbffile_name, prompt\r\na.jpg,"a dog, ""sitting""\r\non a bench"\r\nb.jpg,a cat\r\n'
    (tmp_path / "metadata.csv").write_bytes(data)
    found = find_pictures(tmp_path)
    assert found.problems == ()
    assert captions(found) == {"a.jpg": 'a dog, "sitting" on a bench', "b.jpg": "a cat"}


def test_a_text_file_wins_over_metadata_unless_it_is_empty(tmp_path):
    for name in ["a.jpg", "b.jpg"]:
        save(tmp_path / name)
    (tmp_path / "metadata.csv").write_text("file_name,text\na.jpg,from csv\nb.jpg,from csv\n")
    (tmp_path / "a.txt").write_text("from txt")
    (tmp_path / "b.txt").write_text("")
    found = find_pictures(tmp_path)
    assert captions(found) == {"a.jpg": "from txt", "b.jpg": "from csv"}
    assert found.sources[1].warnings == (f"empty caption in {tmp_path / 'b.txt'}",)


def test_every_bad_metadata_line_is_named(tmp_path):
    save(tmp_path / "a.jpg")
    save(tmp_path / "b.gif")
    lines = [
        '{"file_name": "a.jpg", "text": "good"}',
        '{"file_name": "a.jpg", ',
        '["a.jpg", "text"]',
        '{"text": "of what?"}',
        '{"file_name": "gone.jpg", "text": "x"}',
        '{"file_name": "b.gif", "text": "x"}',
        '{"file_name": "../a.jpg", "text": "x"}',
        '{"file_name": "a.jpg"}',
        '{"file_name": "a.jpg", "text": 7}',
        '{"file_name": "a.jpg", "text": "something else"}',
        '{"file_name": "a.jpg", "text": "good"}',
    ]
    path = tmp_path / "metadata.jsonl"
    path.write_text("\n".join(lines))
    found = find_pictures(tmp_path)
    parts = [
        (2, "not a JSON object"),
        (3, "not a JSON object"),
        (4, "no file_name"),
        (5, "no picture gone.jpg"),
        (6, "no picture b.gif"),
        (7, "no picture ../a.jpg"),
        (8, "neither text nor prompt"),
        (9, "text is not a text: 7"),
        (10, f"another caption for a.jpg, which has one in {path}, line 1"),
    ]
    assert len(found.problems) == len(parts)
    for problem, (line, part) in zip(found.problems, parts, strict=True):
        assert problem.startswith(f"{path}, line {line}: ") and part in problem
    assert captions(found) == {"a.jpg": "good"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name,text\na.jpg,x\n", "line 1: needs the columns file_name and text (or prompt), has name, text"),
        ("file_name;text\na.jpg;x\n", "line 1: needs the columns file_name and text (or prompt), has file_name;text"),
        ("", "line 1: needs the columns file_name and text (or prompt), has "),
        ("file_name,text\na.jpg,x\n,y\n", "line 3: no file_name"),
        ("file_name,text\nz.jpg,x\n", "line 2: there is no picture z.jpg in "),
        ('file_name,text\na.jpg,x\na.jpg,"never closed\na.jpg,y\na.jpg,z\n', "line 3: this row is not CSV (unexpected"),
        ('file_name,text\na.jpg,"one\na.jpg,"two"\n', "line 2: this row is not CSV ("),
        ('file_name,"text\na.jpg,x\n', "line 1: this row is not CSV ("),
        ('file_name,text\na.jpg,"' + "x\n" * 10**5, "line 2: this row is not CSV ("),
        ("file_name,text\na.jpg,a dog, sitting\n", "line 2: has more columns than the first line; put a text with"),
        ("file_name,text\na.jpg,a\0b\n", "line 2: "),
    ],
    ids=[
        *("no file_name column", "semicolons", "empty", "no name", "no such file", "open quote", "closed by another"),
        *("open quote in the first line", "long", "commas", "nul"),
    ],
)
def test_bad_csv(tmp_path, text, problem):
    save(tmp_path / "a.jpg")
    (tmp_path / "metadata.csv").write_text(text)
    (found,) = find_pictures(tmp_path).problems
    assert found.startswith(f"{tmp_path / 'metadata.csv'}, {problem}")


def test_a_quoted_caption_may_have_commas_and_line_breaks(tmp_path):
    for name in ("a.jpg", "b.jpg"):
        save(tmp_path / name)
    (tmp_path / "metadata.csv").write_text('file_name,text\na.jpg,"a ""big"" dog,\nsitting"\nb.jpg,5" tall,\n')
    found = find_pictures(tmp_path)
    assert (captions(found), found.problems) == ({"a.jpg": 'a "big" dog, sitting', "b.jpg": '5" tall'}, ())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"file_name": "a.jpg", "text": "\\ud800"}', "text has something in it that is no character"),
        ('{"file_name": "a.jpg", "text": "\\u0000"}', "text has a NUL character in it"),
        ("[" * 10**5, "not a JSON object"),
        ('{"file_name": "a.jpg", "text": ' + "9" * 5000 + "}", "not a JSON object"),
        ('{"file_name": "a.jpg", "text": [' + "1," * 10**5 + "1]}", "text is not a text: [1, 1, 1, 1, 1, 1, ...]"),
    ],
    ids=["surrogate", "nul", "deep", "digits", "list"],
)
def test_hostile_metadata(tmp_path, line, problem):
    save(tmp_path / "a.jpg")
    (tmp_path / "metadata.jsonl").write_text(line)
    (found,) = find_pictures(tmp_path).problems
    assert found.startswith(f"{tmp_path / 'metadata.jsonl'}, line 1: {problem}")


def test_of_very_many_problems_the_first_are_named(tmp_path):
    save(tmp_path / "a.jpg")
    (tmp_path / "metadata.jsonl").write_text("x\n" * 10**6)
    problems = find_pictures(tmp_path).problems
    assert len(problems) == 101
    assert problems[-1] == f"{tmp_path / 'metadata.jsonl'}: has more problems; mend these first"


def test_metadata_that_is_no_file(tmp_path):
    save(tmp_path / "a.jpg")
    os.mkfifo(tmp_path / "metadata.csv")
    (found,) = find_pictures(tmp_path).problems
    assert found.startswith(f"{tmp_path / 'metadata.csv'}: cannot be read (is a pipe, not a file)")


def test_folders_nested_too_deeply_and_names_too_long(tmp_path):
    before = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(2000):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(before)
    found, *_ = find_pictures(tmp_path).problems
    subprocess.run(
        ["rm", "-rf", tmp_path / "d"], check=True, env=program.environment()
    )  # shutil.rmtree, which pytest uses, would give up
    assert found == f"{tmp_path}: has folders nested too deeply"
    assert find_pictures(tmp_path / ("x" * 5000)).problems[0].endswith(": no such folder")


def test_null_and_missing_metadata_texts_are_empty_captions(tmp_path):
    save(tmp_path / "a.jpg")
    save(tmp_path / "sub" / "b.jpg")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.jpg", "text": null}')
    (tmp_path / "sub" / "metadata.csv").write_text("file_name,text\nb.jpg\n")
    found = find_pictures(tmp_path)
    assert (captions(found), found.problems) == ({"a.jpg": None, "b.jpg": None}, ())
    assert [len(source.warnings) for source in found.sources] == [1, 1]


def test_accents_match_however_they_are_composed(tmp_path):
    on_disk = unicodedata.normalize("NFD", "été.jpg")
    save(tmp_path / on_disk)
    row = {"file_name": unicodedata.normalize("NFC", on_disk), "text": "summer"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    assert captions(find_pictures(tmp_path)) == {on_disk: "summer"}


# ---- checking ----


def test_a_good_picture_is_described(tmp_path):
    path = save(tmp_path / "a.jpg", (40, 30))
    (tmp_path / "a.txt").write_text("a dog")
    pictures, problems, warned = inspect(tmp_path, resolution=30)
    assert (problems, warned) == ((), ())
    (picture,) = pictures
    assert (picture.path, picture.caption, picture.size, picture.warnings) == (path, "a dog", (30, 40), ())
    assert picture.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def damage_middle(data):
    return data[:200] + bytes(400) + data[600:]


@pytest.mark.parametrize(
    ("name", "spoil", "part"),
    [
        ("zero.jpg", lambda data: b"", "the file is empty"),
        ("cut.jpg", cut, "damaged or cut short"),
        ("last_bytes.jpg", lambda data: data[:-60], "damaged or cut short"),
        ("cut.png", cut, "damaged or cut short"),
        ("spoilt.png", damage_middle, "damaged or cut short"),
        ("cut.webp", cut, "damaged or cut short"),
        ("cut.bmp", cut, "damaged or cut short"),
        ("cut.tif", cut, "damaged or cut short"),
        ("head.jpg", lambda data: data[:10], "damaged or cut short"),
        ("text.jpg", lambda data: b"this is not a picture\n", "whatever its name says"),
        ("page.png", lambda data: b"<html><body>404</body></html>", "whatever its name says"),
        ("postscript.jpg", lambda data: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "whatever its name says"),
        ("bomb.png", lambda data: png(50_000, 50_000), "50000 x 50000 is 2,500 megapixels"),
        ("just_over.png", lambda data: png(12_801, 10_000), "more than the limit of 128"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_damaged_files_are_named(tmp_path, name, spoil, part):
    path = noise(tmp_path / name)
    path.write_bytes(spoil(path.read_bytes()))
    pictures, problems, _ = inspect(tmp_path)
    assert pictures == ()
    (problem,) = problems
    assert problem.startswith(f"{path}: ") and part in problem
    with pytest.raises(UserError) as error:
        load_rgb(path)
    assert error.value.problems[0].startswith(f"{path}: ")


def test_all_problems_are_reported_at_once_and_the_rest_survives(tmp_path):
    (tmp_path / "1.jpg").write_bytes(b"")
    (tmp_path / "2.jpg").write_bytes(b"text")
    save(tmp_path / "3.jpg")
    (tmp_path / "3.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "4.png").write_bytes(png(50_000, 50_000))
    save(tmp_path / "5.jpg", colour=RED)
    pictures, problems, _ = inspect(tmp_path)
    assert [picture.path.name for picture in pictures] == ["3.jpg", "5.jpg"]
    assert [problem.split(":")[0].rsplit("/")[-1] for problem in problems] == ["3.txt", "1.jpg", "2.jpg", "4.png"]


def test_large_but_permitted_pictures_pass_silently_and_the_limit_of_pil_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    save(tmp_path / "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(inspect(tmp_path).pictures) == 1
        load_rgb(tmp_path / "a.png")
    assert Image.MAX_IMAGE_PIXELS == 10


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    path = save(tmp_path / "a.png", (20, 20))
    monkeypatch.setattr(pixels, "MAX_PIXELS", 399)
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("decoded"))
    with pytest.raises(UserError, match="20 x 20"):
        load_rgb(path)


def test_duplicates_and_small_pictures_are_warned_of(tmp_path):
    first = save(tmp_path / "a.jpg", (64, 48))
    second = tmp_path / "sub" / "b.jpg"
    second.parent.mkdir()
    second.write_bytes(first.read_bytes())
    save(tmp_path / "c.png", (64, 64))
    pictures, problems, warned = inspect(tmp_path, resolution=64)
    small = "64 x 48 is smaller than 64 on the short side and will be scaled up"
    assert problems == ()
    assert [picture.warnings for picture in pictures] == [(small,), (), (small, f"the same picture as {first}")]
    assert warned == (f"{first}: {small}", f"{second}: {small}", f"{second}: the same picture as {first}")


def test_no_handles_stay_open(tmp_path):
    for i in range(30):
        noise(tmp_path / f"{i}.jpg")
        (tmp_path / f"bad{i}.png").write_bytes(png(50_000, 50_000))
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        inspection = inspect(tmp_path)
        loaded = [load_rgb(picture.path) for picture in inspection.pictures]
    assert len(os.listdir("/proc/self/fd")) == before
    assert (len(loaded), len(inspection.problems)) == (30, 30)


def test_a_source_that_vanished_is_a_problem(tmp_path):
    gone = tmp_path / "gone.jpg"
    found = pictures.Found(tmp_path, (Source(gone, None),))
    assert inspect_pictures(found, 1).problems == (f"{gone}: cannot be read (No such file or directory)",)


# ---- opening ----

TO_STORED = {  # how an upright picture must be turned to be stored under each EXIF orientation
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, orientation, extension):
    path = tmp_path / f"a.{extension}"
    stored = Image.fromarray(np.ascontiguousarray(TO_STORED[orientation](np.asarray(corners()))))
    exif = Image.Exif()
    exif[0x0112] = orientation
    exact = {"jpg": {"quality": 100, "subsampling": 0}, "webp": {"lossless": True}}
    stored.save(path, exif=exif, **exact.get(extension, {}))
    image = load_rgb(path)
    assert Size.of(image) == inspect(tmp_path).pictures[0].size == (8, 16)
    for position, colour in {(1, 1): RED, (14, 1): GREEN, (1, 6): BLUE, (14, 6): YELLOW}.items():
        assert near(image.getpixel(position), colour)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"garbage that is no TIFF",
        b"II*\0\xff\xff\xff\x7f",
        b"II*\0" + struct.pack("<IHHHI4sI", 8, 1, 0x0112, 2, 4, b"abc", 0),
    ],
    ids=["empty", "garbage", "points past the end", "orientation is a word"],
)
def test_damaged_exif_does_not_cost_a_good_picture(tmp_path, exif):
    path = save(tmp_path / "a.jpg", (16, 8), RED, exif=b"Exif\0\0" + exif)
    assert Size.of(load_rgb(path)) == inspect(tmp_path).pictures[0].size == (8, 16)


def test_orientation_out_of_range_is_ignored(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 0
    save(tmp_path / "a.jpg", (16, 8), RED, exif=exif)
    assert inspect(tmp_path).pictures[0].size == Size.of(load_rgb(tmp_path / "a.jpg")) == (8, 16)


@pytest.mark.parametrize(("name", "make", "left", "right"), MODES, ids=[row[0] for row in MODES])
def test_modes_become_rgb(tmp_path, name, make, left, right):
    path = tmp_path / name
    make(path)
    image = load_rgb(path)
    assert (image.mode, image.size) == ("RGB", (8, 8))
    assert near(image.getpixel((1, 4)), left) and near(image.getpixel((6, 4)), right)
    pictures, problems, _ = inspect(tmp_path)
    assert problems == () and pictures[0].size == (8, 8)


def test_alpha_goes_on_the_given_background(tmp_path):
    path = save(tmp_path / "a.png", colour=(0, 0, 0, 0), mode="RGBA")
    assert load_rgb(path, background=(10, 20, 30)).getpixel((0, 0)) == (10, 20, 30)
    assert load_upright(path).mode == "RGBA"


# ---- sizing ----


@pytest.mark.parametrize(
    ("source", "size", "crop", "box"),
    [
        ((100, 200), (50, 50), (0.0, 0.0), (0, 0, 100, 100)),
        ((100, 200), (50, 50), (0.5, 0.5), (50, 0, 150, 100)),
        ((100, 200), (50, 50), (1.0, 1.0), (100, 0, 200, 100)),
        ((200, 100), (50, 50), (0.3, 0.5), (0, 50, 100, 150)),
        ((100, 100), (100, 60), (0.25, 0.9), (10, 0, 70, 100)),
        ((64, 64), (64, 64), (0.7, 0.7), (0, 0, 64, 64)),
        ((10, 10), (40, 20), (0.0, 0.0), (0, 0, 5, 10)),
        ((1, 1), (64, 64), (0.5, 0.5), (0, 0, 1, 1)),
        ((3, 2000), (48, 48), (0.5, 0.5), (998.5, 0, 1001.5, 3)),
        ((197, 394), (64, 64), (1.0, 1.0), (197, 0, 394, 197)),  # 394 * (64 / 197) is a hair below 128
    ],
)
def test_crop_box(source, size, crop, box):
    assert crop_box(source, size, crop) == pytest.approx(box)


def test_crop_box_stays_inside_and_keeps_the_shape():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        (w, h), (height, width) = rng.integers(1, 3000, 2), rng.integers(1, 100, 2) * 16
        left, top, right, bottom = crop_box((int(h), int(w)), (int(height), int(width)), tuple(rng.random(2)))
        assert 0 <= left < right <= w and 0 <= top < bottom <= h
        assert (right - left) / (bottom - top) == pytest.approx(width / height)
        assert right - left == pytest.approx(w) or bottom - top == pytest.approx(h)


def gradient(width, height):
    """Red tells the column, green the row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(width)
    pixels[..., 1] = np.arange(height)[:, None]
    return Image.fromarray(pixels)


@pytest.mark.parametrize(("crop", "left", "top"), [((0, 0), 0, 0), ((0.5, 0), 68, 0), ((1, 1), 137, 0)])
def test_without_scaling_pixels_are_copied(crop, left, top):
    image = gradient(201, 64)
    result = resize_and_crop(image, (64, 64), crop)
    expected = np.asarray(image, np.float32)[top : top + 64, left : left + 64].transpose(2, 0, 1) / 127.5 - 1
    assert result.dtype == np.float32 and result.shape == (3, 64, 64) and result.flags.c_contiguous
    np.testing.assert_array_equal(result, expected)


def test_scaling_keeps_a_gradient_where_it_is():
    result = (resize_and_crop(gradient(200, 100), (50, 50), (0.5, 0.5)) + 1) * 127.5
    inner = slice(4, -4)  # Lanczos bends a gradient at the border of the picture
    # A pixel of the result covers two of the source, whose mean column is 50 + 2 i + 0.5.
    np.testing.assert_allclose(result[0, 25], 50.5 + 2 * np.arange(50), atol=1)
    np.testing.assert_allclose(result[1, inner, 25], (0.5 + 2 * np.arange(50))[inner], atol=1)
    assert np.all(result[2] == 0)


def test_shape_is_height_then_width():
    result = resize_and_crop(gradient(200, 100), (32, 48))
    assert result.shape == (3, 32, 48)
    assert result[0, 0, -1] > result[0, 0, 0] and result[1, -1, 0] > result[1, 0, 0]


def test_flip_mirrors_the_same_crop():
    image = gradient(200, 100)
    plain, flipped = (resize_and_crop(image, (48, 48), (0.2, 0.5), flip) for flip in (False, True))
    np.testing.assert_array_equal(flipped, plain[:, :, ::-1])
    assert not np.array_equal(flipped, plain)


def test_range_is_exactly_minus_one_to_one():
    for value, expected in [(0, -1), (255, 1)]:
        assert np.all(resize_and_crop(Image.new("RGB", (30, 20), (value,) * 3), (16, 16)) == expected)


@pytest.mark.parametrize("size", [(1, 1), (2000, 3), (3, 2000), (1, 500), (17, 23)])
def test_extreme_sizes_are_usable_and_warned_of(tmp_path, size):
    path = save(tmp_path / "a.png", size, RED)
    pictures, problems, warned = inspect(tmp_path, resolution=64)
    assert pictures[0].size == size[::-1] and problems == ()
    assert f"{size[0]} x {size[1]}" in warned[0]
    result = resize_and_crop(load_rgb(path), (64, 64))
    np.testing.assert_allclose(result.mean(axis=(1, 2)), [1, -1, -1], atol=1e-6)


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    image = load_rgb(noise(tmp_path / "a.png", (150, 90)))
    first, second = (resize_and_crop(image, (64, 48), (0.37, 0.61), True) for _ in range(2))
    assert first.tobytes() == second.tobytes()
