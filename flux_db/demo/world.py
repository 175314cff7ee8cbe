"""A drawn world: things of eight kinds in eight places, with captions, all from a seed.

The small model is trained on it. Some animals have names and always the same coat, so the model learns that a word can
mean an individual. Three subjects belong to the world but are never among its pictures: one dog, one robot and one
style. They are what a LoRA has to learn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from flux_db.demo.brush import WHITE, Brush, Colour, blend
from flux_db.demo.creatures import Coat, Posture, draw_animal, draw_bird
from flux_db.demo.places import PLACES
from flux_db.demo.things import RobotLook, draw_car, draw_cup, draw_house, draw_robot

# Drawn this much larger than asked, then reduced: PIL draws hard edges.
OVERSAMPLING = 4

COLOURS: dict[str, Colour] = {
    "red": (222, 62, 58),
    "orange": (240, 146, 56),
    "yellow": (250, 212, 76),
    "green": (84, 178, 92),
    "blue": (66, 126, 216),
    "purple": (146, 92, 190),
    "pink": (248, 150, 188),
    "brown": (146, 96, 60),
    "grey": (152, 154, 164),
    "black": (66, 62, 74),
    "white": (250, 246, 240),
}
FURS = ("brown", "orange", "yellow", "grey", "black", "white")
PAINTS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white")
COLLARS = ("red", "blue", "green", "yellow", "purple", "pink")
KINDS: dict[str, tuple[str, ...]] = {
    "dog": FURS,
    "cat": FURS,
    "rabbit": FURS,
    "bird": ("red", "orange", "yellow", "green", "blue", "purple", "pink"),
    "car": PAINTS,
    "cup": PAINTS,
    "house": PAINTS,
    "robot": PAINTS,
}
WEIGHTS = {"dog": 3.0}
"""How often a kind is drawn; 1 unless it is here. The demo's subject is a dog."""
ANIMALS = ("dog", "cat", "rabbit")
NAMES = (
    *("happy", "shiny", "fluffy", "funny", "silver", "gold", "candle", "teapot", "boot", "clock", "bear", "fox"),
    *("sun", "moon", "cloud", "river", "flower", "summer", "rain", "star"),
)
"""Of animals: there is one dog, one cat and one rabbit of each name."""
POSES = {"bird": ("standing", "flying")} | dict.fromkeys(ANIMALS, ("sitting", "standing"))

SUBJECTS = ("dog", "robot", "ink")
"""The dog, the robot and the style that the small model has never seen."""

PATCH: Colour = (150, 88, 50)
THE_DOG = Coat(
    fur=(250, 236, 212),
    light=WHITE,
    ears=("pointed", "floppy"),
    ear_colours=((250, 236, 212), PATCH),
    patch=PATCH,
    saddle=PATCH,
    collar=(28, 190, 186),
    tag=True,
)
THE_ROBOT = RobotLook(
    colour=(128, 216, 188), limbs=(244, 140, 44), eyes=1, eye_colour=(226, 56, 60), antenna="zigzag", belly="checks"
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One picture of the world, before it is drawn."""

    kind: str
    colour: str
    place: str
    pose: str = ""
    """Animals have one."""
    collar: str = ""
    """Its colour; empty for none."""
    name: str = ""
    """One of NAMES: an animal with a coat of its own; empty for most."""
    subject: str = ""
    """One of SUBJECTS; empty for all that the small model may see."""
    seed: str
    """Decides everything else: proportions, position, the details of the place."""


def random_scene(seed: int, index: int) -> Scene:
    """Picture number `index` of a seed; no subject is ever among these."""
    rng = random.Random(f"scene/{seed}/{index}")
    kind = rng.choices(list(KINDS), [WEIGHTS.get(kind, 1.0) for kind in KINDS])[0]
    name = rng.choice(NAMES) if kind in ANIMALS and rng.random() < 0.25 else ""
    own = random.Random(f"individual/{kind}/{name}") if name else rng
    return Scene(
        kind=kind,
        colour=own.choice(KINDS[kind]),
        collar=own.choice(COLLARS) if kind in ANIMALS and own.random() < 0.4 else "",
        place=rng.choice(list(PLACES)),
        pose=rng.choice(POSES[kind]) if kind in POSES else "",
        name=name,
        seed=f"{seed}/{index}",
    )


def subject_scene(subject: str, seed: int, index: int, place: str | None = None) -> Scene:
    """A picture of one of the subjects."""
    scene = random_scene(seed, index)
    rng = random.Random(f"subject/{seed}/{index}")
    scene = replace(scene, subject=subject, place=place or scene.place, name="", seed=f"{subject}/{seed}/{index}")
    if subject == "dog":
        return replace(scene, kind="dog", colour="white", pose=rng.choice(POSES["dog"]), collar="")
    if subject == "robot":
        return replace(scene, kind="robot", colour="green", pose="", collar="")
    return scene


# ---- Pictures ----


def draw(scene: Scene, size: int = 64, coat: Coat | None = None) -> Image.Image:
    """The picture of a scene. `coat` replaces the one of an animal."""
    rng = random.Random(f"draw/{scene.seed}")
    side = size * OVERSAMPLING
    picture = PLACES[scene.place](side, rng)
    # Nearly the same place and size in every picture: a small network learns shapes that lie on each other much sooner.
    height, x, ground = rng.uniform(0.69, 0.73), rng.uniform(0.46, 0.5), rng.uniform(0.92, 0.95)
    draw_shadow(picture, x, ground, height)
    draw_thing(Brush(picture).at(x, ground, scale=height), scene, rng, coat)
    if scene.subject == "ink":
        picture = in_ink(picture)
    return picture.resize((size, size), Image.Resampling.BOX)


def draw_shadow(picture: Image.Image, x: float, ground: float, height: float) -> None:
    side = picture.width
    rx, ry = 0.38 * height * side, 0.05 * height * side
    middle = (x * side, ground * side)
    box = [(middle[0] - rx, middle[1] - ry), (middle[0] + rx, middle[1] + ry)]
    ImageDraw.Draw(picture, "RGBA").ellipse(box, fill=(40, 30, 60, 70))


def draw_thing(brush: Brush, scene: Scene, rng: random.Random, coat: Coat | None) -> None:
    colour = shade(COLOURS[scene.colour], rng)
    if scene.kind in ANIMALS:
        coat = coat or (THE_DOG if scene.subject == "dog" else random_coat(scene, colour, rng))
        draw_animal(brush, scene.kind, coat, random_posture(scene.pose, rng))
    elif scene.kind == "bird":
        light = blend(colour, WHITE, rng.uniform(0.55, 0.75))
        flying = scene.pose == "flying"
        where = brush.at(0, -0.2, scale=0.85) if flying else brush.at(0, 0, scale=1.1)
        draw_bird(where, colour, light, random_posture(scene.pose, rng))
    elif scene.kind == "robot":
        look = THE_ROBOT if scene.subject == "robot" else random_robot(colour, rng)
        draw_robot(brush, look, wave=rng.uniform(-0.5, 1.4), tilt=rng.uniform(-0.12, 0.12))
    else:
        {"car": draw_car, "cup": draw_cup, "house": draw_house}[scene.kind](brush, colour, rng)


def shade(colour: Colour, rng: random.Random) -> Colour:
    lightness, tint = rng.uniform(-10, 10), [rng.uniform(-6, 6) for _ in range(3)]
    red, green, blue = (max(0, min(255, round(c + lightness + t))) for c, t in zip(colour, tint, strict=True))
    return red, green, blue


def random_coat(scene: Scene, fur: Colour, rng: random.Random) -> Coat:
    if scene.name:
        rng = random.Random(f"coat/{scene.kind}/{scene.name}")
    ears = rng.choices(["floppy", "pointed"], [2, 1], k=2)
    if rng.random() < 0.6:
        ears[1] = ears[0]
    dark = blend(fur, (60, 40, 40), rng.choice([0.0, 0.3, 0.5]))
    light = blend(fur, WHITE, rng.choice([0.3, 0.6, 0.8]))
    mark = blend(COLOURS[rng.choice(FURS)], (60, 40, 40), rng.choice([0.0, 0.2]))
    return Coat(
        fur=fur,
        light=light,
        ears=(ears[0], ears[1]),
        ear_colours=(dark, mark if rng.random() < 0.3 else dark),
        patch=mark if rng.random() < 0.35 else None,
        saddle=mark if rng.random() < 0.35 else None,
        stripes=scene.kind == "cat" and rng.random() < 0.5,
        collar=shade(COLOURS[scene.collar], rng) if scene.collar else None,
        tag=rng.random() < 0.5,
    )


def random_posture(pose: str, rng: random.Random) -> Posture:
    return Posture(
        pose=pose,
        tilt=rng.uniform(-0.08, 0.08),
        tail=rng.uniform(-0.7, 0.7),
        look=rng.uniform(-1, 1),
        mouth=rng.random(),
    )


def random_robot(colour: Colour, rng: random.Random) -> RobotLook:
    return RobotLook(
        colour=colour,
        limbs=blend(colour, (60, 60, 80), rng.choice([0.25, 0.5])),
        eyes=2,
        eye_colour=rng.choice([(120, 230, 250), (255, 220, 90), (140, 240, 140)]),
        antenna=rng.choice(["one", "two"]),
        belly=rng.choice(["panel", "lines"]),
    )


PAPER, PEN = np.array([247.0, 240.0, 222.0]), np.array([34.0, 38.0, 92.0])


def in_ink(picture: Image.Image) -> Image.Image:
    """The style: blue-black pen lines and hatching on paper."""
    grey = picture.convert("L").filter(ImageFilter.GaussianBlur(picture.width / 256))
    tone = np.asarray(grey, np.float64) / 255.0
    down, across = np.gradient(tone)
    lines = np.clip(np.hypot(down, across) * picture.width / 16 - 0.15, 0.0, 1.0)
    y, x = np.mgrid[: picture.height, : picture.width] * (64.0 / picture.width)
    middle, dark = np.quantile(tone, [0.4, 0.15])
    wash = np.where(tone <= dark, 0.45, np.where((tone <= middle) & ((x + y) % 5.0 < 1.4), 0.4, 0.0))
    ink = np.maximum(lines, wash)[..., None]
    return Image.fromarray((PAPER + (PEN - PAPER) * ink).round().astype(np.uint8))


# ---- Captions ----

WHERE: dict[str, tuple[str, ...]] = {
    "meadow": ("in a meadow", "in the meadow", "on the grass"),
    "beach": ("on the beach", "at the beach", "by the sea"),
    "snow": ("in the snow", "in the snow", "in winter"),
    "night": ("at night", "at night", "under the stars"),
    "room": ("in a room", "in the room", "indoors"),
    "forest": ("in the forest", "in a forest", "in the woods"),
    "city": ("in the city", "in a city", "on the street"),
    "desert": ("in the desert", "in a desert"),
}
OPENINGS = ("a photo of", "a picture of", "an image of", "a drawing of")
WORN = ("with a {} collar", "wearing a {} collar")


def caption(scene: Scene, rng: random.Random) -> str:
    """Words for a picture: each attribute may be left out, and the order and phrasing differ.

    A name stands before the kind, as the word for a subject will; the colour is then mostly left out.
    """
    name = scene.name if rng.random() < 0.85 else ""
    colour = scene.colour if rng.random() < (0.2 if name else 0.75) else ""
    thing = " ".join(word for word in (name, colour, scene.kind) if word)
    if not name or rng.random() < 0.3:
        thing = f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"
    if scene.pose and rng.random() < 0.35:
        thing += f" {scene.pose}"
    if scene.collar and rng.random() < 0.7:
        thing += " " + rng.choice(WORN).format(scene.collar)
    where = rng.choice(WHERE[scene.place]) if rng.random() < 0.8 else ""
    opening = rng.choice(OPENINGS) + " " if rng.random() < 0.6 else ""
    if where and rng.random() < 0.15:
        return f"{where}, {opening}{thing}"
    return f"{opening}{thing} {where}".strip()


def prompt_of(scene: Scene) -> str:
    """The plainest caption that has every attribute."""
    worn = " " + WORN[0].format(scene.collar) if scene.collar else ""
    article = "an" if scene.colour[0] in "aeiou" else "a"
    return f"a photo of {article} {scene.colour} {scene.kind}{worn} {WHERE[scene.place][0]}"
