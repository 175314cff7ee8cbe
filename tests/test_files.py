"""Reading files that somebody else wrote: never blocked, never more than such a file may have."""

import os
import threading
import time

import pytest

from flux_db.console import printable
from flux_db.errors import UserError
from flux_db.files import read_bytes, read_file_or_pipe, read_text, text_problem


def test_a_regular_file_and_a_link_to_one(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_text(tmp_path / "b") == "abc"


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/dev/null", "."])
def test_what_is_not_a_file_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    begin = time.monotonic()
    with pytest.raises(OSError, match="not a file"):
        read_bytes(tmp_path / name, 100)
    assert time.monotonic() - begin < 60


def test_too_much_is_refused_also_where_the_size_is_not_known(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 101)
    assert len(read_bytes(tmp_path / "a", 101)) == 101
    with pytest.raises(OSError, match="too much"):
        read_bytes(tmp_path / "a", 100)
    with pytest.raises(OSError, match="too much"):  # its size is said to be 0
        read_bytes("/proc/self/status", 10)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have(name):
    with pytest.raises(OSError, match="no file can have this name"):
        read_bytes(name, 10)


def test_a_pipe_is_read_to_its_end_but_not_for_ever(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"abc")
    with pytest.raises(OSError, match="is a pipe that was not written within"):
        read_file_or_pipe(f"/dev/fd/{reading}", 100, 0.2)  # its writer might still say more
    os.write(writing, b"def")
    os.close(writing)
    assert read_file_or_pipe(f"/dev/fd/{reading}", 100, 5) == b"def"
    assert read_file_or_pipe(f"/dev/fd/{reading}", 100, 5) == b""  # no writer can come any more
    os.close(reading)


def test_too_much_comes_out_of_a_pipe(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"x" * 1000)
    with pytest.raises(OSError, match="too much"):
        read_file_or_pipe(f"/dev/fd/{reading}", 100, 5)
    os.close(reading)
    os.close(writing)


def test_a_named_pipe_waits_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Timer(0.3, lambda: (tmp_path / "pipe").write_bytes(b"abc"))
    writer.start()
    assert read_file_or_pipe(tmp_path / "pipe", 100, 10) == b"abc"
    writer.join()


@pytest.mark.parametrize("text", ["dog é 犬", "", "line\nbreak"])
def test_texts_that_are_fine(text):
    assert text_problem(text) is None


@pytest.mark.parametrize("text", ["\0", "a\ud800", "\udcff.png"])
def test_texts_that_are_none(text):
    assert text_problem(text)


def test_what_comes_from_files_is_shown_escaped():
    assert printable("dog é 犬.png") == "dog é 犬.png"
    assert printable("a\x1b[2Jb\nc\udcffd") == r"a\x1b[2Jb\nc\udcffd"
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    assert str(UserError("no\nsuch file")) == r"no\nsuch file"
    assert str(UserError(["a\nb", "c"], ["more:", "  d"])) == "- a\\nb\n- c\nmore:\n  d"
