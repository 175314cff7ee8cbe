"""Shapes in their own coordinates: turned, mirrored and scaled, then filled with a soft darker edge."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Point = tuple[float, float]

INK: Colour = (52, 40, 46)
WHITE: Colour = (255, 255, 255)

CORNERS = 28
CIRCLE = [(math.cos(2 * math.pi * i / CORNERS), math.sin(2 * math.pi * i / CORNERS)) for i in range(CORNERS)]
HALF_CIRCLE = [(math.cos(math.pi * i / 10), math.sin(math.pi * i / 10)) for i in range(11)]


def blend(a: Colour, b: Colour, share: float) -> Colour:
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return red, green, blue


class Brush:
    """Draws into a square picture. `at` gives a brush whose origin, angle and unit are those of a part."""

    def __init__(self, picture: Image.Image, line_width: float = 0.011) -> None:
        self.pen = ImageDraw.Draw(picture)
        side = picture.width
        self.matrix: tuple[float, float, float, float, float, float] = (side, 0.0, 0.0, 0.0, side, 0.0)
        self.line = max(1, round(line_width * side))

    def at(self, x: float, y: float, *, scale: float = 1.0, angle: float = 0.0, flip: bool = False) -> Brush:
        a, b, c, d, e, f = self.matrix
        cos, sin = math.cos(angle) * scale, math.sin(angle) * scale
        mirror = -1.0 if flip else 1.0
        part = object.__new__(Brush)
        part.pen, part.line = self.pen, self.line
        part.matrix = (
            mirror * (a * cos + b * sin),
            b * cos - a * sin,
            a * x + b * y + c,
            mirror * (d * cos + e * sin),
            e * cos - d * sin,
            d * x + e * y + f,
        )
        return part

    def placed(self, points: Sequence[Point]) -> list[Point]:
        a, b, c, d, e, f = self.matrix
        return [(a * x + b * y + c, d * x + e * y + f) for x, y in points]

    def length(self, value: float) -> int:
        a, _, _, d, _, _ = self.matrix
        return max(1, round(value * math.hypot(a, d)))

    def shape(self, points: Sequence[Point], fill: Colour, edge: float = 0.38) -> None:
        """A filled outline; `edge` is how much darker its border is, 0 for none."""
        corners = self.placed(points)
        self.pen.polygon(corners, fill=fill)
        if edge:
            self.pen.line([*corners, corners[0], corners[1]], fill=blend(fill, INK, edge), width=self.line)

    def disc(self, x: float, y: float, rx: float, ry: float, fill: Colour, edge: float = 0.0, angle: float = 0) -> None:
        cos, sin = math.cos(angle), math.sin(angle)
        self.shape([(x + rx * u * cos - ry * v * sin, y + rx * u * sin + ry * v * cos) for u, v in CIRCLE], fill, edge)

    def bar(self, start: Point, end: Point, radius: float, fill: Colour, edge: float = 0.38) -> None:
        """A stroke with round ends."""
        (x0, y0), (x1, y1) = start, end
        angle = math.atan2(y1 - y0, x1 - x0) - math.pi / 2
        cos, sin = math.cos(angle) * radius, math.sin(angle) * radius
        far = [(x1 + u * cos - v * sin, y1 + u * sin + v * cos) for u, v in HALF_CIRCLE]
        near = [(x0 - u * cos + v * sin, y0 - u * sin - v * cos) for u, v in HALF_CIRCLE]
        self.shape([*far, *near], fill, edge)

    def box(self, x0: float, y0: float, x1: float, y1: float, fill: Colour, edge: float = 0.38, r: float = 0.0) -> None:
        """A rectangle, with corners rounded by r."""
        if not r:
            self.shape([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], fill, edge)
            return
        corners = []
        for cx, cy, turn in ((x1 - r, y1 - r, 0), (x0 + r, y1 - r, 1), (x0 + r, y0 + r, 2), (x1 - r, y0 + r, 3)):
            for i in range(6):
                angle = (turn + i / 5) * math.pi / 2
                corners.append((cx + r * math.cos(angle), cy + r * math.sin(angle)))
        self.shape(corners, fill, edge)

    def curve(self, points: Sequence[Point], width: float, colour: Colour) -> None:
        self.pen.line(self.placed(points), fill=colour, width=self.length(width), joint="curve")
