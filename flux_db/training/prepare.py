"""Everything that happens before training, each stage in a process of its own so that its memory is really returned."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from flux_db import child
from flux_db.check.memory import memory_problems, memory_warnings
from flux_db.check.model import locate_checked
from flux_db.check.values import warnings as setting_warnings
from flux_db.console import printable, say
from flux_db.data import encode, encode_cache
from flux_db.data.dataset import Dataset, number_of_devices, read_dataset
from flux_db.data.encode_cache import Cache
from flux_db.data.selection import Survey, lacks_class_images, pictures_seen
from flux_db.errors import UserError
from flux_db.model.model_folder import fingerprint
from flux_db.run import checkpoint
from flux_db.settings.command_line import to_yaml
from flux_db.settings.schema import Config
from flux_db.training.resume import Start, find_start
from flux_db.training.scoring import demand_judge, demand_scoring

WARNINGS_SHOWN = 20


class Place(Protocol):
    """A process among others, as runtime.Runtime describes it."""

    @property
    def is_main(self) -> bool: ...

    @property
    def world_size(self) -> int: ...

    def barrier(self) -> None: ...


@dataclass(frozen=True)
class Alone:
    """The place of a process that has no others. MindSpore need not be imported for it, which takes seconds."""

    is_main: bool = True
    world_size: int = 1

    @property
    def devices(self) -> int | None:
        """How many the training will have, as launch sets it; None without launch."""
        return number_of_devices() if "MS_WORKER_NUM" in os.environ else None

    def barrier(self) -> None:
        """There is nobody to wait for."""


class Prepared(NamedTuple):
    model: Path
    cache: Cache
    dataset: Dataset
    start: Start


def prepare(config: Config, place: Place, seen: Survey | None = None) -> Prepared:
    """The model's folder, the filled cache, the data, and where to start. Encoders load only for what the cache lacks.

    `seen`: the pictures, as the checks have found them. With several devices everything must have been prepared before:
    no rank waits while another encodes.
    """
    output = Path(config.output.output_dir)
    if place.is_main:
        output.mkdir(parents=True, exist_ok=True)
        checkpoint.clean_leftovers(output)
    place.barrier()  # all ranks find the same checkpoints
    model = locate_checked(config)
    if problems := memory_problems(config, model):
        raise UserError(problems)
    cache = encode_cache.open_cache(config, model)
    dataset, warnings = read_dataset(config, seen)
    warnings = [*setting_warnings(config), *memory_warnings(config, model), *warnings]
    if place.is_main:
        for warning in warnings[:WARNINGS_SHOWN]:
            say(f"warning: {printable(warning)}")
        if len(warnings) > WARNINGS_SHOWN:
            say(f"warning: {len(warnings) - WARNINGS_SHOWN} more like these; python -m flux_db check lists them")
    lacks_class = lacks_class_images(config)
    devices = place.devices if isinstance(place, Alone) else place.world_size
    fingerprints = _fingerprints(config, model, cache, None if lacks_class else dataset)
    # a resume that is refused must not have encoded or written anything
    start = find_start(config, dataset, fingerprints, devices)
    if place.is_main:
        demand_scoring(config, dataset)
        cache.folder.mkdir(parents=True, exist_ok=True)
        pictures_seen(config).save()  # the stages and the other ranks need not look again
    work = encode.missing(config, cache, dataset)
    if place.world_size > 1 and (work or lacks_class):
        raise UserError(
            "not everything is encoded yet, and no device waits while another encodes; start with "
            "scripts/train_multi.sh, or run python -m flux_db prepare with the same flags first (on several servers "
            "all folders must be on a file system that all of them see)"
        )
    if lacks_class:
        _encode(config, cache, work)
        _run("class-images", config)
        dataset, _ = read_dataset(config, seen)
        fingerprints = _fingerprints(config, model, cache, dataset)
        start = find_start(config, dataset, fingerprints, devices)
        work = encode.missing(config, cache, dataset)
    _encode(config, cache, work)
    if place.is_main:
        pictures_seen(config).save()
        cache.files_seen.save()
    if not work and place.is_main:
        say("Prompts and pictures are already encoded: no encoder is loaded")
    return Prepared(model, cache, dataset, start)


def demand_resumable(config: Config, dataset: Dataset) -> None:
    """For `check`: a UserError if the trainer would refuse to go on from --resume_from_checkpoint, or to score samples.

    Writes nothing."""
    demand_judge(config, dataset)
    model = Path(config.model.pretrained_model_name_or_path)
    fingerprints: dict[str, str] = {}
    if model.is_dir():  # a model on the hub is compared once it is here
        whole = None if lacks_class_images(config) else dataset
        fingerprints = _fingerprints(config, model, encode_cache.open_cache(config, model), whole)
    find_start(config, dataset, fingerprints, Alone().devices)


def _fingerprints(config: Config, model: Path, cache: Cache, dataset: Dataset | None) -> dict[str, str]:
    """Of model and data, for checkpoints; without the data while class pictures are still to be drawn."""
    own_parts = fingerprint(model, ("transformer", "vae", "scheduler"), config.model.variant)
    found = {"model_fingerprint": own_parts + cache.text_model}
    return found if dataset is None else found | {"data_fingerprint": dataset.fingerprint()}


def _encode(config: Config, cache: Cache, work: encode.Work) -> None:
    if work:
        say(f"Encoding {work.describe()} in a process of its own; stored in {cache.folder}")
        _run("encode", config)


def _run(command: str, config: Config) -> None:
    with tempfile.TemporaryFile() as file:  # it has no name, so that nothing is left of it when this process is killed
        file.write(to_yaml(config).encode())
        file.seek(0)
        words = child.command(command, "--config", f"/dev/fd/{file.fileno()}")
        child.run(words, f"the {command} stage", files=[file.fileno()])


def encode_all(config: Config) -> None:
    """`python -m flux_db encode`: fill the cache in this process."""
    model = locate_checked(config)
    cache = encode_cache.open_cache(config, model)
    dataset, _ = read_dataset(config)
    work = encode.missing(config, cache, dataset)
    if work:
        encode.encode(config, model, cache, work)


def make_class_images(config: Config) -> None:
    """`python -m flux_db class-images`: draw the class pictures that are missing."""
    from flux_db.training import class_pictures

    class_pictures.generate(config)
