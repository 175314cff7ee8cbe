"""Pictures for a first run without any of one's own: a subject of the drawn world in several poses and places."""

import io
import random
from pathlib import Path

from PIL import Image

from flux_db.demo.tiny_model import write_once
from flux_db.demo.world import SUBJECTS, Scene, caption, draw, subject_scene
from flux_db.errors import UserError

# The subject is photographed in these; beach, snow, night and desert are left for the samples.
PLACES = ("meadow", "room", "city", "forest")


def write_demo_pictures(folder: Path, count: int = 5, size: int = 256, seed: int = 0, subject: str = "dog") -> None:
    """Write `count` square PNG files, with captions if the subject is a style. Exactly these there already is fine."""
    if subject not in SUBJECTS:
        raise UserError(f"--subject {subject}: must be one of {', '.join(SUBJECTS)}")
    files: dict[str, bytes] = {}
    for i in range(count):
        files[f"{subject}_{i:02}.png"] = png_bytes(draw_picture(size, i, seed, subject))
        if subject == "ink":
            files[f"{subject}_{i:02}.txt"] = f"{style_caption(scene(i, seed, subject))}\n".encode()
    write_once(Path(folder), files, what=f"the demo pictures of the {subject} of seed {seed}")


def scene(index: int, seed: int, subject: str = "dog") -> Scene:
    """What picture number `index` shows."""
    return subject_scene(subject, seed, index, place=PLACES[index % len(PLACES)])


def draw_picture(size: int, index: int, seed: int, subject: str = "dog") -> Image.Image:
    return draw(scene(index, seed, subject), size)


def style_caption(drawn: Scene) -> str:
    return caption(drawn, random.Random(drawn.seed)) + ", in ink style"


def png_bytes(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()
