"""Everything that happens before training, each stage in a process of its own so that its memory is really returned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flux_db import checkpoint, encode, models
from flux_db.atomic import write_file
from flux_db.cli import to_yaml
from flux_db.config import Config
from flux_db.console import say
from flux_db.dataset import Dataset, read_dataset, sound_class_pictures
from flux_db.encode import Cache
from flux_db.errors import UserError
from flux_db.preflight import check_model
from flux_db.runtime import Runtime

CONFIG_NAME = "config.yaml"
WARNINGS_SHOWN = 20


def prepare(config: Config, runtime: Runtime) -> tuple[Path, Cache, Dataset]:
    """The model's folder, the filled cache, and the data. Encoders are loaded only for what the cache lacks.

    With several cards everything must have been prepared before: no rank waits while another encodes.
    """
    output = Path(config.output.output_dir)
    if runtime.is_main:
        output.mkdir(parents=True, exist_ok=True)
        checkpoint.clean_leftovers(output)
        write_file(output / CONFIG_NAME, to_yaml(config).encode())
    model = models.locate(config.model)
    if problems := check_model(model, config):
        raise UserError(problems)
    cache = encode.open_cache(config, model)
    dataset, warnings = read_dataset(config)
    if runtime.is_main:
        for warning in warnings[:WARNINGS_SHOWN]:
            say(f"warning: {warning}")
        if len(warnings) > WARNINGS_SHOWN:
            say(f"warning: {len(warnings) - WARNINGS_SHOWN} more like these; python -m flux_db check lists them")
    lacks_class = config.data.with_prior_preservation and len(dataset.class_samples) < config.data.num_class_images
    if lacks_class and runtime.world_size == 1:
        _run("class-images", config)
        dataset, _ = read_dataset(config)
    work = encode.missing(config, cache, dataset)
    if runtime.world_size > 1 and (work or lacks_class):
        raise UserError(
            "--distributed: not everything is encoded yet; run python -m flux_db prepare with the same flags first "
            "(without msrun)"
        )
    if work:
        say(f"Encoding {work.describe()} in a process of its own; stored in {cache.folder}")
        _run("encode", config)
    elif runtime.is_main:
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
