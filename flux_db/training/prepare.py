"""Everything that happens before training, each stage in a process of its own so that its memory is really returned."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flux_db import child
from flux_db.check.memory import fit_together, memory_problems, memory_warnings
from flux_db.check.model import locate_checked, model_warnings
from flux_db.check.subject import subject_warnings
from flux_db.check.values import warnings as setting_warnings
from flux_db.console import hold_back, printable, release, say
from flux_db.data import encode, encode_cache
from flux_db.data.dataset import Dataset, number_of_devices, read_dataset
from flux_db.data.encode_cache import Cache
from flux_db.data.selection import Survey, lacks_class_images, pictures_seen
from flux_db.errors import UserError, leave_behind
from flux_db.lora import init_lora
from flux_db.model.device import is_one_of_several
from flux_db.model.model_folder import fingerprint
from flux_db.run import checkpoint
from flux_db.settings.command_line import to_yaml
from flux_db.settings.schema import Config
from flux_db.training.resume import Start, find_start
from flux_db.training.scoring import demand_judge, demand_scoring

if TYPE_CHECKING:
    from flux_db.model.runtime import Runtime

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

    trains: bool = False
    """Whether this process goes on to train."""

    @property
    def devices(self) -> int | None:
        """How many the training will have: as launch sets it, or this one; None if neither is known."""
        if self.trains:
            return self.world_size
        return number_of_devices() if "MS_WORKER_NUM" in os.environ else None

    def barrier(self) -> None:
        """There is nobody to wait for."""


class Prepared(NamedTuple):
    model: Path
    cache: Cache
    dataset: Dataset
    start: Start


class Encoding:
    """Prompts and pictures that a process of its own encodes, if anything was missing."""

    def __init__(self, config: Config, cache: Cache, work: encode.Work, *, is_main: bool) -> None:
        self.config, self.cache, self.is_main = config, cache, is_main
        self._process: subprocess.Popen | None = None
        if work:
            say(f"Encoding {work.describe()} in a process of its own; stored in {cache.folder}")
            hold_back()  # until it has ended, the terminal is the child's
            self._process = _start("encode", config)
        elif is_main:
            say("Prompts and pictures are already encoded: no encoder is loaded")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Until everything is in the cache."""
        process, self._process = self._process, None
        if process is not None:
            try:
                child.finish(process, "the encode stage")
            finally:
                release()
        if self.is_main:
            pictures_seen(self.config).save()
            self.cache.files_seen.save()


def start(config: Config, seen: Survey) -> tuple[Runtime, Prepared, Encoding]:
    """The device and the data. What is not encoded yet, a process of its own encodes from now on.

    MindSpore, whose import takes seconds, is imported beside it. Models are built beside it only on the CPU, and only
    if all of them fit into memory: a device is for one process at a time.
    """
    if is_one_of_several():  # they join before they look for anything
        from flux_db.model import runtime

        device = runtime.start(config.runtime)
        return device, *begin(config, device, seen)
    prepared, encoding = begin(config, Alone(trains=True), seen)
    from flux_db.model import runtime

    if runtime.choose_device(config.runtime.device)[0] != "CPU" or not fit_together(config, prepared.model):
        encoding.wait()
    return runtime.start(config.runtime), prepared, encoding


def prepare(config: Config, place: Place, seen: Survey | None = None) -> Prepared:
    """The model's folder, the filled cache, the data, and where to start. Encoders load only for what the cache lacks.

    `seen`: the pictures, as the checks have found them. With several devices everything must have been prepared before:
    no rank waits while another encodes.
    """
    prepared, encoding = begin(config, place, seen)
    encoding.wait()
    return prepared


def begin(config: Config, place: Place, seen: Survey | None = None) -> tuple[Prepared, Encoding]:
    """The same, but the cache is filled only when the encoding has ended."""
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
    warnings = [*subject_warnings(config, dataset), *memory_warnings(config, model), *warnings]
    warnings = [*setting_warnings(config), *model_warnings(config, model), *warnings]
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
        Encoding(config, cache, work, is_main=False).wait()
        child.finish(_start("class-images", config), "the class-images stage")
        dataset, _ = read_dataset(config, seen)
        fingerprints = _fingerprints(config, model, cache, dataset)
        start = find_start(config, dataset, fingerprints, devices)
        work = encode.missing(config, cache, dataset)
    return Prepared(model, cache, dataset, start), Encoding(config, cache, work, is_main=place.is_main)


def demand_resumable(config: Config, dataset: Dataset) -> None:
    """For `check`: a UserError if the trainer would refuse to go on from --resume_from_checkpoint, or to score samples.

    Writes nothing."""
    demand_judge(config, dataset)
    model = Path(config.model.pretrained_model_name_or_path)
    fingerprints: dict[str, str] = init_lora.fingerprint(config)
    if model.is_dir():  # a model on the hub is compared once it is here
        whole = None if lacks_class_images(config) else dataset
        fingerprints = _fingerprints(config, model, encode_cache.open_cache(config, model), whole)
    find_start(config, dataset, fingerprints, Alone().devices)


def _fingerprints(config: Config, model: Path, cache: Cache, dataset: Dataset | None) -> dict[str, str]:
    """Of model and data, for checkpoints; without the data while class pictures are still to be drawn."""
    own_parts = fingerprint(model, ("transformer", "vae", "scheduler"), config.model.variant)
    found = {"model_fingerprint": own_parts + cache.text_model, **init_lora.fingerprint(config)}
    return found if dataset is None else found | {"data_fingerprint": dataset.fingerprint()}


def _start(command: str, config: Config) -> subprocess.Popen:
    with tempfile.TemporaryFile() as file:  # it has no name, so that nothing is left of it when this process is killed
        file.write(to_yaml(config).encode())
        file.seek(0)
        return child.start(child.command(command, "--config", f"/dev/fd/{file.fileno()}"), files=[file.fileno()])


def encode_all(config: Config) -> None:
    """`python -m flux_db encode`: fill the cache in this process."""
    model = locate_checked(config)
    cache = encode_cache.open_cache(config, model)
    dataset, _ = read_dataset(config)
    work = encode.missing(config, cache, dataset)
    if work:
        encode.encode(config, model, cache, work)
        leave_behind("MindSpore")  # taking it down takes half a second, and the trainer waits


def make_class_images(config: Config) -> None:
    """`python -m flux_db class-images`: draw the class pictures that are missing."""
    from flux_db.training import class_pictures

    class_pictures.generate(config)
