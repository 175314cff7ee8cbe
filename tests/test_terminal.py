"""On a terminal: colour, and lines that fit. In a log: neither."""

import fcntl
import os
import pty
import struct
import termios

import program
import pytest

from flux_db.terminal import on_screen, strong


def on_terminal(words, columns=60, **variables):
    """What a program writes on a terminal of that width."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = program.environment(**{"TERM": "xterm-256color", **variables})
    process = program.start(words, env=env, stdout=terminal, stderr=terminal)
    os.close(terminal)
    text = b""
    try:
        while part := os.read(screen, 65536):
            text += part
    except OSError:  # so Linux says that the other side is closed
        pass
    process.wait()
    os.close(screen)
    return text.decode().replace("\r\n", "\n")


WRONG = program.command("check", "--instance_data_dir", "/nowhere", "--lr", "1", "--zero_stage=3")


def test_errors_are_red_and_fit_on_a_terminal():
    text = on_terminal(WRONG)
    assert text.startswith("\x1b[1;31merror:\x1b[0m ")
    assert all(len(line) <= 60 for line in text.splitlines()[1:])
    assert "- --zero_stage: not used here: a LoRA's gradients and\n  optimizer state are small" in text


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(variables):
    assert "\x1b" not in on_terminal(WRONG, **variables)


def test_a_log_has_neither_colours_nor_breaks():
    done = program.run(WRONG, env=program.environment(TERM="xterm-256color"))
    assert "\x1b" not in done.stderr and done.stderr.startswith("error: ")
    assert (
        "- --zero_stage: not used here: a LoRA's gradients and optimizer state are small and not sharded;"
        in done.stderr
    )


def test_check_fits_its_tables_and_marks_what_matters(world, tmp_path):
    settings = world.settings(tmp_path / "out", instance_prompt="a photo of sks dog " * 5, lr_warmup_steps=2)
    words = program.command("check", *program.flags(settings))
    text = on_terminal(words, columns=70)
    assert "\x1b[1m4\x1b[0m in all" in text and "\x1b[32mNo problems:\x1b[0m" in text
    assert "  \x1b[33m!\x1b[0m --lr_warmup_steps 2 is ignored" in text
    assert max(len(line) for line in text.splitlines() if line.startswith("  dog_0")) == 70
    plain = program.run(words).stdout
    assert "\x1b" not in plain and "\ue000" not in plain and "4 in all" in plain


class Screen:
    def __init__(self):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))

    def isatty(self):
        return True

    def fileno(self):
        return self.slave


@pytest.mark.parametrize(
    "lines",
    [
        ["short"],
        ["warning: a line of many words that does", "  not fit"],
        ["  memory      one and two and three and", "              four and"],
        ["  a row      of many      columns in a table that is wide"],
        ["see", "  /a/path/that/is/far/longer/than/the/screen", "  here"],
    ],
)
def test_lines_are_wrapped_between_words_and_tables_are_not(monkeypatch, lines):
    monkeypatch.setenv("NO_COLOR", "1")
    text = " ".join([lines[0], *(line.strip() for line in lines[1:])])
    assert on_screen(text, Screen()).split("\n") == lines
    assert on_screen(text, Screen(), wrap=False) == text
    assert on_screen(strong("1"), Screen()) == "1"
