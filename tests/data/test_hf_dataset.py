"""--dataset_name: the pictures and captions of a Hugging Face dataset, through the real package."""

import io
import os
import sys

import program
import pytest
from picture_files import png
from PIL import Image

from flux_db.check import dry_run
from flux_db.data import hf_dataset
from flux_db.data.dataset import read_dataset
from flux_db.demo.pictures import draw_picture
from flux_db.errors import UserError
from flux_db.settings.command_line import read_config
from flux_db.settings.schema import to_flat_dict


def picture(number, kind="PNG"):
    buffer = io.BytesIO()
    draw_picture(32, number, 0).save(buffer, kind)
    return buffer.getvalue()


ROWS = {
    "image": [
        {"bytes": picture(0), "path": "a.png"},
        {"bytes": picture(1, "JPEG"), "path": None},
        {"bytes": picture(2, "GIF"), "path": "b.gif"},
    ],
    "text": ["a {trigger}", None, " two\nlines "],
    "number": [1, 2, 3],
}


def features():
    from datasets import Features, Value
    from datasets import Image as ImageFeature

    return Features({"image": ImageFeature(), "text": Value("string"), "number": Value("int64")})


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    return pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def places(datasets, tmp_path_factory):
    """The same three rows in the forms that people have on disk."""
    base = tmp_path_factory.mktemp("datasets")
    rows = datasets.Dataset.from_dict(ROWS, features=features())
    rows.save_to_disk(base / "saved")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(base / "splits")
    (base / "parquet").mkdir()
    rows.to_parquet(base / "parquet" / "data.parquet")
    (base / "folder").mkdir()
    for number, cell in enumerate(ROWS["image"]):
        (base / "folder" / f"{number}.png").write_bytes(cell["bytes"])
    (base / "folder" / "metadata.csv").write_text("file_name,text\n0.png,a {trigger}\n1.png,\n2.png,two lines\n")
    return base


def config(world, tmp_path, name, **changes):
    changes = {"caption_column": "text", "trigger_word": "sks", **changes}
    return world.config(
        tmp_path / "out", instance_data_dir=None, dataset_name=str(name), encode_cache_dir=str(tmp_path / "cache"),
        cache_dir=str(tmp_path / "hub"), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["saved", "splits", "parquet", "folder"])
def test_pictures_and_captions_of_a_local_dataset(world, places, tmp_path, form):
    data, _ = read_dataset(config(world, tmp_path, places / form))
    assert [sample.prompt for sample in data.examples] == ["a sks", "a photo of sks dog", "two lines"]
    assert [sample.picture.path.name for sample in data.examples] == [
        "row-000000.png",
        "row-000001.jpg",
        "row-000002.png",
    ]
    contents = [sample.picture.path.read_bytes() for sample in data.examples]
    assert contents[:2] == [picture(0), picture(1, "JPEG")]  # byte for byte
    assert Image.open(io.BytesIO(contents[2])).format == "PNG"


def test_exported_once_and_again_when_the_dataset_changes(world, places, tmp_path, monkeypatch):
    local = tmp_path / "local"
    local.mkdir()
    (local / "data.parquet").write_bytes((places / "parquet" / "data.parquet").read_bytes())
    settings = config(world, tmp_path, local)
    first = hf_dataset.export(settings)
    assert first.is_relative_to(tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)  # not even needed any more
        assert hf_dataset.export(settings) == first
    os.utime(local / "data.parquet", (1, 1))
    second = hf_dataset.export(settings)
    assert second != first
    names = [sorted(path.name for path in folder.iterdir()) for folder in (first, second)]
    assert names[0] == names[1] == ["metadata.jsonl", "row-000000.png", "row-000001.jpg", "row-000002.png"]
    assert (
        read_dataset(settings)[0].fingerprint()
        == read_dataset(config(world, tmp_path, places / "saved"))[0].fingerprint()
    )


def problems(settings):
    with pytest.raises(UserError) as caught:
        hf_dataset.export(settings)
    return caught.value.problems


def test_every_mistake_is_named(world, places, datasets, tmp_path):
    def of(name, **changes):
        return problems(config(world, tmp_path, name, **changes))

    saved = places / "saved"
    assert of(saved, image_column="img", caption_column="txt") == [
        f"--image_column img: {saved} has no such column, only image, text, number; did you mean image?",
        f"--caption_column txt: {saved} has no such column, only image, text, number; did you mean text?",
    ]
    assert of(saved, image_column="text", caption_column="number") == [
        f"--image_column text: this column of {saved} holds string, not pictures",
        f"--caption_column number: this column of {saved} holds int64, not texts",
    ]
    rows = datasets.Dataset.from_dict(ROWS, features=features())
    datasets.DatasetDict({"a": rows, "b": rows}).save_to_disk(tmp_path / "two")
    assert of(tmp_path / "two") == [f"--dataset_name {tmp_path / 'two'}: has no split train, only a, b"]
    with pytest.raises(UserError, match="has no rows"):  # the package itself can neither write nor read such a thing
        hf_dataset._check_columns(rows.select([]), config(world, tmp_path, saved))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1 no more")
    (problem,) = of(tmp_path / "broken")
    assert "cannot be loaded (ArrowInvalid: Parquet" in problem and "\n" not in problem
    (tmp_path / "empty").mkdir()
    (problem,) = of(tmp_path / "empty")
    assert problem.startswith(f"--dataset_name {tmp_path / 'empty'}: cannot be loaded (EmptyDatasetError: ")
    holes = {"image": [None, None], "text": ["a", "b"], "number": [1, 2]}
    datasets.Dataset.from_dict(holes, features=features()).save_to_disk(tmp_path / "holes")
    name = tmp_path / "holes"
    assert of(name) == [f"--dataset_name {name}: row {number} has no picture" for number in (0, 1)]
    assert list((tmp_path / "cache" / "datasets").iterdir()) == []  # nothing half-made is left


def test_a_damaged_picture_is_told_by_its_row(world, datasets, tmp_path, capsys):
    cells = [
        {"bytes": picture(0), "path": None},
        {"bytes": picture(1)[:50], "path": None},
        {"bytes": png(50_000, 50_000)},
    ]
    rows = {"image": [cell | {"path": None} for cell in cells], "text": ["a", "b", "c"], "number": [1, 2, 3]}
    datasets.Dataset.from_dict(rows, features=features()).save_to_disk(tmp_path / "rows")
    settings = to_flat_dict(config(world, tmp_path, tmp_path / "rows"))
    words = [f"--{name}={value}" for name, value in settings.items() if value and not isinstance(value, bool | list)]
    with pytest.raises(UserError) as caught:
        dry_run.run(read_config(words))
    assert len(caught.value.problems) == 2
    assert "row-000001.png" in caught.value.problems[0] and "row-000002.png" in caught.value.problems[1]
    assert "Pictures: 1 in" in capsys.readouterr().out


def test_a_local_dataset_needs_no_network(world, places, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import socket\n"
        "def refuse(*a, **k):\n    raise AssertionError('network call')\n"
        "socket.socket.connect = refuse\nsocket.getaddrinfo = refuse\n"
    )
    settings = to_flat_dict(config(world, tmp_path, places / "parquet"))
    words = [f"--{name}={value}" for name, value in settings.items() if value and not isinstance(value, bool | list)]
    done = program.run(program.command("check", *words), env=program.environment(PYTHONPATH=str(site)), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "network call" not in done.stderr and "a sks" in done.stdout


def test_without_the_package_the_error_says_what_to_install(world, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (problem,) = problems(config(world, tmp_path, "owner/name"))
    assert problem.startswith("--dataset_name owner/name: needs the package datasets")
    assert 'pip install -e ".[datasets]"' in problem


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "is not a file; take it out of the dataset"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a file; take it out of the dataset"),
        (lambda path: path.symlink_to("nowhere"), "cannot be read (No such file or directory)"),
    ],
    ids=["pipe", "device", "dangling"],
)
def test_what_is_no_file_in_a_local_dataset_is_named(world, tmp_path, make, problem):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(picture(0))
    make(tmp_path / "data" / "metadata.csv")
    with pytest.raises(UserError) as caught:
        read_dataset(config(world, tmp_path, tmp_path / "data"))
    assert caught.value.problems == [f"--dataset_name: {tmp_path / 'data' / 'metadata.csv'} {problem}"]


def test_a_row_that_names_a_device_has_no_picture(world, datasets, tmp_path):
    rows = {"image": [{"bytes": None, "path": "/dev/zero"}], "text": ["a dog"], "number": [1]}
    datasets.Dataset.from_dict(rows, features=features()).to_parquet(tmp_path / "data" / "a.parquet")
    with pytest.raises(UserError, match="row 0 has no picture"):
        read_dataset(config(world, tmp_path, tmp_path / "data"))
