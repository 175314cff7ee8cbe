"""Pictures for a first run without any of one's own: one cartoon dog, each time in another place and pose."""

import io
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

from flux_db.demo.tiny_model import write_once

Colour = tuple[int, int, int]
Point = tuple[float, float]

# Drawn this much larger than asked, then reduced: PIL draws hard edges.
OVERSAMPLING = 4

FUR, FUR_DARK, CREAM = (214, 142, 72), (143, 82, 40), (250, 228, 194)
INK, WHITE, TONGUE = (44, 30, 26), (255, 255, 255), (238, 112, 124)
COLLAR, TAG = (206, 42, 52), (247, 201, 72)

# Sky at the top, sky at the horizon, ground.
PLACES: list[tuple[Colour, Colour, Colour]] = [
    ((112, 186, 236), (214, 238, 250), (126, 190, 92)),  # meadow
    ((88, 178, 226), (236, 244, 240), (238, 214, 160)),  # beach
    ((250, 150, 96), (255, 222, 150), (120, 126, 78)),  # sunset
    ((176, 200, 226), (236, 242, 250), (246, 250, 254)),  # snow
    ((190, 164, 214), (226, 208, 236), (176, 126, 92)),  # dusk
]


def write_demo_pictures(folder: Path, count: int = 5, size: int = 256, seed: int = 0) -> None:
    """Write `count` square PNG files. A folder that already holds exactly these is left alone."""
    files = {f"dog_{i:02}.png": png_bytes(draw_picture(size, i, seed)) for i in range(count)}
    write_once(Path(folder), files, what=f"the demo pictures of seed {seed}")


def png_bytes(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def draw_picture(size: int, index: int, seed: int) -> Image.Image:
    rng = random.Random(f"{seed}/{index}")
    side = size * OVERSAMPLING
    horizon = rng.uniform(0.55, 0.68)
    picture = draw_place(side, horizon, PLACES[index % len(PLACES)], rng)

    dog = draw_dog(round(side * rng.uniform(0.66, 0.84)), rng)
    left = rng.uniform(0.1, 0.9) * (side - dog.width)
    top = side * rng.uniform(0.92, 0.97) - dog.height
    picture.paste(dog, (round(left), round(top)), dog)
    return picture.resize((size, size), Image.Resampling.LANCZOS)


def draw_place(side: int, horizon: float, colours: tuple[Colour, Colour, Colour], rng: random.Random) -> Image.Image:
    sky_top, sky_low, ground = colours
    picture = Image.new("RGB", (side, side), ground)
    pen = ImageDraw.Draw(picture)
    edge = round(horizon * side)
    for y in range(edge):
        pen.line([(0, y), (side, y)], fill=blend(sky_top, sky_low, y / edge))
    disc(pen, side, (rng.uniform(0.08, 0.92), rng.uniform(0.1, 0.22)), 0.07, 0.07, blend(TAG, WHITE, 0.4))
    for _ in range(3):
        hill = (rng.uniform(0, 1), horizon + 0.06)
        disc(pen, side, hill, rng.uniform(0.2, 0.4), rng.uniform(0.09, 0.17), blend(ground, sky_low, 0.35))
    pen.rectangle([0, edge, side, side], fill=ground)
    for _ in range(40):
        x, depth = rng.uniform(0, 1), rng.uniform(0.02, 1)
        spot = (x, horizon + depth * (1 - horizon))
        disc(pen, side, spot, 0.006 + 0.02 * depth, 0.002 + 0.006 * depth, blend(ground, INK, 0.1))
    return picture


def draw_dog(side: int, rng: random.Random) -> Image.Image:
    """The sitting dog on a transparent square; its head, tail, look and tongue differ from picture to picture."""
    dog = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    pen = ImageDraw.Draw(dog)
    draw_body(pen, side, tail=rng.uniform(-0.5, 0.5))
    head = draw_head(side, look=rng.uniform(-1, 1), tongue=rng.random() < 0.6)
    head = head.rotate(rng.uniform(-14, 14), Image.Resampling.BICUBIC, center=(0.5 * side, 0.5 * side))
    dog.alpha_composite(head)
    return dog.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else dog


def draw_body(pen: ImageDraw.ImageDraw, side: int, tail: float) -> None:
    disc(pen, side, (0.5, 0.965), 0.36, 0.03, (0, 0, 0, 60))  # shadow
    root = (0.68, 0.86)
    for i in range(24):  # a tail is a row of shrinking discs along an arc
        along = i / 23
        angle = -0.35 - tail * 0.4 - along * 1.1
        point = (root[0] + 0.3 * along * math.cos(angle), root[1] + 0.36 * along * math.sin(angle))
        disc(pen, side, point, 0.042 - 0.016 * along, 0.042 - 0.016 * along, CREAM if along > 0.88 else FUR)
    for x in (0.3, 0.7):  # haunches
        disc(pen, side, (x, 0.82), 0.125, 0.13, blend(FUR, FUR_DARK, 0.25))
        disc(pen, side, (x + (x - 0.5) * 0.2, 0.935), 0.1, 0.035, CREAM)
    disc(pen, side, (0.5, 0.72), 0.19, 0.24, FUR)
    disc(pen, side, (0.5, 0.72), 0.115, 0.17, CREAM)
    for x in (0.42, 0.58):  # front legs
        bar(pen, side, (x, 0.74), (x, 0.92), 0.05, blend(FUR, CREAM, 0.15))
        disc(pen, side, (x, 0.935), 0.07, 0.038, CREAM)
        for toe in (-0.02, 0.02):
            bar(pen, side, (x + toe, 0.93), (x + toe, 0.955), 0.004, FUR_DARK)


def draw_head(side: int, look: float, tongue: bool) -> Image.Image:
    head = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    pen = ImageDraw.Draw(head)
    bar(pen, side, (0.39, 0.545), (0.61, 0.545), 0.03, COLLAR)
    disc(pen, side, (0.5, 0.6), 0.033, 0.033, TAG)
    disc(pen, side, (0.5, 0.34), 0.235, 0.215, FUR)
    pen.polygon(scaled(side, [(0.5, 0.42), (0.455, 0.14), (0.545, 0.14)]), fill=CREAM)  # blaze
    disc(pen, side, (0.5, 0.425), 0.15, 0.115, CREAM)
    for x in (-1, 1):
        eye = (0.5 + 0.105 * x, 0.31)
        disc(pen, side, eye, 0.045, 0.052, WHITE)
        disc(pen, side, (eye[0] + 0.013 * look, eye[1] + 0.006), 0.032, 0.038, INK)
        disc(pen, side, (eye[0] + 0.013 * look + 0.01, eye[1] - 0.012), 0.011, 0.012, WHITE)
        draw_ear(pen, side, x)
    draw_mouth(pen, side, tongue)
    return head


def draw_ear(pen: ImageDraw.ImageDraw, side: int, x: int) -> None:
    for i in range(20):  # hangs from the crown, widest near its tip
        along = i / 19
        point = (0.5 + x * (0.175 + 0.1 * math.sin(1.7 * along)), 0.2 + 0.24 * along)
        radius = 0.045 + 0.032 * math.sin(2.4 * along)
        disc(pen, side, point, radius, radius, FUR_DARK)


def draw_mouth(pen: ImageDraw.ImageDraw, side: int, tongue: bool) -> None:
    if tongue:
        bar(pen, side, (0.5, 0.47), (0.5, 0.535), 0.034, TONGUE)
        bar(pen, side, (0.5, 0.47), (0.5, 0.53), 0.003, blend(TONGUE, INK, 0.35))
    for x in (-1, 1):
        box = scaled(side, [(0.5 + min(0, x) * 0.1, 0.42), (0.5 + max(0, x) * 0.1, 0.49)])
        pen.arc(box, 20, 160, fill=INK, width=round(0.011 * side))
    disc(pen, side, (0.5, 0.395), 0.046, 0.032, INK)
    disc(pen, side, (0.488, 0.385), 0.012, 0.007, blend(INK, WHITE, 0.6))


# ---- Strokes, in units of the canvas ----


def scaled(side: int, points: list[Point]) -> list[Point]:
    return [(x * side, y * side) for x, y in points]


def disc(pen: ImageDraw.ImageDraw, side: int, centre: Point, rx: float, ry: float, colour: tuple[int, ...]) -> None:
    x, y = centre
    pen.ellipse(scaled(side, [(x - rx, y - ry), (x + rx, y + ry)]), fill=colour)


def bar(pen: ImageDraw.ImageDraw, side: int, start: Point, end: Point, radius: float, colour: Colour) -> None:
    """An upright or level stroke with round ends."""
    box = [(start[0] - radius, start[1] - radius), (end[0] + radius, end[1] + radius)]
    pen.rounded_rectangle(scaled(side, box), radius=radius * side, fill=colour)


def blend(a: Colour, b: Colour, share: float) -> Colour:
    red, green, blue = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return red, green, blue
