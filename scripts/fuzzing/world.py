"""What the cases share and must not change: a small model, a few pictures, the flags of a run that could start."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image

from fuzzing import tensors
from fuzzing.tensors import Raw

SIDE = 64
PICTURES = ("dog1.png", "dog2.png", "dog3.png")


@dataclass(frozen=True)
class World:
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def pictures(self) -> Path:
        return self.folder / "pictures"

    @property
    def cache(self) -> Path:
        """Encodings; filled only for the cases that go beyond the checks."""
        return self.folder / "cache"

    @property
    def finished(self) -> Path:
        """A run that came to its end, with a checkpoint of each of its two steps; only for the same cases."""
        return self.folder / "finished"

    @property
    def training(self) -> dict[str, object]:
        """More flags, of that run: one layer, so that its step compiles quickly."""
        return {
            "encode_cache_dir": self.cache,
            "lora_layers": "single_transformer_blocks.1.attn.to_q",
            "max_train_steps": 2,
            "checkpointing_steps": 1,
        }

    @property
    def settings(self) -> dict[str, object]:
        """The flags of a run that could start, but for --output_dir."""
        return {
            "pretrained_model_name_or_path": self.model,
            "instance_data_dir": self.pictures,
            "instance_prompt": "a photo of sks dog",
            "resolution": 32,
            "max_sequence_length": 16,
            "rank": 4,
            "max_train_steps": 4,
            "device": "CPU",
            "report_to": "none",
            "dataloader_num_workers": 0,
        }

    @cached_property
    def weights(self) -> dict[str, Raw]:
        """Of the model's transformer."""
        return tensors.read(self.model / "transformer" / "diffusion_pytorch_model.safetensors")[0]

    def copy_model(self, folder: Path) -> Path:
        """A model that may be damaged."""
        shutil.copytree(self.model, folder)
        return folder

    def copy_pictures(self, folder: Path) -> Path:
        shutil.copytree(self.pictures, folder)
        return folder

    def state(self) -> dict[str, tuple[int, int]]:
        """Size and time of every shared file: they are nobody's to change."""
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in self._files()}

    def _files(self) -> Iterator[Path]:
        return (path for part in (self.model, self.pictures) for path in part.rglob("*"))


def make_world(folder: Path, python: str, environment: dict[str, str]) -> World:
    """Make it with the program under test, which must be able to do this much."""
    world = World(folder)
    words = [python, "-m", "flux_db", "tiny-model", str(world.model)]
    subprocess.run(words, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    world.pictures.mkdir()
    for number, name in enumerate(PICTURES):
        picture(number).save(world.pictures / name)
    return world


def train(world: World, python: str, environment: dict[str, str], script: Path) -> None:
    """Make `finished` and fill the cache."""
    settings = {**world.settings, **world.training, "output_dir": world.finished}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([python, str(script), *flags], env=environment, cwd=world.folder, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"the program under test cannot train: {done.stderr.decode(errors='replace')[-2000:]}")


def picture(number: int, size: tuple[int, int] = (SIDE, SIDE), mode: str = "RGB") -> Image.Image:
    """A picture that does not look like another one: a bright square on a slope of grey."""
    image = Image.linear_gradient("L").rotate(90 * number).resize(size).convert("RGB")
    box = [size[0] * (number % 3) // 4, size[1] * (number % 4) // 5]
    image.paste((250, 40 * number % 256, 10), (*box, box[0] + max(1, size[0] // 3), box[1] + max(1, size[1] // 3)))
    return image.convert(mode)
