"""Progress of a long loop: a bar that is redrawn on a terminal, whole lines in a log."""

import io
import sys

import pytest

from flux_db import progress
from flux_db.console import say
from flux_db.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def redirect(monkeypatch):
    """Called in the test: pytest sets stderr anew after the fixtures."""

    def put(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return put


def work():
    """A loop of three items, with a line in between."""
    with progress_bar(total=5, initial=2, desc="training", unit="step") as bar:
        for step in range(3, 6):
            bar.update()
            bar.set_postfix({"loss": f"0.{step}"}, refresh=False)
            say(f"step {step}")


def test_a_log_has_whole_lines_only(redirect, monkeypatch):
    stream = redirect(io.StringIO())
    work()
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["step 3", "step 4", "step 5"] and len(lines) == 4
    assert lines[3].startswith("training: 100%|##########| 5/5 [") and lines[3].endswith("loss=0.5]")
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.0)
    work()
    assert [line[:14] for line in stream.getvalue().splitlines()[4::2]] == [
        "training:  60%", "training:  80%", "training: 100%", "training: 100%",
    ]  # fmt: skip
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_terminal_has_a_bar_that_is_redrawn(redirect):
    stream = redirect(Terminal())
    work()
    assert stream.getvalue().count("\r") > 3


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_items_pass_through_and_what_is_short_or_not_to_stay_leaves_no_line(redirect, kind):
    stream = redirect(kind())
    assert list(progress_bar("abc", desc="short", unit="item", delay=60)) == ["a", "b", "c"]
    assert stream.getvalue() == ""
    assert list(progress_bar(iter("abc"), desc="gone", unit="item", leave=False)) == ["a", "b", "c"]
    assert not stream.getvalue().rpartition("\r")[2].strip()
    assert list(progress_bar(["a"], desc="kept", unit="item")) == ["a"]
    assert "kept: 100%" in stream.getvalue() and "1/1" in stream.getvalue()


def test_a_loop_that_fails_shows_how_far_it_came(redirect):
    stream = redirect(io.StringIO())
    with pytest.raises(ValueError), progress_bar(total=4, desc="VAE", unit="picture") as bar:
        bar.update(3)
        raise ValueError
    assert stream.getvalue().startswith("VAE:  75%|")
