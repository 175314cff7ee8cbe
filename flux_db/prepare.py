"""Everything that happens before training, each stage in a process of its own so that its memory is really returned."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flux_db import checkpoint, encode
from flux_db.atomic import write_file
from flux_db.cli import to_yaml
from flux_db.config import Config
from flux_db.console import say
from flux_db.dataset import Dataset, lacks_class_images, read_dataset
from flux_db.encode import Cache
from flux_db.errors import RunError, UserError
from flux_db.model_files import check_model, locate

CONFIG_NAME = "config.yaml"
WARNINGS_SHOWN = 20


class Place(Protocol):
    """A process among others, as runtime.Runtime tells it."""

    @property
    def is_main(self) -> bool: ...

    @property
    def world_size(self) -> int: ...


@dataclass(frozen=True)
class Alone:
    """The place of a process that has no others. MindSpore need not be imported for it, which takes seconds."""

    is_main: bool = True
    world_size: int = 1


def prepare(config: Config, place: Place) -> tuple[Path, Cache, Dataset]:
    """The model's folder, the filled cache, and the data. Encoders are loaded only for what the cache lacks.

    With several cards everything must have been prepared before: no rank waits while another encodes.
    """
    output = Path(config.output.output_dir)
    if place.is_main:
        output.mkdir(parents=True, exist_ok=True)
        checkpoint.clean_leftovers(output)
        write_file(output / CONFIG_NAME, to_yaml(config).encode())
    model = locate(config.model)
    if problems := check_model(model, config):
        raise UserError(problems)
    cache = encode.open_cache(config, model)
    dataset, warnings = read_dataset(config)
    if place.is_main:
        for warning in warnings[:WARNINGS_SHOWN]:
            say(f"warning: {warning}")
        if len(warnings) > WARNINGS_SHOWN:
            say(f"warning: {len(warnings) - WARNINGS_SHOWN} more like these; python -m flux_db check lists them")
    work = encode.missing(config, cache, dataset)
    lacks_class = lacks_class_images(config)
    if place.world_size > 1 and (work or lacks_class):
        raise UserError(
            "not everything is encoded yet, and no card waits while another encodes; start with scripts/train_multi.sh,"
            " or run python -m flux_db prepare with the same flags first (on several servers all folders must be on a "
            "file system that all of them see)"
        )
    if lacks_class:
        _encode(config, cache, work)
        _run("class-images", config)
        dataset, _ = read_dataset(config)
        work = encode.missing(config, cache, dataset)
    _encode(config, cache, work)
    if not work and place.is_main:
        say("Prompts and pictures are already encoded: no encoder is loaded")
    return model, cache, dataset


def _encode(config: Config, cache: Cache, work: encode.Work) -> None:
    if work:
        say(f"Encoding {work.describe()} in a process of its own; stored in {cache.folder}")
        _run("encode", config)


def _run(command: str, config: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIG_NAME)
        path.write_text(to_yaml(config), encoding="utf-8")
        result = subprocess.run([sys.executable, "-m", "flux_db", command, "--config", str(path)], check=False)
    if result.returncode:
        failure = UserError if result.returncode == 2 else RunError
        raise failure(f"the {command} stage failed with exit code {result.returncode}; its messages stand above")


def encode_all(config: Config) -> None:
    """`python -m flux_db encode`: fill the cache in this process."""
    model = locate(config.model)
    cache = encode.open_cache(config, model)
    dataset, _ = read_dataset(config)
    work = encode.missing(config, cache, dataset)
    if work:
        encode.encode(config, model, cache, work)


def make_class_images(config: Config) -> None:
    """`python -m flux_db class-images`: draw the class pictures that are missing."""
    from flux_db import prior

    prior.generate(config)
