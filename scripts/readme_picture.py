"""The picture at the top of the README, from a finished demo: python scripts/readme_picture.py

The training pictures in a row, and the run's sample sheet below. Writes docs/demo.png.
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

DEMO = Path("outputs/demo")
RESULT = Path("docs/demo.png")
CELL, GAP, TEXT = 128, 6, (40, 40, 40)


def main() -> None:
    sheet = Image.open(DEMO / "run/samples/grid.png").convert("RGB")
    paths = sorted((DEMO / "pictures").glob("*.png"))
    font = ImageFont.load_default(size=13)
    head = 24
    picture = Image.new("RGB", (sheet.width, head + CELL + 4 * GAP + sheet.height), "white")
    draw = ImageDraw.Draw(picture)
    left = sheet.width - len(paths) * (CELL + GAP)
    draw.text((GAP, 4), "Trained on these five pictures of sks dog:", TEXT, font)
    for number, path in enumerate(paths):
        small = Image.open(path).convert("RGB").resize((CELL, CELL), Image.Resampling.LANCZOS)
        picture.paste(small, (left // 2 + number * (CELL + GAP), head))
    picture.paste(sheet, (0, head + CELL + 4 * GAP))
    picture.quantize(192, dither=Image.Dither.NONE).save(RESULT, optimize=True)
    print(f"{RESULT}: {RESULT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
