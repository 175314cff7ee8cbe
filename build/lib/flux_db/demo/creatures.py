"""Animals of the drawn world. Each stands on the origin, is about one unit tall, and looks at the viewer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flux_db.demo.brush import INK, WHITE, Brush, Colour, blend

Ear = Literal["floppy", "pointed"]

BLUSH: Colour = (244, 150, 150)
TONGUE: Colour = (240, 112, 128)
GOLD: Colour = (250, 204, 70)


@dataclass(frozen=True, kw_only=True)
class Coat:
    """What does not change from picture to picture of one animal."""

    fur: Colour
    light: Colour
    """Muzzle, belly and paws."""
    ears: tuple[Ear, Ear] = ("floppy", "floppy")
    """Left and right, as the viewer sees them; only dogs have a choice."""
    ear_colours: tuple[Colour, Colour]
    patch: Colour | None = None
    """Around the right eye."""
    saddle: Colour | None = None
    """On the back, and on the tail."""
    stripes: bool = False
    collar: Colour | None = None
    tag: bool = False


@dataclass(frozen=True, kw_only=True)
class Posture:
    """What does."""

    pose: str
    tilt: float = 0.0
    tail: float = 0.0
    look: float = 0.0
    mouth: float = 0.0
    """Above 0.5 it is open."""


def draw_animal(brush: Brush, kind: str, coat: Coat, posture: Posture) -> None:
    """A dog, cat or rabbit."""
    if posture.pose == "sitting":
        sitting_body(brush, kind, coat, posture)
        neck = (0.0, -0.44)
    else:
        standing_body(brush, kind, coat, posture)
        neck = (-0.19, -0.42)
    if coat.collar:
        draw_collar(brush.at(*neck), coat.collar, tag=coat.tag)
    head = brush.at(neck[0], neck[1] - 0.02, angle=posture.tilt)
    draw_head(head, kind, coat, posture)


def sitting_body(brush: Brush, kind: str, coat: Coat, posture: Posture) -> None:
    draw_tail(brush.at(0.17, -0.1), kind, coat, posture.tail)
    for x in (-1, 1):
        brush.disc(0.19 * x, -0.12, 0.12, 0.12, coat.fur, 0.3)
        brush.disc(0.2 * x, -0.035, 0.1, 0.04, coat.light, 0.25)
    brush.disc(0, -0.26, 0.2, 0.25, coat.fur, 0.3)
    if coat.saddle:
        brush.disc(0.12, -0.3, 0.07, 0.13, coat.saddle, angle=-0.3)
    brush.disc(0, -0.25, 0.11, 0.17, coat.light)
    for x in (-0.075, 0.075):
        brush.bar((x, -0.24), (x, -0.05), 0.05, blend(coat.fur, coat.light, 0.25), 0.25)
        brush.disc(x, -0.035, 0.068, 0.042, coat.light, 0.25)


def standing_body(brush: Brush, kind: str, coat: Coat, posture: Posture) -> None:
    draw_tail(brush.at(0.3, -0.34), kind, coat, posture.tail)
    step = 0.05 * posture.look
    far = blend(coat.fur, INK, 0.18)
    for x in (-0.06, 0.27):
        brush.bar((x, -0.22), (x - step, -0.05), 0.05, far, 0.2)
    brush.disc(0.07, -0.31, 0.3, 0.18, coat.fur, 0.3)
    if coat.saddle:
        brush.disc(0.17, -0.38, 0.13, 0.09, coat.saddle, angle=0.25)
    if coat.stripes:
        for x in (0.05, 0.15, 0.25):
            brush.curve([(x, -0.47 + 0.3 * x * x), (x - 0.02, -0.36)], 0.035, blend(coat.fur, INK, 0.35))
    brush.disc(0.05, -0.22, 0.18, 0.07, coat.light)
    for x in (-0.15, 0.19):
        brush.bar((x, -0.24), (x + step, -0.05), 0.055, coat.fur, 0.3)
        brush.disc(x + step - 0.015, -0.035, 0.07, 0.042, coat.light, 0.25)


def draw_tail(brush: Brush, kind: str, coat: Coat, swing: float) -> None:
    colour = coat.saddle or coat.fur
    if kind == "rabbit":
        brush.disc(0.05, -0.04, 0.075, 0.07, coat.light, 0.25)
        return
    length, radius = (0.34, 0.042) if kind == "cat" else (0.26, 0.052)
    points = []
    for i in range(9):
        along = i / 8
        angle = -0.45 - 0.5 * swing - along * (1.5 if kind == "cat" else 1.1)
        points.append((length * along * math.cos(angle), 1.1 * length * along * math.sin(angle)))
    brush.curve(points, 2 * radius + 0.03, blend(colour, INK, 0.3))
    brush.disc(*points[-1], radius + 0.015, radius + 0.015, blend(colour, INK, 0.3))
    brush.curve(points, 2 * radius, colour)
    brush.disc(*points[-1], radius, radius, coat.light)


def draw_collar(brush: Brush, colour: Colour, *, tag: bool) -> None:
    brush.bar((-0.14, 0.005), (0.14, 0.005), 0.045, colour, 0.3)
    if tag:
        brush.disc(0, 0.07, 0.045, 0.045, GOLD, 0.3)


def draw_head(brush: Brush, kind: str, coat: Coat, posture: Posture) -> None:
    """The head above its neck, which is the origin."""
    if kind == "rabbit":
        for side in (-1, 1):
            ear = brush.at(0.11 * side, -0.36, angle=side * (0.16 + 0.1 * posture.tail))
            ear.disc(0, -0.15, 0.065, 0.2, coat.ear_colours[side > 0], 0.3)
            ear.disc(0, -0.13, 0.032, 0.14, BLUSH)
    if kind == "cat" or (kind == "dog" and "pointed" in coat.ears):
        for side in (-1, 1):
            if kind == "cat" or coat.ears[side > 0] == "pointed":
                pointed_ear(brush.at(0.15 * side, -0.38, flip=side < 0), coat.ear_colours[side > 0], slim=kind == "dog")
    brush.disc(0, -0.23, 0.27, 0.235, coat.fur, 0.32)
    if coat.patch:
        brush.disc(0.115, -0.265, 0.105, 0.115, coat.patch, angle=0.35)
    if coat.stripes:
        for x in (-0.07, 0, 0.07):
            brush.curve([(x, -0.45 + abs(x) * 0.2), (x * 0.7, -0.37)], 0.03, blend(coat.fur, INK, 0.35))
    muzzle = 0.125 if kind == "dog" else 0.1
    brush.disc(0, -0.125, muzzle, 0.085, coat.light)
    for side in (-1, 1):
        brush.disc(0.19 * side, -0.13, 0.042, 0.028, blend(coat.fur, BLUSH, 0.75))
        eye = brush.at(0.11 * side + 0.012 * posture.look, -0.25)
        if coat.patch and side > 0:
            eye.disc(0, 0, 0.052, 0.06, WHITE)
        eye.disc(0, 0, 0.04, 0.05, INK)
        eye.disc(0.012, -0.018, 0.016, 0.018, WHITE)
    draw_mouth(brush, kind, is_open=kind == "dog" and posture.mouth > 0.5)
    if kind == "dog":
        for side in (-1, 1):
            if coat.ears[side > 0] == "floppy":
                floppy_ear(
                    brush.at(0.2 * side, -0.39, flip=side < 0, angle=0.1 * posture.tail), coat.ear_colours[side > 0]
                )
    if kind == "cat":
        for side in (-1, 1):
            for y in (-0.14, -0.1):
                brush.curve(
                    [(0.13 * side, y), (0.3 * side, y - 0.03 + (y + 0.12) * 1.2)], 0.012, blend(coat.fur, INK, 0.55)
                )


def pointed_ear(brush: Brush, colour: Colour, *, slim: bool) -> None:
    wide, tall = (0.1, 0.22) if slim else (0.12, 0.17)
    brush.shape([(-wide, 0.04), (0.035, -tall), (wide, 0.09)], colour, 0.32)
    brush.shape([(-wide * 0.4, 0.0), (0.03, -tall * 0.66), (wide * 0.5, 0.04)], BLUSH, 0)


def floppy_ear(brush: Brush, colour: Colour) -> None:
    brush.shape(
        [
            (-0.05, -0.03),
            (0.02, -0.055),
            (0.09, 0.0),
            (0.125, 0.1),
            (0.115, 0.2),
            (0.07, 0.235),
            (0.03, 0.2),
            (0.01, 0.1),
        ],
        colour,
        0.32,
    )


def draw_mouth(brush: Brush, kind: str, *, is_open: bool) -> None:
    nose = {"dog": INK, "cat": (232, 116, 128), "rabbit": (232, 116, 128)}[kind]
    if is_open:
        brush.bar((0, -0.1), (0, -0.055), 0.032, TONGUE, 0.3)
    brush.curve([(-0.055, -0.105), (-0.03, -0.085), (0, -0.1), (0.03, -0.085), (0.055, -0.105)], 0.018, INK)
    size = 1.0 if kind == "dog" else 0.7
    brush.disc(0, -0.155, 0.045 * size, 0.033 * size, nose)


def draw_bird(brush: Brush, colour: Colour, light: Colour, posture: Posture) -> None:
    """A round bird, on its feet or in the air."""
    flying = posture.pose == "flying"
    beak = (246, 168, 52)
    wing = blend(colour, INK, 0.22)
    body = brush.at(0, -0.42 if not flying else -0.5, angle=posture.tilt)
    body.shape([(0.2, 0.0), (0.5, -0.16 - 0.06 * posture.tail), (0.46, 0.1)], wing, 0.32)
    if flying:
        body.shape([(-0.02, -0.1), (0.04, -0.36), (0.22, -0.44 - 0.1 * posture.tail), (0.24, -0.06)], wing, 0.32)
    else:
        for x in (-0.08, 0.08):
            brush.curve([(x, -0.16), (x, -0.01)], 0.03, beak)
            brush.curve([(x - 0.06, -0.01), (x + 0.03, -0.01)], 0.03, beak)
    for x in (-0.06, 0.0, 0.06):
        body.disc(-0.06 + x, -0.33 + abs(x) * 0.4, 0.025, 0.08, wing, angle=x * 6)
    body.disc(0, 0, 0.29, 0.3, colour, 0.32)
    body.disc(-0.06, 0.1, 0.18, 0.17, light)
    body.shape([(-0.27, -0.1), (-0.43, -0.02), (-0.26, 0.03)], beak, 0.3)
    body.disc(-0.14, -0.1, 0.05, 0.058, WHITE)
    body.disc(-0.15 + 0.008 * posture.look, -0.1, 0.036, 0.045, INK)
    body.disc(-0.142, -0.118, 0.014, 0.016, WHITE)
    body.disc(-0.03, -0.02, 0.04, 0.026, blend(colour, BLUSH, 0.75))
    if flying:
        body.shape([(-0.02, 0.02), (0.08, 0.26), (0.3, 0.34 + 0.08 * posture.tail), (0.22, 0.0)], wing, 0.32)
    else:
        body.shape([(0.0, 0.0), (0.04, 0.16), (0.16, 0.23), (0.3, 0.14), (0.2, -0.04)], wing, 0.32)
