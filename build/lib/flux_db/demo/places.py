"""Places of the drawn world: sky, ground, and what stands between them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from PIL import Image

from flux_db.demo.brush import INK, WHITE, Brush, Colour, blend

HORIZON = 0.64


def backdrop(side: int, stops: list[tuple[float, Colour]]) -> Image.Image:
    """A picture whose rows run through colours; two stops at one height make an edge."""
    heights = np.array([height for height, _ in stops])
    colours = np.array([colour for _, colour in stops], np.float64)
    rows = (np.arange(side) + 0.5) / side
    column = np.stack([np.interp(rows, heights, colours[:, i]) for i in range(3)], axis=-1)
    return Image.fromarray(column.round().astype(np.uint8)[:, None]).resize((side, side), Image.Resampling.NEAREST)


def cloud(brush: Brush, x: float, y: float, size: float, colour: Colour = WHITE) -> None:
    for dx, dy, r in ((-0.9, 0.1, 0.5), (0.0, -0.15, 0.75), (0.9, 0.1, 0.5), (0.3, 0.25, 0.6), (-0.4, 0.25, 0.55)):
        brush.disc(x + dx * size, y + dy * size, r * size, r * size * 0.75, colour)


def tree(brush: Brush, x: float, ground: float, size: float, leaves: Colour, *, pine: bool) -> None:
    trunk = (128, 88, 62)
    brush.box(x - 0.1 * size, ground - 0.5 * size, x + 0.1 * size, ground, trunk, 0.2)
    if pine:
        for y, wide in ((0.35, 0.5), (0.8, 0.42), (1.2, 0.32)):
            brush.shape(
                [
                    (x - wide * size, ground - y * size),
                    (x, ground - (y + 0.75) * size),
                    (x + wide * size, ground - y * size),
                ],
                leaves,
                0.22,
            )
    else:
        for dx, dy, r in ((-0.35, 0.8, 0.4), (0.35, 0.8, 0.4), (0.0, 1.1, 0.5)):
            brush.disc(x + dx * size, ground - dy * size, r * size, r * size, leaves, 0.0)


def scattered(rng: random.Random, count: int, top: float = HORIZON + 0.04) -> list[tuple[float, float]]:
    return [(rng.uniform(0, 1), rng.uniform(top, 0.99)) for _ in range(count)]


def meadow(side: int, rng: random.Random) -> Image.Image:
    green = (138, 200, 96)
    picture = backdrop(side, [(0, (110, 188, 240)), (HORIZON, (206, 236, 250)), (HORIZON, green), (1, (104, 176, 78))])
    brush = Brush(picture)
    brush.disc(rng.choice([0.14, 0.86]), 0.14, 0.085, 0.085, (255, 226, 110))
    for _ in range(2):
        cloud(brush, rng.uniform(0.1, 0.9), rng.uniform(0.12, 0.3), rng.uniform(0.06, 0.09))
    for _ in range(2):
        brush.disc(rng.uniform(0, 1), HORIZON + 0.1, rng.uniform(0.3, 0.5), rng.uniform(0.16, 0.22), (122, 190, 96))
    brush.box(-0.1, HORIZON + 0.06, 1.1, 0.8, green, 0)
    for x, y in scattered(rng, 9, HORIZON + 0.1):
        brush.disc(x, y, 0.018, 0.018, rng.choice([WHITE, (255, 220, 80), (250, 140, 170)]))
    return picture


def beach(side: int, rng: random.Random) -> Image.Image:
    sand = (244, 220, 160)
    shore = HORIZON + rng.uniform(0.02, 0.08)
    sea = 0.42
    picture = backdrop(
        side,
        [
            (0, (104, 196, 242)),
            (sea, (208, 240, 250)),
            (sea, (38, 150, 204)),
            (shore, (92, 208, 220)),
            (shore, sand),
            (1, (232, 200, 132)),
        ],
    )
    brush = Brush(picture)
    brush.disc(rng.uniform(0.15, 0.85), 0.14, 0.09, 0.09, (255, 232, 120))
    for _ in range(5):
        x, y = rng.uniform(0, 1), rng.uniform(sea + 0.04, shore - 0.06)
        brush.curve([(x - 0.06, y), (x + 0.06, y)], 0.013, (150, 222, 236))
    brush.curve([(i / 8, shore + (0.012 if i % 2 else -0.012)) for i in range(9)], 0.035, WHITE)
    if rng.random() < 0.6:
        x = rng.choice([0.1, 0.9])
        brush.curve([(x, 0.8), (x + 0.02, 0.5), (x, 0.27)], 0.045, (150, 104, 66))
        for dx, dy in ((-0.18, 0.08), (-0.15, -0.07), (0.0, -0.14), (0.15, -0.07), (0.18, 0.08)):
            brush.curve([(x, 0.27), (x + dx * 0.6, 0.24 + dy * 0.6), (x + dx, 0.29 + dy)], 0.04, (70, 160, 84))
    for x, y in scattered(rng, 4, shore + 0.1):
        brush.disc(x, y, 0.02, 0.014, rng.choice([(250, 150, 130), (255, 244, 226)]))
    return picture


def snow(side: int, rng: random.Random) -> Image.Image:
    picture = backdrop(
        side, [(0, (150, 178, 214)), (HORIZON, (214, 226, 242)), (HORIZON, (240, 246, 253)), (1, (214, 228, 244))]
    )
    brush = Brush(picture)
    for x, size in ((rng.uniform(0, 0.35), 0.3), (rng.uniform(0.5, 1), 0.36)):
        brush.shape([(x - size, HORIZON + 0.01), (x, HORIZON - size), (x + size, HORIZON + 0.01)], (136, 158, 192), 0)
        brush.shape(
            [(x - size / 3, HORIZON - size * 0.66), (x, HORIZON - size), (x + size / 3, HORIZON - size * 0.66)],
            WHITE,
            0,
        )
    for x in (rng.uniform(0.02, 0.2), rng.uniform(0.8, 0.98)):
        tree(brush, x, HORIZON + 0.07, 0.19, (92, 140, 130), pine=True)
    brush.disc(rng.uniform(0.2, 0.8), 1.0, 0.8, 0.36, (244, 249, 254))
    for _ in range(16):
        brush.disc(rng.uniform(0, 1), rng.uniform(0, 0.95), 0.015, 0.015, WHITE)
    return picture


def night(side: int, rng: random.Random) -> Image.Image:
    picture = backdrop(side, [(0, (20, 22, 66)), (HORIZON, (70, 66, 134)), (HORIZON, (40, 62, 84)), (1, (26, 40, 62))])
    brush = Brush(picture)
    x = rng.uniform(0.12, 0.88)
    brush.disc(x, 0.17, 0.1, 0.1, (250, 240, 196))
    if rng.random() < 0.5:
        brush.disc(x + 0.045, 0.15, 0.085, 0.085, (24, 26, 72))
    for _ in range(14):
        size = rng.choice([0.009, 0.013, 0.017])
        brush.disc(rng.uniform(0, 1), rng.uniform(0.02, 0.55), size, size, (255, 246, 200))
    for _ in range(2):
        brush.disc(rng.uniform(0, 1), HORIZON + 0.1, rng.uniform(0.3, 0.5), rng.uniform(0.14, 0.22), (44, 54, 92))
    brush.box(-0.1, HORIZON + 0.06, 1.1, 0.75, (38, 58, 80), 0)
    return picture


def room(side: int, rng: random.Random) -> Image.Image:
    wall = rng.choice([(246, 214, 190), (232, 222, 188), (240, 206, 206)])
    picture = backdrop(side, [(0, wall), (HORIZON, wall), (HORIZON, (196, 142, 94)), (1, (172, 118, 76))])
    brush = Brush(picture)
    for x in range(1, 8, 2):
        brush.box(x / 8, 0, (x + 1) / 8, HORIZON, blend(wall, WHITE, 0.28), 0)
    brush.box(-0.1, HORIZON - 0.035, 1.1, HORIZON, (250, 244, 234), 0)
    for y in (0.74, 0.86):
        brush.curve([(0, y), (1, y)], 0.01, (150, 100, 64))
    x = rng.choice([0.2, 0.8])
    brush.box(x - 0.15, 0.1, x + 0.15, 0.42, (250, 246, 238), 0.25)
    brush.box(x - 0.12, 0.13, x + 0.12, 0.39, (160, 214, 244), 0)
    brush.curve([(x, 0.13), (x, 0.39)], 0.022, (250, 246, 238))
    brush.curve([(x - 0.12, 0.26), (x + 0.12, 0.26)], 0.022, (250, 246, 238))
    other = 1 - x
    if rng.random() < 0.5:
        brush.box(other - 0.1, 0.14, other + 0.1, 0.34, (150, 104, 70), 0.2)
        brush.box(other - 0.07, 0.17, other + 0.07, 0.31, rng.choice([(236, 130, 110), (120, 176, 150)]), 0)
    else:
        brush.curve([(other, HORIZON + 0.08), (other, 0.3)], 0.025, (110, 92, 86))
        brush.shape(
            [(other - 0.07, 0.18), (other + 0.07, 0.18), (other + 0.13, 0.33), (other - 0.13, 0.33)],
            (255, 214, 130),
            0.2,
        )
    brush.disc(0.5, 0.91, 0.5, 0.1, rng.choice([(122, 158, 190), (198, 110, 104), (130, 160, 120)]), 0.15)
    return picture


def forest(side: int, rng: random.Random) -> Image.Image:
    picture = backdrop(
        side, [(0, (150, 196, 150)), (HORIZON, (204, 226, 176)), (HORIZON, (106, 126, 68)), (1, (84, 100, 54))]
    )
    brush = Brush(picture)
    for i in range(5):
        tree(brush, (i + rng.uniform(0.2, 0.8)) / 5, HORIZON + 0.02, rng.uniform(0.24, 0.32), (98, 150, 104), pine=True)
    for x in (rng.uniform(-0.02, 0.12), rng.uniform(0.88, 1.02), rng.uniform(0.25, 0.75)):
        leaves = rng.choice([(48, 110, 64), (62, 124, 62)])
        tree(brush, x, HORIZON + 0.06, rng.uniform(0.36, 0.44), leaves, pine=rng.random() < 0.5)
    for x, y in scattered(rng, 4, 0.78):
        brush.box(x - 0.012, y - 0.02, x + 0.012, y + 0.02, (250, 240, 220), 0)
        brush.disc(x, y - 0.025, 0.034, 0.022, (214, 66, 54))
    return picture


def city(side: int, rng: random.Random) -> Image.Image:
    picture = backdrop(
        side, [(0, (250, 176, 140)), (HORIZON, (255, 224, 176)), (HORIZON, (186, 184, 186)), (1, (150, 148, 154))]
    )
    brush = Brush(picture)
    x = -0.05
    while x < 1.0:
        wide, tall = rng.uniform(0.15, 0.23), rng.uniform(0.28, 0.54)
        wall = rng.choice([(120, 112, 146), (148, 120, 140), (98, 104, 140)])
        brush.box(x, HORIZON - tall, x + wide, HORIZON + 0.01, wall, 0.2)
        for i in range(2):
            for j in range(int(tall / 0.11)):
                left = x + wide * (0.17 + 0.4 * i)
                glow = (255, 226, 130) if rng.random() < 0.6 else blend(wall, INK, 0.25)
                brush.box(
                    left, HORIZON - tall + 0.04 + 0.11 * j, left + wide * 0.26, HORIZON - tall + 0.1 + 0.11 * j, glow, 0
                )
        x += wide + rng.uniform(0.0, 0.02)
    brush.box(-0.1, HORIZON, 1.1, HORIZON + 0.05, (222, 220, 218), 0)
    for i in range(4):
        left = (i + 0.2) / 4
        brush.box(left, 0.84, left + 0.13, 0.87, WHITE, 0)
    return picture


def desert(side: int, rng: random.Random) -> Image.Image:
    picture = backdrop(
        side, [(0, (252, 190, 96)), (HORIZON, (255, 236, 186)), (HORIZON, (226, 150, 84)), (1, (206, 122, 66))]
    )
    brush = Brush(picture)
    brush.disc(rng.uniform(0.2, 0.8), 0.2, 0.12, 0.12, (255, 246, 214))
    for x, size in ((rng.uniform(0, 0.4), 0.24), (rng.uniform(0.6, 1), 0.18)):
        flat = size * 0.4
        brush.shape(
            [(x - size, HORIZON), (x - flat, HORIZON - size), (x + flat, HORIZON - size), (x + size, HORIZON)],
            (196, 104, 74),
            0,
        )
    brush.disc(rng.uniform(0, 1), HORIZON + 0.1, 0.6, 0.12, (234, 164, 98))
    for x in (rng.uniform(0.03, 0.16), rng.uniform(0.84, 0.97)):
        if rng.random() < 0.75:
            ground, green = rng.uniform(0.7, 0.76), (84, 146, 90)
            brush.curve([(x, ground - 0.14), (x + 0.07, ground - 0.14), (x + 0.07, ground - 0.22)], 0.035, green)
            brush.curve([(x, ground - 0.1), (x - 0.06, ground - 0.1), (x - 0.06, ground - 0.17)], 0.035, green)
            brush.bar((x, ground), (x, ground - 0.28), 0.03, green, 0.2)
    return picture


PLACES: dict[str, Callable[[int, random.Random], Image.Image]] = {
    "meadow": meadow,
    "beach": beach,
    "snow": snow,
    "night": night,
    "room": room,
    "forest": forest,
    "city": city,
    "desert": desert,
}
