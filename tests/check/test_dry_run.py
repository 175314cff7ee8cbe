"""`python -m flux_db check`: a folder of awkward files, each with its documented result; and what a run would do."""

import csv
import importlib.util
import io
import os
import struct
import unicodedata
from pathlib import Path

import numpy as np
import program
import pytest
from picture_files import MODES, cut, noise, png, save
from PIL import Image, features

from flux_db.check import contact_sheet, dry_run, plan
from flux_db.check.plan import times_seen
from flux_db.data.dataset import read_dataset
from flux_db.demo.pictures import draw_picture, write_demo_pictures
from flux_db.errors import UserError
from flux_db.output_folder import PICTURE_TABLE
from flux_db.settings.command_line import read_config

RESOLUTION = 16

# What becomes of a file.
FINE, REFUSED, IGNORED = "fine", "refused", "ignored"


def spoilt(spoil, kind="JPEG"):
    def make(path):
        buffer = io.BytesIO()
        pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, kind)
        path.write_bytes(spoil(buffer.getvalue()))

    return make


def textured(path, size=(64, 48), **options):
    """A picture that looks like no other of the folder."""
    rng = np.random.default_rng(list(os.fsencode(path.name)))
    small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(path, **options)


def sideways(path):
    exif = Image.Exif()
    exif[0x0112] = 6
    textured(path, (64, 32), exif=exif)


def two_pictures(path):
    first, second = (Image.new("RGB", (64, 48), colour) for colour in ("teal", "navy"))
    first.save(path, "MPO", save_all=True, append_images=[second])


def dog(path, change=lambda image: image, **options):
    change(draw_picture(96, 3, 0)).save(path, **options)


def cropped(image):
    return image.crop((1, 1, 95, 95))


def with_caption(data):
    def make(path):
        textured(path)
        path.with_suffix(".txt").write_bytes(data)

    return make


def text(path):
    path.write_text("not a picture")


def link(target):
    return lambda path: path.symlink_to(target)


def sparse(path):
    """Two GiB of nothing."""
    with path.open("wb") as file:
        file.truncate(2**31)


def caption_that_is(make):
    def both(path):
        textured(path)
        make(path.with_suffix(".txt"))

    return both


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200)
NFD = unicodedata.normalize("NFD", "été.png")

# Name; how it is made; what becomes of it; a part of its row in the table, or of the message.
AWKWARD = [
    # how pictures are stored: test_images checks their colours
    *((f"modes/{name}", make, FINE, "8,8,16,16") for name, make, *_ in MODES),
    ("sideways.jpg", sideways, FINE, "64,32,16,16"),
    ("two_pictures.jpg", two_pictures, FINE, "48,64"),
    ("bad_exif.jpg", lambda p: textured(p, exif=b"Exif\0\0II*\0\xff\xff\xff\x7f"), FINE, "48,64"),
    ("deep_tiff.tif", lambda p: textured(p, compression="tiff_lzw"), FINE, "48,64"),
    # sizes
    ("one_pixel.png", lambda p: textured(p, (1, 1)), FINE, "1 x 1 is smaller than 16"),
    ("thin.png", lambda p: textured(p, (900, 3)), FINE, "900 x 3 is smaller than 16"),
    ("bomb.png", lambda p: p.write_bytes(png(50_000, 50_000)), REFUSED, "50000 x 50000 is 2,500 megapixels"),
    # names and places
    ("UPPER.JPG", textured, FINE, "48,64"),
    ("mixed.WebP", textured, FINE, "48,64"),
    ("a b (1) 50%.png", textured, FINE, "48,64"),
    ("小狗🐶.png", textured, FINE, "48,64"),
    (NFD, textured, FINE, "48,64"),
    ("line\nbreak.png", textured, FINE, "48,64"),
    (os.fsdecode(b"no_text_\xff.png"), textured, FINE, "48,64"),
    ("x" * 240 + ".png", textured, FINE, "48,64"),
    ("a folder.jpg/inside.png", textured, FINE, "48,64"),
    ("-rf.png", textured, FINE, "48,64"),
    ("\x1b[2Jclear.png", textured, FINE, "48,64"),
    ("\u202egnp.gnp.png", textured, FINE, "48,64"),
    ('=HYPERLINK("x").png', textured, FINE, "48,64"),
    ("dangling.png", link("nowhere.png"), REFUSED, "cannot be read (No such file or directory)"),
    ("loop.png", link("loop.png"), REFUSED, "cannot be read (Too many levels of symbolic links)"),
    # no files at all
    ("pipe.png", os.mkfifo, REFUSED, "cannot be read (is a pipe, not a file)"),
    ("device.png", link("/dev/zero"), REFUSED, "cannot be read (is a device, not a file)"),
    ("sparse.png", sparse, REFUSED, "whatever its name says"),
    (".hidden.png", textured, None, ""),
    # damaged
    ("zero_bytes.jpg", lambda p: p.write_bytes(b""), REFUSED, "the file is empty"),
    ("cut.jpg", spoilt(cut), REFUSED, "damaged or cut short"),
    ("cut_at_the_end.jpg", spoilt(lambda data: data[:-60]), REFUSED, "damaged or cut short"),
    ("cut.png", spoilt(cut, "PNG"), REFUSED, "damaged or cut short"),
    ("cut.webp", spoilt(cut, "WEBP"), REFUSED, "damaged or cut short"),
    ("cut.bmp", spoilt(cut, "BMP"), REFUSED, "damaged or cut short"),
    ("cut.tif", spoilt(cut, "TIFF"), REFUSED, "damaged or cut short"),
    ("only_a_head.jpg", spoilt(lambda data: data[:10]), REFUSED, "damaged or cut short"),
    ("text.jpg", text, REFUSED, "whatever its name says"),
    ("page.png", lambda p: p.write_text("<html>404</html>"), REFUSED, "whatever its name says"),
    ("really_a_gif.png", lambda p: textured(p, format="GIF"), REFUSED, "whatever its name says"),
    ("really_heic.jpg", lambda p: p.write_bytes(HEIC), REFUSED, "whatever its name says"),
    ("postscript.jpg", lambda p: p.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n"), REFUSED, "whatever its name says"),
    ("broken_header.bmp", lambda p: p.write_bytes(b"BM" + struct.pack("<I", 9) + bytes(40)), REFUSED, ""),
    # captions
    ("captioned.png", with_caption(b"\xef\xbb\xbfa dog,\r\n on a bench \n"), FINE, 'a dog, on a bench"'),
    ("empty_caption.png", with_caption(b" \n"), FINE, "empty caption in"),
    ("latin_caption.png", with_caption("Zürich".encode("latin-1")), REFUSED, "not UTF-8 text"),
    ("nul_caption.png", with_caption(b"a dog\0"), REFUSED, "has a NUL character in it"),
    ("pipe_caption.png", caption_that_is(os.mkfifo), REFUSED, "cannot be read (is a pipe, not a file)"),
    ("device_caption.png", caption_that_is(link("/dev/zero")), REFUSED, "is a link out of the folder, and is not read"),
    ("secret_caption.png", caption_that_is(link("/etc/passwd")), REFUSED, "is a link out of the folder, and is not"),
    ("linked_caption.png", caption_that_is(link("captioned.txt")), FINE, 'a dog, on a bench"'),
    ("sparse_caption.png", caption_that_is(sparse), REFUSED, "cannot be read (has more than 1 MiB"),
    ("folder_caption.png", caption_that_is(Path.mkdir), FINE, "a photo of sks dog"),
    ("formula_caption.png", with_caption(b"=cmd|' /C calc'!A0"), FINE, "'=cmd|' /C calc'!A0"),
    ("escaped_caption.png", with_caption(b"a \x1b]0;title\x07 dog"), FINE, r"a \x1b]0;title\x07 dog"),
    # duplicates: of dog_a.png
    ("dog_a.png", dog, FINE, "96,96"),
    ("dog_b.png", dog, FINE, "the same picture as dog_a.png"),
    ("dog_c.jpg", dog, FINE, "looks like dog_a.png"),
    ("dog_half.webp", lambda p: dog(p, lambda image: image.resize((48, 48))), FINE, "looks like"),
    ("dog_cropped.png", lambda p: dog(p, cropped), FINE, "looks like"),
    # not pictures for us
    ("animation.gif", textured, IGNORED, ""),
    ("vector.svg", text, IGNORED, ""),
    ("notes.md", text, IGNORED, ""),
    ("orphan.txt", text, IGNORED, ""),
    ("Thumbs.db", text, IGNORED, ""),
    ("no_extension", text, IGNORED, ""),
    ("dog_a.mask.png", textured, REFUSED, "is not the shape of its picture"),
    ("dog_b.mask.png", os.mkfifo, REFUSED, "cannot be read (is a pipe, not a file)"),
    ("dog_c.mask.png", link("/dev/zero"), REFUSED, "cannot be read (is a device, not a file)"),
]


# What stands for a name in the table, if it is not the name itself.
SHOWN = {
    "-rf.png": "'-rf.png",
    '=HYPERLINK("x").png': '\'=HYPERLINK("x").png',
    "line\nbreak.png": r"line\nbreak.png",
    "\x1b[2Jclear.png": r"\x1b[2Jclear.png",
    "\u202egnp.gnp.png": r"\u202egnp.gnp.png",
    os.fsdecode(b"no_text_\xff.png"): r"no_text_\udcff.png",
}


def command(*flags, script=("-m", "flux_db", "check")):
    return program.run([program.PYTHON, *script, *map(str, flags)], timeout=120)


def flags(world, output, folder, *more):
    settings = world.settings(output, instance_data_dir=folder, resolution=RESOLUTION)
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))] + list(more)


@pytest.fixture(scope="module")
def awkward(world, tmp_path_factory):
    """The check of a folder with all awkward files."""
    base = tmp_path_factory.mktemp("awkward")
    folder = base / "pictures"
    folder.mkdir()
    for name, make, *_ in AWKWARD:
        (folder / name).parent.mkdir(exist_ok=True)
        make(folder / name)
    done = command(*flags(world, base / "out", folder))
    with open(base / "out" / PICTURE_TABLE, encoding="utf-8", newline="") as file:
        table = {row["file_name"]: row for row in csv.DictReader(file)}
    return folder, done, table


def test_there_are_enough_awkward_files():
    assert len({name for name, *_ in AWKWARD}) == len(AWKWARD) >= 40


@pytest.mark.parametrize(
    ("name", "outcome", "part"), [(name, *rest) for name, _, *rest in AWKWARD], ids=[ascii(row[0]) for row in AWKWARD]
)
def test_awkward_file(awkward, name, outcome, part):
    folder, done, table = awkward
    shown = SHOWN.get(name, name).removeprefix("'")
    # a picture whose caption cannot be read is itself fine
    of_caption = outcome == REFUSED and name.endswith("_caption.png")
    blamed = f"- --instance_data_dir: {folder / shown}:"
    blamed = blamed.replace("_caption.png", "_caption.txt") if of_caption else blamed
    problems = [line for line in done.stderr.splitlines() if line.startswith(blamed)]
    assert len(problems) == (outcome == REFUSED)
    assert all(part in problem for problem in problems)
    assert (SHOWN.get(name, name) in table) == (outcome == FINE or of_caption)
    if outcome == FINE:
        row = table[SHOWN.get(name, name)]
        line = ",".join(row.values()) if '"' not in part else f'{row["caption"]}"'
        assert part in line


def test_awkward_folder_as_a_whole(awkward):
    _, done, table = awkward
    outcomes = [outcome for _, _, outcome, _ in AWKWARD]
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "\u202e" not in done.stdout + done.stderr
    captions = [name for name, _, outcome, _ in AWKWARD if outcome == REFUSED and name.endswith("_caption.png")]
    assert len(table) == outcomes.count(FINE) + len(captions)
    assert f"error: {outcomes.count(REFUSED)} problems" in done.stderr
    assert f"other files, left alone: {outcomes.count(IGNORED)} (" in done.stdout
    assert "exact duplicates 1" in done.stdout and "near duplicates" in done.stdout


# A library for HEIC that reads PNG behind four letters, and registers itself as pillow-heif does.
PILLOW_HEIF = """
import io
from PIL import Image

def open_it(file, name):
    file.seek(4)
    return Image.open(io.BytesIO(file.read()))

def register_heif_opener():
    Image.register_open("HEIF", open_it, lambda head: head.startswith(b"HEIF"))
"""


@pytest.fixture
def phone(tmp_path):
    """A folder as it comes from a phone: JPEG and HEIC, a film, a list."""
    folder = tmp_path / "pictures"
    for name in ("a.jpg", "c.jpg"):
        textured(folder / name)
    textured(folder / "b.png")
    (folder / "b.HEIC").write_bytes(b"HEIF" + (folder / "b.png").read_bytes())
    (folder / "b.png").unlink()
    (folder / "film.mov").write_bytes(b"film")
    (folder / "list.csv").write_text("a,b")
    return folder


def test_heic_is_named_with_what_to_do_where_it_cannot_be_read(world, tmp_path, phone):
    if importlib.util.find_spec("pillow_heif"):
        pytest.skip("it can be read here")
    done = command(*flags(world, tmp_path / "out", phone))
    assert done.returncode == 0 and "Pictures: 2 in" in done.stdout
    told = f'{phone}: pictures left alone: 1 (b.HEIC); to read them, pip install -e ".[heic]", or convert them to JPEG'
    assert f"{told}, as in: magick mogrify -format jpg *.HEIC\n" in done.stdout
    assert f"{phone}: other files, left alone: 2 (film.mov, list.csv)\n" in done.stdout
    for name in ("a.jpg", "c.jpg"):
        (phone / name).unlink()
    done = command(*flags(world, tmp_path / "out", phone))
    assert done.returncode == 2 and "no pictures (" in done.stderr
    assert f'{phone}: pictures left alone: 1 (b.HEIC); to read them, pip install -e ".[heic]"' in done.stderr


def test_heic_is_read_where_the_library_is(world, tmp_path, phone):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "pillow_heif.py").write_text(PILLOW_HEIF)
    words = [program.PYTHON, "-m", "flux_db", "check", *flags(world, tmp_path / "out", phone)]
    done = program.run(words, env=program.environment(PYTHONPATH=str(tmp_path / "library")))
    assert done.returncode == 0, done.stderr
    assert "Pictures: 3 in" in done.stdout and "  b.HEIC " in done.stdout and "pictures left alone" not in done.stdout


@pytest.mark.skipif("avif" not in features.modules or not features.check("avif"), reason="Pillow without AVIF")
def test_avif_is_read_where_pillow_reads_it(world, tmp_path):
    textured(tmp_path / "pictures" / "a.avif", format="AVIF")
    done = command(*flags(world, tmp_path / "out", tmp_path / "pictures"))
    assert done.returncode == 0 and "  a.avif  64 x 48 " in done.stdout, done.stdout + done.stderr


# ---- what a run would do ----


def test_the_plan_of_a_run(world, tmp_path):
    more = ["--repeats=2", "--train_batch_size=2", "--num_train_epochs=5"]
    words = flags(world, tmp_path / "out", world.pictures, *more)
    at = words.index("--max_train_steps")
    del words[at : at + 2]
    done = command(*words)
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "Pictures: 3 in ", "dog_00.png  64 x 64  16 x 16  a photo of sks dog", "Warnings: none",
        "6: 3 pictures, each 2 times", "3 per epoch, 15 in all", "epochs             5",
        "is seen 10 times", "1 to compile: 16 x 16 (pictures: 3)",
    ):  # fmt: skip
        assert part in done.stdout, done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["contact_sheet.png", "pictures.csv"]
    dry = command(*words, "--dry_run", script=[str(program.SCRIPT)])
    assert (dry.returncode, dry.stderr) == (0, "")
    # but for the memory that is free at the moment
    assert [line for line in dry.stdout.splitlines() if "GB" not in line] == [
        line for line in done.stdout.splitlines() if "GB" not in line
    ]


def test_the_plan_of_a_bucketed_run_is_what_its_order_does(world, tmp_path):
    for number, size in enumerate([(64, 64), (96, 48), (48, 96), (96, 48), (64, 64)]):
        textured(tmp_path / "pictures" / f"{number}.png", size)
    config = world.config(
        tmp_path / "out", instance_data_dir=str(tmp_path / "pictures"), aspect_ratio_buckets="auto", resolution=64,
        train_batch_size=2, max_train_steps=None, num_train_epochs=4,
    )  # fmt: skip
    made = plan.make(config, read_dataset(config)[0])
    assert sorted(made.sizes.values()) == [1, 2, 2]
    assert (made.steps, made.steps_per_epoch, made.epochs) == (10, 2.5, 4)
    assert made.seen == (4, 4)


def test_sizes_are_shown_as_viewers_show_them_and_given_as_diffusers_takes_them(world, tmp_path):
    textured(tmp_path / "pictures" / "portrait.png", (48, 80))
    done = command(
        *flags(world, tmp_path / "out", tmp_path / "pictures", "--resolution=64", "--aspect_ratio_buckets=80,48")
    )
    assert "Sizes are width x height;" in done.stdout
    assert "portrait.png  48 x 80  48 x 80  a photo of sks dog" in done.stdout, done.stdout + done.stderr
    assert "1 to compile: 48 x 80 (pictures: 1)" in done.stdout


@pytest.mark.parametrize("flag", ["instance_data_dir", "validation_data_dir", "mask_dir"])
def test_a_missing_folder_is_one_problem(world, tmp_path, flag):
    pictures = tmp_path / "nowhere" if flag == "instance_data_dir" else world.pictures
    more = [] if flag == "instance_data_dir" else [f"--{flag}={tmp_path / 'nowhere'}"]
    with pytest.raises(UserError) as caught:
        dry_run.run(read_config(flags(world, tmp_path / "out", pictures, *more)))
    assert caught.value.problems == [f"--{flag} {tmp_path / 'nowhere'}: no such folder; check the path"]
    assert caught.value.problems[0].flag == flag


def test_pictures_that_are_held_out_are_counted(world, tmp_path, capsys):
    write_demo_pictures(tmp_path / "held", 2, 8)
    words = flags(world, tmp_path / "out", world.pictures, f"--validation_data_dir={tmp_path / 'held'}")
    assert dry_run.run(read_config(words)) == 0
    text = capsys.readouterr().out
    assert "examples per epoch 3\n" in text and "held out           2 pictures" in text
    assert f"{tmp_path / 'held' / 'dog_00.png'}: 8 x 8 is smaller than 16" in text


def test_class_pictures_are_counted_and_the_pictures_told_are_the_subjects(world, tmp_path, capsys):
    write_demo_pictures(tmp_path / "class", 2, 64)
    more = ["--with_prior_preservation", f"--class_data_dir={tmp_path / 'class'}", "--class_prompt=a dog"]
    assert dry_run.run(read_config(flags(world, tmp_path / "out", world.pictures, *more, "--num_class_images=5"))) == 0
    text = capsys.readouterr().out
    assert f"Pictures: 3 in {world.pictures}\n" in text
    assert "class pictures     5, of which 3 are still to be drawn" in text
    # without a folder of their own they are in the output folder
    (tmp_path / "class").rename(tmp_path / "out" / "class")
    assert dry_run.run(read_config(flags(world, tmp_path / "out", world.pictures, more[0], *more[2:]))) == 0
    assert "class pictures     100, of which 98 are still to be drawn" in capsys.readouterr().out


def test_all_problems_at_once_and_no_report_of_a_faulty_run(world, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "empty.jpg").write_bytes(b"")
    save(tmp_path / "pictures" / "good.jpg")
    wrong = ["--rank=0", "--learning_rat=1", "--alpha_background=blurple", "--pretrained_model_name_or_path=./nowhere"]
    for script in (("-m", "flux_db", "check"), (str(program.SCRIPT),)):
        extra = ["--dry_run"] if script[0] == str(program.SCRIPT) else []
        done = command(*flags(world, tmp_path / "out", tmp_path / "pictures", *wrong, *extra), script=script)
        assert (done.returncode, done.stdout) == (2, "")
        for part in ("error: 5 problems", "empty.jpg", "--rank 0", "--learning_rat", "blurple", "./nowhere"):
            assert part in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_long_list_of_wrong_sizes_is_a_short_message(world, tmp_path):
    sizes = ";".join(f"16,{width}" for width in range(5000))
    done = command(*flags(world, tmp_path / "out", world.pictures, f"--aspect_ratio_buckets={sizes}"))
    assert done.returncode == 2 and len(done.stderr) < 4000
    assert "16,1: both sides must be multiples of 16" in done.stderr and "5000 sizes, each a graph" in done.stderr


def test_check_refuses_an_upload_as_the_trainer_does(world, tmp_path):
    words = flags(world, tmp_path / "out", world.pictures, "--push_to_hub", "--hub_model_id", "../../x")
    for script in (("-m", "flux_db", "check"), (str(program.SCRIPT),)):
        done = command(*words, script=script)
        assert done.returncode == 2 and "--hub_model_id ../../x: is not a name for the hub" in done.stderr


def test_neither_mindspore_nor_datasets_is_imported(world, tmp_path):
    code = (
        "import sys; from flux_db.__main__ import main; code = main(sys.argv[1:]);"
        "print(code, sorted({'mindspore', 'mindone', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    words = ["check", *flags(world, tmp_path / "out", world.pictures)]
    assert command(*words, script=["-c", code]).stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(("samples", "repeats", "draws"), [(6, 1, 13), (6, 2, 13), (6, 3, 17), (5, 5, 12), (4, 1, 8)])
def test_times_seen_is_what_the_stream_does(samples, repeats, draws):
    from flux_db.stream import item

    counts = []
    for seed in range(200):
        drawn = [item(seed, k, samples) // repeats for k in range(draws)]
        counts += [drawn.count(picture) for picture in range(samples // repeats)]
    assert (min(counts), max(counts)) == times_seen(samples, repeats, draws)


# ---- the contact sheet ----


def cell(path, **changes):
    values = {"path": path, "size": (32, 32), "crop": (0.5, 0.5), "name": "a", "note": "b", "caption": "a dog"}
    return contact_sheet.Cell(**values | changes)


def test_the_sheet_shows_the_crop_that_the_model_sees(tmp_path):
    image = Image.new("RGB", (96, 32), (255, 0, 0))
    image.paste((0, 0, 255), (48, 0, 96, 32))
    image.save(tmp_path / "a.png")
    for crop, colour in [((0.0, 0.5), (255, 0, 0)), ((1.0, 0.5), (0, 0, 255))]:
        sheet = contact_sheet.draw([cell(tmp_path / "a.png", crop=crop)], "title", (255, 255, 255))
        pixels = np.asarray(sheet).reshape(-1, 3)
        assert (pixels == colour).all(axis=1).sum() == 224 * 224
        assert not (pixels == colour[::-1]).all(axis=1).any()


def test_a_tall_bucket_stays_tall_and_alpha_has_its_background(tmp_path):
    Image.new("RGBA", (64, 128), (0, 0, 0, 0)).save(tmp_path / "a.png")
    sheet = contact_sheet.draw([cell(tmp_path / "a.png", size=(64, 32))], "title", (0, 200, 0))
    green = (np.asarray(sheet) == (0, 200, 0)).all(axis=2)
    assert green.sum() == 224 * 112 and green.any(axis=1).sum() == 224


@pytest.mark.parametrize(
    "caption",
    ["", "x" * 3000, "word " * 500, "小狗" * 200, "a\u0301 🐶", "dog"],
    ids=["none", "x", "w", "cn", "e", "d"],
)
def test_any_caption_fits(tmp_path, caption):
    noise(tmp_path / "a.png")
    cells = [cell(tmp_path / "a.png", caption=caption), *[cell(tmp_path / "a.png")] * 29]
    sheet = contact_sheet.draw(cells, "title " * 100, (255, 255, 255))
    assert sheet.width == 10 * 164 + 12 and sheet.height < 3 * 300 + 100


def test_of_many_pictures_the_warned_ones_are_on_the_sheet(world, tmp_path, monkeypatch):
    monkeypatch.setattr(contact_sheet, "MOST_CELLS", 3)
    seen = []
    monkeypatch.setattr(contact_sheet, "draw", lambda cells, *_: seen.extend(cells) or Image.new("RGB", (1, 1)))
    write_demo_pictures(tmp_path / "pictures", 5, 64)
    save(tmp_path / "pictures" / "small.png", (8, 8), "red")
    assert dry_run.run(read_config(flags(world, tmp_path / "out", tmp_path / "pictures"))) == 0
    assert [c.name for c in seen] == ["small.png", "dog_00.png", "dog_01.png"]


# ---- the trigger word ----


def trigger_folder(tmp_path):
    write_demo_pictures(tmp_path / "pictures", 3, 64)
    for name, caption in {"dog_00": "a {trigger} dog", "dog_01": "[TRIGGER] sits", "dog_02": "a dog"}.items():
        (tmp_path / "pictures" / f"{name}.txt").write_text(caption)
    return tmp_path / "pictures"


def test_the_trigger_word_takes_its_place(world, tmp_path, capsys):
    words = flags(world, tmp_path / "out", trigger_folder(tmp_path), "--trigger_word", r"s\1ks")
    assert dry_run.run(read_config(words)) == 0
    text = capsys.readouterr().out
    assert r"a s\1ks dog" in text and r"s\1ks sits" in text and "{trigger}" not in text


def test_a_trigger_without_a_word_is_a_problem_that_names_the_files(world, tmp_path):
    folder = trigger_folder(tmp_path)
    with pytest.raises(UserError) as caught:
        dry_run.run(read_config(flags(world, tmp_path / "out", folder)))
    (problem,) = caught.value.problems
    assert problem.startswith("--trigger_word is missing: {trigger} is in the captions of ")
    assert "dog_00.png" in problem and "dog_01.png" in problem and "dog_02.png" not in problem


def test_a_trigger_word_that_is_used_nowhere_is_warned_of(world, tmp_path, capsys):
    words = flags(world, tmp_path / "out", world.pictures, "--trigger_word=sks")
    assert dry_run.run(read_config(words)) == 0
    warning = "--trigger_word sks: no caption and no prompt holds {trigger}"
    assert warning in capsys.readouterr().out
    (tmp_path / "prompts.txt").write_text("a [trigger] in a bucket")
    assert dry_run.run(read_config([*words, f"--validation_prompts_file={tmp_path / 'prompts.txt'}"])) == 0
    assert warning not in capsys.readouterr().out


# ---- the subject ----


def subject_lines(world, tmp_path, *words, folder=None):
    """The lines of `check` about the subject, as a user sees them."""
    done = program.run(program.command("check", *flags(world, tmp_path / "out", folder or world.pictures, *words)))
    assert done.returncode == 0, done.stderr
    about = ("sample prompt", "--instance_prompt", "caption of", "to train on")
    return [line.strip(" !") for line in done.stdout.splitlines() if any(part in line for part in about)]


def test_samples_of_another_subject_are_warned_of(world, tmp_path):
    samples = ["--validation_prompt={instance_prompt} at night", "--validation_prompt=a sks in a bucket"]
    others = ["a sks bird in a bucket", "a zwx dog", "a brown cat"]
    lines = subject_lines(world, tmp_path, *samples, *(f"--validation_prompt={text}" for text in others))
    hint = 'write it with {instance_prompt}, as in "{instance_prompt} in a bucket"'
    assert lines == [
        f'sample prompt "a sks bird in a bucket": asks for sks bird, but sks dog is trained; {hint}',
        f'sample prompt "a zwx dog": has zwx, but the subject\'s word is sks; {hint}',
    ]
    (line,) = subject_lines(world, tmp_path, "--validation_prompt=a brown cat", "--validation_prompt=a zwx dog")
    assert line == f"no sample shows the subject: no sample prompt has sks; {hint}"


def test_a_subject_without_a_word_and_of_few_pictures_is_warned_of(world, tmp_path):
    write_demo_pictures(tmp_path / "two", 2, 64)
    first, second = subject_lines(world, tmp_path, "--instance_prompt=a photo of my dog", folder=tmp_path / "two")
    assert first.startswith('--instance_prompt "a photo of my dog": has no rare word, such as sks,')
    assert second.startswith("two: only 2 pictures to train on:")
    write_demo_pictures(tmp_path / "three", 3, 64)
    for name, caption in {"dog_00": "sks sits", "dog_01": "a dog sits"}.items():
        (tmp_path / "three" / f"{name}.txt").write_text(caption)
    (line,) = subject_lines(world, tmp_path, folder=tmp_path / "three")
    assert f"the caption of {tmp_path / 'three/dog_01.png'} lacks sks, the subject's word" in line
