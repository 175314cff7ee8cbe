"""Everything that happens before training, each stage in a process of its own so that its memory is really returned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flux_db import encode, models
from flux_db.atomic import write_file
from flux_db.cli import to_yaml
from flux_db.config import Config
from flux_db.console import say
from flux_db.dataset import Dataset, read_dataset, sound_class_pictures
from flux_db.encode import Cache
from flux_db.errors import UserError

CONFIG_NAME = "config.yaml"


def prepare(config: Config) -> tuple[Path, Cache, Dataset]:
    """The model's folder, the filled cache, and the data. Encoders are loaded only for what the cache lacks."""
    output = Path(config.output.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    write_file(output / CONFIG_NAME, to_yaml(config).encode())
    model = models.locate(config.model)
    cache = encode.open_cache(config, model)
    dataset, warnings = read_dataset(config)
    for warning in warnings:
        say(f"warning: {warning}")
    if config.data.with_prior_preservation and len(dataset.class_samples) < config.data.num_class_images:
        _run("class-images", config)
        dataset, _ = read_dataset(config)
    work = encode.missing(config, cache, dataset)
    if work:
        say(f"Encoding {work.describe()} in a process of its own; stored in {cache.folder}")
        _run("encode", config)
    else:
        say("Prompts and pictures are already encoded: no encoder is loaded")
    return model, cache, dataset


def _run(command: str, config: Config) -> None:
    path = Path(config.output.output_dir, CONFIG_NAME)
    result = subprocess.run([sys.executable, "-m", "flux_db", command, "--config", str(path)], check=False)
    if result.returncode:
        raise UserError(f"the {command} stage failed with exit code {result.returncode}; its messages stand above")


def encode_all(config: Config) -> None:
    """`python -m flux_db encode`: fill the cache in this process."""
    model = models.locate(config.model)
    cache = encode.open_cache(config, model)
    dataset, _ = read_dataset(config)
    work = encode.missing(config, cache, dataset)
    if work:
        encode.encode(config, model, cache, work)


def make_class_images(config: Config) -> None:
    """`python -m flux_db class-images`: draw the class pictures that are missing."""
    from flux_db import prior

    prior.generate(config, have=sound_class_pictures(config))
