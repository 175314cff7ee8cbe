"""Things of the drawn world. Each stands on the origin and is about one unit tall."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from flux_db.demo.brush import INK, WHITE, Brush, Colour, blend

GLASS: Colour = (190, 228, 246)
METAL: Colour = (150, 158, 170)


def draw_car(brush: Brush, colour: Colour, rng: random.Random) -> None:
    tall = rng.uniform(0.0, 0.1)
    van = rng.random() < 0.35
    brush = brush.at(0, 0, scale=1.05)
    roof = [(-0.26, -0.4), (-0.19, -0.66 - tall), (0.18, -0.66 - tall), (0.33, -0.4)]
    if van:
        roof = [(-0.43, -0.4), (-0.4, -0.7 - tall), (0.24, -0.7 - tall), (0.38, -0.4)]
    brush.shape(roof, blend(colour, WHITE, 0.12), 0.35)
    top = -0.61 - tall if not van else -0.64 - tall
    left, right = (-0.2, 0.25) if not van else (-0.35, 0.3)
    middle = 0.02
    brush.shape([(left, -0.42), (left + 0.05, top), (middle - 0.02, top), (middle - 0.02, -0.42)], GLASS, 0.3)
    brush.shape([(middle + 0.03, -0.42), (middle + 0.03, top), (right - 0.09, top), (right, -0.42)], GLASS, 0.3)
    brush.box(-0.5, -0.42, 0.5, -0.13, colour, 0.35, r=0.1)
    brush.bar((-0.42, -0.17), (0.42, -0.17), 0.02, blend(colour, INK, 0.3), 0)
    brush.disc(0.44, -0.3, 0.045, 0.05, (255, 240, 160), 0.3)
    brush.disc(-0.46, -0.3, 0.03, 0.05, (224, 70, 60), 0.3)
    brush.curve([(0.0, -0.32), (0.08, -0.32)], 0.025, blend(colour, INK, 0.45))
    for x in (-0.27, 0.27):
        brush.disc(x, -0.13, 0.14, 0.14, INK)
        brush.disc(x, -0.13, 0.07, 0.07, (214, 218, 224))


def draw_cup(brush: Brush, colour: Colour, rng: random.Random) -> None:
    wide, tall = rng.uniform(0.27, 0.34), rng.uniform(0.52, 0.66)
    pattern = rng.choice(["plain", "stripe", "dots", "plain"])
    light = blend(colour, WHITE, 0.65) if colour != WHITE else GLASS
    if sum(colour) > 690:
        light = (150, 190, 226)
    hoop = [
        (wide * 0.8, -tall * 0.8),
        (wide + 0.2, -tall * 0.78),
        (wide + 0.22, -tall * 0.3),
        (wide * 0.7, -tall * 0.22),
    ]
    brush.curve(hoop, 0.12, blend(colour, INK, 0.35))
    brush.curve(hoop, 0.085, colour)
    brush.shape(
        [
            (-wide, -tall),
            (wide, -tall),
            (wide * 0.92, -tall * 0.3),
            (wide * 0.72, -0.01),
            (-wide * 0.72, -0.01),
            (-wide * 0.92, -tall * 0.3),
        ],
        colour,
        0.35,
    )
    if pattern == "stripe":
        brush.shape(
            [
                (-wide * 0.97, -tall * 0.6),
                (wide * 0.97, -tall * 0.6),
                (wide * 0.93, -tall * 0.38),
                (-wide * 0.93, -tall * 0.38),
            ],
            light,
            0,
        )
    if pattern == "dots":
        for x, y in ((-0.6, 0.62), (0.0, 0.66), (0.6, 0.62), (-0.3, 0.36), (0.3, 0.36)):
            brush.disc(x * wide, -tall * y, 0.048, 0.048, light)
    brush.disc(0, -tall, wide, 0.085, blend(colour, WHITE, 0.3), 0.35)
    brush.disc(0, -tall + 0.012, wide * 0.82, 0.058, (104, 64, 42))
    for x in (-0.1, 0.1):
        sway = 0.04 if rng.random() < 0.5 else -0.04
        brush.curve(
            [(x, -tall - 0.1), (x + sway, -tall - 0.17), (x - sway, -tall - 0.25), (x, -tall - 0.33)],
            0.04,
            (240, 240, 244),
        )


def draw_house(brush: Brush, colour: Colour, rng: random.Random) -> None:
    wide, tall = rng.uniform(0.34, 0.44), rng.uniform(0.4, 0.5)
    roof = rng.choice([(170, 74, 60), (110, 78, 72), (88, 98, 122)])
    if math.dist(roof, colour) < 120:
        roof = (88, 98, 122) if math.dist((88, 98, 122), colour) > 120 else (110, 78, 72)
    glow = (255, 236, 150)
    chimney = rng.choice([-1, 1]) * 0.2
    brush.box(chimney - 0.055, -tall - 0.42, chimney + 0.055, -tall - 0.1, blend(roof, INK, 0.25), 0.3)
    brush.box(-wide, -tall, wide, 0, colour, 0.35)
    brush.shape([(-wide - 0.09, -tall + 0.02), (0, -tall - 0.4), (wide + 0.09, -tall + 0.02)], roof, 0.35)
    brush.disc(0, -tall - 0.12, 0.055, 0.055, glow, 0.3)
    door = rng.choice([-0.16, 0.0, 0.16])
    brush.box(door - 0.075, -0.27, door + 0.075, 0, (122, 82, 56), 0.35)
    brush.disc(door + 0.045, -0.13, 0.016, 0.016, glow)
    for x in (-0.24, 0.24) if door == 0 else ((0.14,) if door < 0 else (-0.14,)):
        size = 0.07 if door == 0 else 0.095
        brush.box(x - size, -0.29, x + size, -0.29 + 1.8 * size, glow, 0.4)
        brush.curve([(x, -0.29), (x, -0.29 + 1.8 * size)], 0.02, (122, 82, 56))


@dataclass(frozen=True, kw_only=True)
class RobotLook:
    colour: Colour
    limbs: Colour
    eyes: int
    eye_colour: Colour
    antenna: str
    belly: str


def draw_robot(brush: Brush, look: RobotLook, *, wave: float, tilt: float) -> None:
    dark = blend(look.colour, INK, 0.3)
    for x in (-0.11, 0.11):
        brush.box(x - 0.045, -0.2, x + 0.045, -0.04, METAL, 0.35)
        brush.box(x - 0.085, -0.075, x + 0.085, 0.0, look.limbs, 0.3, r=0.035)
    for side in (-1, 1):
        lift = wave if side > 0 else -0.5
        hand = (side * 0.36, -0.34 - 0.17 * lift)
        brush.bar((side * 0.2, -0.42), hand, 0.035, METAL, 0.35)
        brush.disc(*hand, 0.06, 0.06, look.limbs, 0.3)
    brush.box(-0.22, -0.5, 0.22, -0.16, look.colour, 0.35, r=0.06)
    if look.belly == "panel":
        brush.box(-0.12, -0.42, 0.12, -0.25, blend(look.colour, WHITE, 0.55), 0.25, r=0.03)
        brush.disc(-0.05, -0.335, 0.03, 0.03, (232, 84, 76))
        brush.disc(0.05, -0.335, 0.03, 0.03, (96, 186, 108))
    elif look.belly == "checks":
        for i in range(4):
            for j in range(3):
                brush.box(
                    -0.14 + 0.07 * i,
                    -0.44 + 0.07 * j,
                    -0.07 + 0.07 * i,
                    -0.37 + 0.07 * j,
                    INK if (i + j) % 2 else WHITE,
                    0,
                )
    else:
        for y in (-0.41, -0.34, -0.27):
            brush.curve([(-0.11, y), (0.11, y)], 0.028, dark)
    head = brush.at(0, -0.52, angle=tilt)
    draw_antenna(head, look)
    head.box(-0.28, -0.34, 0.28, 0.0, look.colour, 0.35, r=0.08)
    head.box(-0.22, -0.28, 0.22, -0.08, (44, 52, 72), 0, r=0.06)
    if look.eyes == 1:
        head.disc(0, -0.18, 0.095, 0.095, WHITE)
        head.disc(0, -0.18, 0.06, 0.06, look.eye_colour)
        head.disc(0.02, -0.2, 0.02, 0.02, WHITE)
    else:
        for x in (-0.1, 0.1):
            head.disc(x, -0.18, 0.055, 0.06, look.eye_colour)
            head.disc(x + 0.015, -0.2, 0.018, 0.02, WHITE)
    head.curve([(-0.06, -0.04), (0.06, -0.04)], 0.02, dark)


def draw_antenna(head: Brush, look: RobotLook) -> None:
    if look.antenna == "zigzag":
        head.curve([(0, -0.34), (0.07, -0.4), (-0.05, -0.46), (0.06, -0.53)], 0.035, (240, 140, 40))
        head.disc(0.06, -0.54, 0.045, 0.045, (232, 60, 60), 0.3)
        return
    for x in (0.0,) if look.antenna == "one" else (-0.13, 0.13):
        head.curve([(x, -0.34), (x * 1.2, -0.44)], 0.03, METAL)
        head.disc(x * 1.2, -0.46, 0.04, 0.04, look.limbs, 0.3)
