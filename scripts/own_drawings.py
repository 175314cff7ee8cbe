#!/usr/bin/env python
"""Five subjects drawn as by hand, of kinds that the small model knows, but not of the world that it was trained on.

    python scripts/own_drawings.py write outputs/drawings       # 5 x 5 drawings, to look at and to train on
    python scripts/own_drawings.py train outputs/drawings       # on each with the demo's settings and with
                                                                # configs/my_drawings_cpu.yaml, three seeds
    python scripts/own_drawings.py grid outputs/drawings docs/drawings.png

Needs the small model: scripts/demo.sh writes it. A run that is finished is not made again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter
from small_run import LORA_FILE, ROOT, bare, flag_words

from flux_db.run.sample_files import read_rounds

Colour = tuple[int, int, int]
Point = tuple[float, float]

SIDE, OVERSAMPLING = 256, 2
SHAKE = 0.006
SEEDS = (0, 1, 2)
BLACK: Colour = (30, 28, 34)
WHITE: Colour = (252, 250, 246)


class Pen:
    """A felt pen in a hand that shakes: an uneven black outline, filled."""

    def __init__(self, picture: Image.Image, rng: random.Random, turn: float = 0.0) -> None:
        self.draw, self.side, self.rng = ImageDraw.Draw(picture), picture.width, rng
        self.cos, self.sin = math.cos(turn), math.sin(turn)

    def placed(self, points: Sequence[Point], shake: float = SHAKE) -> list[Point]:
        found = []
        for x, y in points:
            x, y = x + self.rng.gauss(0, shake) - 0.5, y + self.rng.gauss(0, shake) - 0.6
            found.append(
                ((x * self.cos - y * self.sin + 0.5) * self.side, (x * self.sin + y * self.cos + 0.6) * self.side)
            )
        return found

    def shape(self, points: Sequence[Point], fill: Colour, shake: float = SHAKE) -> None:
        corners = self.placed(points, shake)
        self.draw.polygon(corners, fill=fill)
        self.draw.line([*corners, *corners[:2]], fill=BLACK, width=round(0.016 * self.side), joint="curve")

    def line(self, points: Sequence[Point], colour: Colour = BLACK, width: float = 0.016) -> None:
        self.draw.line(self.placed(points), fill=colour, width=round(width * self.side), joint="curve")

    def round(self, x: float, y: float, rx: float, ry: float, fill: Colour, corners: int = 22) -> None:
        turns = [2 * math.pi * i / corners for i in range(corners)]
        self.shape([(x + rx * math.cos(t), y + ry * math.sin(t)) for t in turns], fill, min(SHAKE, 0.06 * rx))

    def dot(self, x: float, y: float, r: float, fill: Colour = BLACK) -> None:
        (px, py), size = self.placed([(x, y)], 0.003)[0], r * self.side
        self.draw.ellipse([px - size, py - size, px + size, py + size], fill=fill)

    def star(self, x: float, y: float, r: float, fill: Colour) -> None:
        turns = [(math.pi * (i / 5 - 0.5), r if i % 2 == 0 else 0.45 * r) for i in range(10)]
        self.shape([(x + far * math.cos(t), y + far * math.sin(t)) for t, far in turns], fill)


def bird(pen: Pen) -> None:
    """Blue, with a crest of three red feathers and a star on its chest."""
    for x, tip in ((0.36, 0.26), (0.40, 0.36), (0.44, 0.46)):
        pen.shape([(x - 0.03, 0.36), (tip, 0.16), (x + 0.04, 0.36)], (224, 40, 48))
    pen.shape([(0.70, 0.58), (0.92, 0.46), (0.90, 0.66), (0.72, 0.70)], (20, 60, 150))
    pen.round(0.52, 0.63, 0.24, 0.22, (40, 110, 220))
    pen.round(0.40, 0.45, 0.15, 0.14, (40, 110, 220))
    pen.shape([(0.26, 0.42), (0.12, 0.48), (0.27, 0.52)], (250, 170, 30))
    pen.shape([(0.56, 0.54), (0.78, 0.62), (0.58, 0.74)], (20, 60, 150))
    pen.star(0.43, 0.68, 0.10, (255, 220, 50))
    pen.dot(0.36, 0.43, 0.032, WHITE)
    pen.dot(0.35, 0.43, 0.018)
    for x in (0.46, 0.58):
        pen.line([(x, 0.84), (x, 0.93), (x - 0.05, 0.94)], (230, 120, 20), 0.022)


def cat(pen: Pen) -> None:
    """Purple, with round glasses and a yellow scarf."""
    fur = (150, 90, 200)
    pen.line([(0.68, 0.88), (0.82, 0.80), (0.84, 0.62)], fur, 0.06)
    pen.round(0.52, 0.74, 0.20, 0.21, fur)
    for x, tip in ((0.36, 0.32), (0.62, 0.66)):
        pen.shape([(x - 0.06, 0.30), (tip, 0.12), (x + 0.08, 0.28)], fur)
    pen.round(0.50, 0.40, 0.22, 0.18, fur)
    pen.shape([(0.32, 0.54), (0.68, 0.54), (0.68, 0.62), (0.32, 0.62)], (252, 214, 40))
    pen.shape([(0.38, 0.60), (0.47, 0.60), (0.46, 0.80), (0.37, 0.80)], (252, 214, 40))
    for x in (0.40, 0.59):
        pen.round(x, 0.40, 0.075, 0.07, WHITE)
        pen.dot(x, 0.41, 0.02)
    pen.line([(0.47, 0.39), (0.52, 0.39)])
    pen.shape([(0.48, 0.48), (0.52, 0.48), (0.50, 0.505)], (240, 130, 150))
    for x in (0.44, 0.58):
        pen.round(x, 0.92, 0.06, 0.035, WHITE)


def cup(pen: Pen) -> None:
    """White, with a smiling face, a red heart and a straw."""
    pen.line([(0.60, 0.36), (0.70, 0.10)], (40, 170, 90), 0.035)
    pen.round(0.74, 0.62, 0.14, 0.14, WHITE)
    pen.round(0.74, 0.62, 0.07, 0.08, (190, 210, 225))
    pen.shape([(0.22, 0.36), (0.72, 0.36), (0.66, 0.92), (0.28, 0.92)], WHITE)
    pen.round(0.47, 0.36, 0.25, 0.05, (240, 150, 180))
    for x in (0.38, 0.55):
        pen.dot(x, 0.54, 0.027)
    pen.line([(0.38, 0.63), (0.43, 0.68), (0.50, 0.68), (0.55, 0.63)])
    heart = [(0.47, 0.87), (0.40, 0.79), (0.42, 0.74), (0.47, 0.77), (0.52, 0.74), (0.54, 0.79)]
    pen.shape(heart, (226, 36, 60))


def car(pen: Pen) -> None:
    """Green, with a shark's fin, teeth and a yellow lightning."""
    pen.shape([(0.50, 0.42), (0.66, 0.18), (0.70, 0.42)], (30, 130, 70))
    pen.shape([(0.32, 0.62), (0.40, 0.40), (0.72, 0.40), (0.78, 0.62)], (130, 205, 240))
    pen.shape([(0.08, 0.64), (0.30, 0.58), (0.90, 0.58), (0.94, 0.86), (0.10, 0.86)], (60, 190, 90))
    pen.line([(0.56, 0.40), (0.56, 0.58)])
    teeth = [(0.09, 0.74), (0.13, 0.80), (0.17, 0.74), (0.21, 0.80), (0.25, 0.74)]
    pen.shape([*teeth, (0.25, 0.71), (0.09, 0.71)], WHITE)
    pen.dot(0.20, 0.66, 0.03, WHITE)
    pen.dot(0.19, 0.66, 0.015)
    bolt = [(0.62, 0.62), (0.50, 0.74), (0.58, 0.74), (0.52, 0.84), (0.70, 0.70), (0.61, 0.70)]
    pen.shape(bolt, (255, 220, 40))
    for x in (0.28, 0.76):
        pen.round(x, 0.86, 0.09, 0.09, BLACK)
        pen.dot(x, 0.86, 0.04, (235, 90, 40))


def house(pen: Pen) -> None:
    """A mushroom: a white stem with a round door, a red roof with white dots."""
    pen.shape([(0.32, 0.52), (0.68, 0.52), (0.74, 0.93), (0.26, 0.93)], (250, 236, 200))
    roof = [(0.10, 0.56), (0.14, 0.38), (0.30, 0.22), (0.50, 0.16), (0.70, 0.22), (0.86, 0.38), (0.90, 0.56)]
    pen.shape(roof, (214, 36, 44))
    for x, y, r in ((0.30, 0.42, 0.06), (0.52, 0.30, 0.07), (0.70, 0.44, 0.06), (0.48, 0.50, 0.04)):
        pen.dot(x, y, r, WHITE)
    pen.round(0.50, 0.83, 0.085, 0.11, (70, 130, 200))
    pen.dot(0.54, 0.84, 0.014, (255, 220, 40))
    for x in (0.37, 0.63):
        pen.round(x, 0.66, 0.04, 0.04, (255, 226, 120))


SUBJECTS: dict[str, tuple[str, Callable[[Pen], None]]] = {
    "bird": ("zwx", bird), "cat": ("qpt", cat), "cup": ("vbk", cup), "car": ("jfq", car), "house": ("wxo", house),
}  # fmt: skip
"""Kind -> its rare word, and how it is drawn."""

PAGES: dict[str, tuple[Colour, Colour]] = {
    "on a meadow": ((150, 205, 250), (120, 200, 90)),
    "in a room": ((248, 226, 200), (190, 140, 90)),
    "in the forest": ((190, 225, 190), (90, 130, 70)),
    "in the city": ((210, 220, 235), (150, 150, 155)),
    "in the desert": ((252, 225, 170), (235, 195, 120)),
}
"""Where -> what is above and below the horizon."""


def drawing(kind: str, number: int) -> Image.Image:
    rng = random.Random(f"{kind}/{number}")
    side = SIDE * OVERSAMPLING
    above, below = list(PAGES.values())[number]
    picture = Image.new("RGB", (side, side), above)
    pen = Pen(picture, rng)
    horizon = 0.66
    pen.draw.polygon(
        pen.placed([(-0.1, horizon), (0.5, horizon - 0.02), (1.1, horizon), (1.1, 1.1), (-0.1, 1.1)]), below
    )
    for _ in range(6):  # strokes of a crayon
        x, y = rng.uniform(0, 1), rng.uniform(0.72, 0.98)
        pen.line([(x, y), (x + 0.06, y - 0.01)], tuple(round(0.85 * c) for c in below), 0.01)
    SUBJECTS[kind][1](Pen(picture, rng, rng.uniform(-0.05, 0.05)))
    return picture.filter(ImageFilter.GaussianBlur(0.7)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def write(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, where in enumerate(PAGES):
        drawing(kind, number).save(folder / f"{kind}_{number}.png")
        (folder / f"{kind}_{number}.txt").write_text(
            f"a photo of {SUBJECTS[kind][0]} {kind} {where}\n", encoding="utf-8"
        )


# --- training ----------------------------------------------------------------------------------------------------

MODEL = ROOT / "outputs/demo/model"
RECIPES = ("demo_cpu", "my_drawings_cpu")
"""Configs."""
PROMPTS = (
    *(f"a photo of {{word}} {{kind}} {where}" for where in ("on the beach", "in the snow", "at night", "in a room")),
    "a photo of a {colour} {kind} on the beach",
)
COLOURS = {"bird": "blue", "cat": "grey", "cup": "white", "car": "green", "house": "red"}
"""Of the class in the last prompt: near the subject's, so that what it loses is seen."""


def run_folder(work: Path, recipe: str, kind: str, seed: int) -> Path:
    return work / recipe / kind / f"seed-{seed}"


def train(work: Path, recipe: str, kind: str, seed: int) -> None:
    output, pictures = run_folder(work, recipe, kind, seed), work / "pictures" / kind
    if (output / LORA_FILE).is_file():
        return
    print(output, file=sys.stderr, flush=True)
    word = SUBJECTS[kind][0]
    flags = {
        "config": ROOT / f"configs/{recipe}.yaml",
        "pretrained_model_name_or_path": MODEL,
        "instance_data_dir": pictures,
        "instance_prompt": f"a photo of {word} {kind}",
        "output_dir": output,
        "seed": seed,
        "compile_cache_dir": work / "graphs",
        "num_validation_images": 1,
    }
    words = flag_words(flags)
    words += [f"--validation_prompt={text.format(word=word, kind=kind, colour=COLOURS[kind])}" for text in PROMPTS]
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_suffix(".log").open("w") as log:
        command = [sys.executable, str(ROOT / "train_dreambooth_lora_flux.py"), *words]
        if subprocess.run(command, cwd=ROOT, env=bare(), stdout=log, stderr=subprocess.STDOUT).returncode:
            sys.exit(f"{output} failed: {log.name}")


def grid(work: Path, recipes: Sequence[str], seeds: Sequence[int], cell: int = 96) -> Image.Image:
    """A row for each subject and seed: two of its drawings, then the last samples of each recipe."""
    rows = [
        [
            [work / "pictures" / kind / f"{kind}_{number}.png" for number in (0, 1)],
            *([picture.path for picture in read_rounds(run_folder(work, r, kind, seed))[-1].pictures] for r in recipes),
        ]
        for kind in SUBJECTS
        for seed in seeds
    ]
    widths = [len(group) * cell for group in rows[0]]
    gap = cell // 8
    sheet = Image.new("RGB", (sum(widths) + gap * (len(widths) - 1), cell * len(rows)), (255, 255, 255))
    for y, row in enumerate(rows):
        for number, group in enumerate(row):
            left = sum(widths[:number]) + gap * number
            for x, path in enumerate(group):
                with Image.open(path) as picture:
                    shown = picture.convert("RGB").resize((cell, cell), Image.Resampling.LANCZOS)
                sheet.paste(shown, (left + x * cell, y * cell))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write").add_argument("folder", type=Path)
    training = commands.add_parser("train")
    training.add_argument("folder", type=Path)
    training.add_argument("--kinds", nargs="+", default=list(SUBJECTS), choices=SUBJECTS)
    training.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    training.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    drawing = commands.add_parser("grid")
    drawing.add_argument("folder", type=Path)
    drawing.add_argument("file", type=Path)
    drawing.add_argument("--seeds", nargs="+", type=int, default=[0])
    given = parser.parse_args()
    if given.command == "grid":
        grid(given.folder, RECIPES, given.seeds).save(given.file)
        return
    pictures = given.folder if given.command == "write" else given.folder / "pictures"
    for kind in SUBJECTS:
        write(pictures / kind, kind)
    if given.command == "train":
        for recipe, kind, seed in itertools.product(given.recipes, given.kinds, given.seeds):
            train(given.folder, recipe, kind, seed)


if __name__ == "__main__":
    main()
