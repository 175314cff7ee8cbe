"""A sheet of pictures as the model will see them, with their captions below."""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flux_db.data.pixels import load_rgb, resize_and_crop
from flux_db.size import Size

# More make a sheet that nobody reads and that takes its time: every picture is decoded in full.
MOST_CELLS = 60
FEW_CELLS = 24
GAP = 12
LINE = 17
FONT_SIZE = 13
CAPTION_LINES = 4
WARNING_LINES = 2
PAPER, INK, GREY, RED = (255, 255, 255), (20, 20, 20), (110, 110, 110), (190, 20, 20)
FRAME = (225, 225, 225)
# For captions beyond the letters of PIL's own font, if the machine has one of these.
WIDE_FONTS = ("NotoSansCJK-Regular.ttc", "NotoSans-Regular.ttf", "DejaVuSans.ttf", "Arial Unicode.ttf")

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Line = tuple[str, tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One picture on the sheet."""

    path: Path
    size: Size
    """Height and width that the model sees."""
    crop: tuple[float, float]
    name: str
    note: str
    caption: str
    warnings: tuple[str, ...] = ()


def draw(cells: Sequence[Cell], title: str, background: tuple[int, int, int]) -> Image.Image:
    """The sheet; at most MOST_CELLS cells are meant to be given."""
    side, columns = (224, 6) if len(cells) <= FEW_CELLS else (152, 10)
    columns = min(columns, len(cells))
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    texts = [[_lines(cell, side) for cell in row] for row in rows]
    heights = [side + LINE * max(map(len, row)) + GAP for row in texts]
    heading = _wrap(title, columns * (side + GAP), 3)
    top = GAP + LINE * len(heading) + GAP
    sheet = Image.new("RGB", (columns * (side + GAP) + GAP, top + sum(heights)), PAPER)
    pen = ImageDraw.Draw(sheet)
    _write(pen, (GAP, GAP), [(line, INK) for line in heading])
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        views = pool.map(lambda cell: _view(cell, side, background), cells)
        for row, lines, height in zip(rows, texts, heights, strict=True):
            for column in range(len(row)):
                view, left = next(views), GAP + column * (side + GAP)
                across, down = left + (side - view.width) // 2, top + (side - view.height) // 2
                pen.rectangle((across - 1, down - 1, across + view.width, down + view.height), outline=FRAME)
                sheet.paste(view, (across, down))
                _write(pen, (left, top + side + 2), lines[column])
            top += height
    return sheet


def _view(cell: Cell, side: int, background: tuple[int, int, int]) -> Image.Image:
    pixels = resize_and_crop(load_rgb(cell.path, background), cell.size, cell.crop)
    pixels = ((pixels + 1) * 127.5).round().astype(np.uint8)
    image = Image.fromarray(pixels.transpose(1, 2, 0))  # [3, H, W] -> [H, W, 3]
    scale = side / max(image.size)
    size = [max(1, round(length * scale)) for length in image.size]
    # Enlarged without smoothing: what the model sees is as coarse as this.
    return image.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)


def _lines(cell: Cell, width: int) -> list[Line]:
    lines = [(line, INK) for line in _wrap(cell.name, width, 1)]
    lines += [(line, GREY) for line in _wrap(cell.note, width, 1)]
    lines += [(line, INK) for line in _wrap(cell.caption, width, CAPTION_LINES)]
    return lines + [(line, RED) for warning in cell.warnings for line in _wrap(warning, width, WARNING_LINES)]


def _wrap(text: str, width: int, most: int) -> list[str]:
    """At most so many lines of the text, broken between words where there are any; what is cut off shows as dots."""
    font = _font(text)
    lines, rest = [], text
    while rest:
        end = _fitting(font, rest, width)
        if end < len(rest) and len(lines) == most - 1:
            return [*lines, rest[: _fitting(font, rest, width - font.getlength("..."))] + "..."]
        if end < len(rest) and not rest[end].isspace() and (space := rest.rfind(" ", 0, end)) > 0:
            end = space
        lines.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    return lines


def _fitting(font: Font, text: str, width: float) -> int:
    """How many letters of the text fit into the width, at least one."""
    return max(1, bisect.bisect_right(range(1, len(text) + 1), width, key=lambda end: font.getlength(text[:end])))


def _write(pen: ImageDraw.ImageDraw, place: tuple[int, int], lines: Sequence[Line]) -> None:
    left, top = place
    for text, colour in lines:
        pen.text((left, top), text, fill=colour, font=_font(text))
        top += LINE


def _font(text: str) -> Font:
    return _wide_font() if any(ord(letter) > 0x17F for letter in text) else _plain_font()


@functools.cache
def _plain_font() -> Font:
    return ImageFont.load_default(FONT_SIZE)


@functools.cache
def _wide_font() -> Font:
    for name in WIDE_FONTS:
        try:
            return ImageFont.truetype(name, FONT_SIZE)
        except OSError:
            continue
    return _plain_font()
