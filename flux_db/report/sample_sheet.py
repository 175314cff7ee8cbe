"""All samples of a run in one picture: steps down, prompts across."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont, ImageOps

from flux_db.run.sample_files import Round, columns, spread

# A sheet stays below this, however long the run: cells shrink, and of many rounds some are shown.
MOST_ROUNDS = 32
MOST_PIXELS = 24_000_000
SMALLEST_CELL = 64
# Smaller samples than this are enlarged by a whole factor, so that they can be looked at and headings have room.
EASILY_SEEN = 128

GAP = 6
INK, PAPER = (40, 40, 40), (255, 255, 255)


def sample_sheet(rounds: list[Round]) -> Image.Image:
    """The sheet. Pictures are opened one by one, so that memory holds little more than the sheet itself."""
    shown = spread(rounds, MOST_ROUNDS)
    heads = columns(shown)
    width, height = _cell(shown, len(heads))
    font = ImageFont.load_default(size=max(11, min(28, width // 16)))
    line = font.size * 1.35
    margin = max(round(font.getlength(f"step {shown[-1].step}")) + 2 * GAP, 40)
    head = round(2 * line) + GAP
    size = (margin + len(heads) * (width + GAP), head + len(shown) * (height + GAP))
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for (left, right), prompt in _spans(heads):
        x, room = margin + left * (width + GAP), (right - left) * (width + GAP) - 2 * GAP
        for number, text in enumerate(_lines(prompt, font, room)):
            draw.text((x, GAP / 2 + number * line), text, INK, font)
    for row, round_ in enumerate(shown):
        y = head + row * (height + GAP)
        draw.text((GAP, y + height / 2), f"step {round_.step}", INK, font, anchor="lm")
        for picture in round_.pictures:
            x = margin + heads.index((picture.title, picture.number)) * (width + GAP)
            with Image.open(picture.path) as image:
                sheet.paste(_fitted(image.convert("RGB"), width, height), (x, y))
    return sheet


def _cell(rounds: list[Round], across: int) -> tuple[int, int]:
    """Width and height of a cell: the last picture's own, larger if that is small, if the sheet has room for it."""
    with Image.open(rounds[-1].pictures[0].path) as picture:
        factor = -(-EASILY_SEEN // max(picture.size)) if max(picture.size) < EASILY_SEEN else 1
        width, height = (side * factor for side in picture.size)
    scale = min(1.0, (MOST_PIXELS / (width * height * across * len(rounds))) ** 0.5)
    scale = max(scale, min(1.0, SMALLEST_CELL / min(width, height)))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _fitted(image: Image.Image, width: int, height: int) -> Image.Image:
    if image.size == (width, height):
        return image
    return ImageOps.contain(image, (width, height), Image.Resampling.LANCZOS)


def _spans(heads: list[tuple[str, int]]) -> list[tuple[tuple[int, int], str]]:
    """Neighbouring columns of the same prompt, which share one heading."""
    spans: list[tuple[tuple[int, int], str]] = []
    for column, (prompt, _) in enumerate(heads):
        if spans and spans[-1][1] == prompt:
            spans[-1] = ((spans[-1][0][0], column + 1), prompt)
        else:
            spans.append(((column, column + 1), prompt))
    return spans


def _lines(text: str, font: ImageFont.FreeTypeFont, room: float) -> list[str]:
    """The text in at most two lines of the given width, shortened where it does not fit."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= room or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < 2:
            lines.append(word)
        else:
            lines[-1] += " ..."
            break
    return [_shortened(line, font, room) for line in lines]


def _shortened(line: str, font: ImageFont.FreeTypeFont, room: float) -> str:
    if font.getlength(line) <= room:
        return line
    while line and font.getlength(f"{line} ...") > room:
        line = line[:-1]
    return f"{line.removesuffix(' ...').rstrip(' ,.;')} ..."
