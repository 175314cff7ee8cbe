"""Class pictures for prior preservation: what is missing is drawn by the base model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flux_db.atomic import write_png
from flux_db.check.model import locate_checked
from flux_db.console import printable, say, stage
from flux_db.data import encode_cache
from flux_db.data.pictures import Picture, find_pictures
from flux_db.data.selection import sound_class_pictures
from flux_db.errors import UserError
from flux_db.model import loading, runtime
from flux_db.model.sampler import Request, Sampler, SampleSettings
from flux_db.progress import progress_bar
from flux_db.settings.derived import class_path, is_int8
from flux_db.settings.schema import Config
from flux_db.size import Size
from flux_db.stream import Purpose

NAME = "class-{:05d}.png"


def generate(config: Config) -> None:
    """Draw class pictures until there are enough; a damaged one is replaced. A stopped run goes on where it was.

    Under msrun each rank draws its share. The class prompt must be encoded already: no encoder is loaded here.
    """
    device = runtime.start(config.runtime)
    folder = class_path(config)
    folder.mkdir(parents=True, exist_ok=True)
    if device.is_main:
        _set_damaged_aside(folder, sound_class_pictures(config))
    device.barrier()
    numbers = _missing_numbers(config, folder)[device.rank :: device.world_size]
    device.barrier()  # all have looked before one writes
    if not numbers:
        return
    model = locate_checked(config)
    cache = encode_cache.open_cache(config, model)
    prompt = cache.read(cache.prompt_file(config.data.class_prompt))
    if prompt is None:
        raise UserError("--class_prompt is not encoded yet; run python -m flux_db encode with the same flags first")
    with stage("Loading the transformer to draw class pictures"):
        sampler = Sampler(
            model,
            loading.load_transformer(model, device.dtype, config.model.variant, is_int8=is_int8(config)),
            device.dtype,
            config.model.variant,
            config.validation.vae_tiling,
        )
    # noise of their own: otherwise samples of the same seed would start from that of pictures that were trained on
    requests = [
        Request(**prompt, seed=config.output.seed, number=number, purpose=Purpose.CLASS_PICTURE) for number in numbers
    ]
    settings = SampleSettings(
        size=Size.square(config.data.resolution),
        steps=config.validation.validation_inference_steps,
        guidance=config.validation.validation_guidance,
        batch=min(config.data.sample_batch_size, len(requests)),
    )
    pictures = progress_bar(
        sampler.draw(requests, settings),
        total=len(requests),
        desc="class pictures" if device.world_size == 1 else f"class pictures of rank {device.rank}",
        unit="picture",
    )
    for number, picture in zip(numbers, pictures, strict=True):
        write_png(folder / NAME.format(number), picture)


def _missing_numbers(config: Config, folder: Path) -> list[int]:
    missing = config.data.num_class_images - len(sound_class_pictures(config))
    taken = {path.name for path in folder.iterdir()}
    free = (n for n in range(config.data.num_class_images + len(taken)) if NAME.format(n) not in taken)
    return list(free)[: max(0, missing)]


def _set_damaged_aside(folder: Path, sound: Sequence[Picture]) -> None:
    known = {picture.path for picture in sound}
    for source in find_pictures(folder, may_be_empty=True).sources:
        if source.path not in known:
            path = printable(str(source.path))
            say(f"warning: {path} cannot be opened; it is drawn anew, and kept with .damaged after its name")
            source.path.rename(source.path.with_name(source.path.name + ".damaged"))
