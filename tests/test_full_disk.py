"""A disk that is full: a real small file system where one can be mounted, a limit on the size of files otherwise."""

import errno
import json
import resource
import sys
import threading
from contextlib import contextmanager

import pytest
from PIL import Image
from program import ROOT, command, run

from flux_db.atomic import leftovers, write_file, write_folder
from flux_db.line_file import LineFile
from flux_db.run.metrics_log import Metrics, MetricsLog
from flux_db.run.status import read_status, write_status
from flux_db.settings.schema import from_flat_dict

sys.path.insert(0, str(ROOT / "scripts"))
from full_disk import RESUME_AT, FullDisk, small_disk

BALLAST = "ballast"


@pytest.fixture
def disk(tmp_path):
    """A file system of 64 KiB."""
    with small_disk(tmp_path / "disk", 64 * 1024) as small:
        if small.limit is not None:
            pytest.skip("nothing can be mounted here: only root can")
        yield small.folder


def fill(disk):
    with (disk / BALLAST).open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


@contextmanager
def limited_files(size):
    """Files beyond the size are refused, in this process: what any user can have."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def config(output, **changes):
    values = {"pretrained_model_name_or_path": "owner/model", "instance_data_dir": "pictures", "instance_prompt": "dog"}
    return from_flat_dict(values | {"output_dir": str(output)} | changes)


# --- single files ------------------------------------------------------------------------------------------------


def test_an_error_names_the_file_and_the_old_one_stays(disk):
    write_file(disk / "settings", b"old")
    fill(disk)
    with pytest.raises(OSError, match="No space left") as caught:
        write_file(disk / "settings", bytes(8192))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(disk / "settings"))
    with pytest.raises(OSError, match="No space left") as caught:
        write_folder(disk / "folder", {"a": bytes(8192)})
    assert caught.value.filename in (str(disk / "folder"), str(disk / "folder" / "a"))
    assert (disk / "settings").read_bytes() == b"old" and leftovers(disk) == []


def check_lines(file, lines):
    """The file has the first of the lines, each whole."""
    text = file.read_text() if file.exists() else ""
    assert text == "".join(f"{line}\n" for line in lines[: text.count("\n")])
    return text.count("\n")


def test_lines_wait_for_room_and_none_is_cut(disk, capfd):
    lines = [json.dumps({"step": n, "text": "x" * 300}) for n in range(200)]
    file = LineFile(disk / "metrics.jsonl")
    for line in lines[:50]:
        file.append(line)
    fill(disk)
    for line in lines[50:150]:
        file.append(line)
    file.flush()
    assert 50 <= check_lines(file.path, lines) < 100
    assert capfd.readouterr().err.count("metrics.jsonl cannot be written: No space left on device") == 1
    (disk / BALLAST).unlink()
    for line in lines[150:]:
        file.append(line)
    file.close()
    assert check_lines(file.path, lines) == 200
    assert capfd.readouterr().err == ""


def test_lines_wait_for_room_under_a_limit(tmp_path, capfd):
    lines = [f"line {n}" for n in range(300)]
    file = LineFile(tmp_path / "lines")
    with limited_files(1000):
        for line in lines[:200]:
            file.append(line)
    assert 50 < check_lines(file.path, lines) < 200
    for line in lines[200:]:
        file.append(line)
    with limited_files(1000):
        file.append("one too many")
        file.close()
    assert check_lines(file.path, lines) == 300
    text = capfd.readouterr().err
    assert text.count("cannot be written: File too large") == 2
    assert f"warning: the last 1 lines are missing in {file.path}" in text


def test_the_status_of_a_run_is_the_old_one_and_nothing_ends(disk, capfd):
    write_status(disk, "running", step=1, last_good_checkpoint=None)
    fill(disk)
    write_status(disk, "running", step=2, last_good_checkpoint=None, message="x" * 5000)
    assert read_status(disk).step == 1
    assert "warning: the run's status was not written: " in capfd.readouterr().err


# --- trackers ----------------------------------------------------------------------------------------------------


def in_time(work, seconds=60):
    """Run it, and fail instead of hanging with it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


def step(number):
    return Metrics(step=number, epoch=1.0, loss=0.5, lr=1e-4, grad_norm=1.0, seconds=0.1, skipped=0)


def test_tensorboard_is_given_up_and_never_waited_for(disk, capfd):
    (disk / "logs").mkdir()

    def work():
        metrics_log = MetricsLog(config(disk, report_to="tensorboard"), total_steps=3000, first_step=0)
        fill(disk)
        for number in range(3000):
            metrics_log.step(step(number))
            if number % 100 == 0:
                metrics_log.picture("samples", Image.new("RGB", (64, 64)), number)
        (disk / BALLAST).unlink()
        metrics_log.close()

    in_time(work)
    text = capfd.readouterr().err
    assert text.count("tensorboard is given up: OSError: [Errno 28] No space left on device") == 1
    assert "Traceback" not in text
    rows = [json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows))) and len(rows) > 100


def test_tensorboard_that_has_no_room_to_start_is_left_out(disk, capfd):
    fill(disk)
    in_time(lambda: MetricsLog(config(disk, report_to="tensorboard"), total_steps=1, first_step=0).close())
    assert capfd.readouterr().err.count("warning: tensorboard is left out: ") == 1


# --- commands ----------------------------------------------------------------------------------------------------


def test_commands_say_in_one_line_what_could_not_be_written(disk, tmp_path):
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "config.yaml").write_text("rank: 4\n")
    fill(disk)
    for words, name in (
        (("report", run_folder, "-o", disk / "page.html"), disk / "page.html"),
        (("tiny-model", disk / "model"), disk / "model"),
        (("demo-pictures", disk / "pictures"), disk / "pictures"),
    ):
        done = run(command(*words))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {name}") and "No space left on device; make room" in done.stderr
        assert done.stderr.count("\n") == 1
    assert {path.name for path in disk.iterdir()} == {BALLAST}


# --- runs --------------------------------------------------------------------------------------------------------


def test_runs_on_small_disks(tmp_path):
    """One has no room for all checkpoints, one hardly any at all; scripts/full_disk.py tries more."""
    disks = FullDisk(tmp_path)
    none = disks.run(disks.enough // 10, resumed=False)
    assert (none.exit_code, none.problems) == (1, [])
    some = disks.run(disks.enough // 3, resumed=True)
    assert some.problems == []
    if disks.mounts:
        assert some.exit_code == 1 and "checkpoint-" in some.message and some.step > RESUME_AT, some
