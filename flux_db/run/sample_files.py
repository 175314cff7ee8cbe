"""Sample pictures on disk: `samples/step-00250/00.png`; each file has its own prompt and seed in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from flux_db.atomic import write_png
from flux_db.files import open_regular
from flux_db.output_folder import GRID, SAMPLES
from flux_db.png_text import sample_text


@dataclass(frozen=True)
class SampleFile:
    path: Path
    prompt: str
    """Empty for a picture without it."""
    number: int
    """Which of the prompt's pictures."""
    options: str = ""
    """Of the prompt's line, such as --w 768: what this picture has otherwise than the rest."""

    @property
    def title(self) -> str:
        """The prompt with its options."""
        return f"{self.prompt} {self.options}".strip()


@dataclass(frozen=True)
class Round:
    """The pictures drawn at one step."""

    step: int
    pictures: tuple[SampleFile, ...]


def round_folder(output: Path, step: int) -> Path:
    return output / SAMPLES / f"step-{step:05d}"


def count(output: Path, step: int) -> int:
    """How many pictures of a round are there."""
    return sum(1 for _ in round_folder(output, step).glob("*.png"))


def write(path: Path, picture: Image.Image, *, prompt: str, number: int, seed: int, options: str = "") -> None:
    write_png(path, picture, pnginfo=sample_text(prompt, number, seed, options))


def read_rounds(output: Path) -> list[Round]:
    """All rounds with a picture, in order of steps. Nothing is decoded."""
    found = []
    for folder in (output / SAMPLES).glob("step-*"):
        digits = folder.name.removeprefix("step-")
        if digits.isdecimal() and (pictures := read_folder(folder)):
            found.append(Round(int(digits), pictures))
    return sorted(found, key=lambda round_: round_.step)


def read_folder(folder: Path) -> tuple[SampleFile, ...]:
    """The sound pictures of a folder, in order of their names, without the sheet of all of them."""
    paths = sorted(path for path in folder.glob("*.png") if path.name != GRID)
    return tuple(picture for path in paths if (picture := _read(path)))


def _read(path: Path) -> SampleFile | None:
    try:
        with open_regular(path) as file, Image.open(file, formats=("PNG",)) as picture:
            about = picture.info
    except Exception:  # a damaged file raises anything
        return None
    number = str(about.get("number", path.stem))
    number = int(number) if re.fullmatch(r"\d{1,9}", number) else 0
    return SampleFile(path, str(about.get("prompt", "")), number, str(about.get("options", "")))


def folders_after(output: Path, step: int) -> Iterator[Path]:
    """The folders of rounds after a step, whatever is in them."""
    for folder in (output / SAMPLES).glob("step-*"):
        digits = folder.name.removeprefix("step-")
        if digits.isdecimal() and int(digits) > step:
            yield folder


def forget(output: Path, step: int) -> None:
    shutil.rmtree(round_folder(output, step), ignore_errors=True)


def forget_after(output: Path, step: int) -> bool:
    """Remove the rounds of steps that a resumed run has still before it; true if there were any."""
    folders = list(folders_after(output, step))
    for folder in folders:
        shutil.rmtree(folder)
    return bool(folders)


def columns(rounds: list[Round]) -> list[tuple[str, int]]:
    """(title, number) of every column that a table of the rounds needs, in order of appearance."""
    return list(dict.fromkeys((p.title, p.number) for round_ in rounds for p in round_.pictures))


def spread(rounds: list[Round], most: int) -> list[Round]:
    """At most so many rounds, evenly chosen; the first and the last are always among them."""
    if len(rounds) <= most:
        return rounds
    return [rounds[round(i * (len(rounds) - 1) / (most - 1))] for i in range(most)]
