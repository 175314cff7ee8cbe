"""Where a run is shown besides its own files: TensorBoard, wandb, SwanLab."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml
from PIL import Image

from flux_db.config import Config, shown_settings
from flux_db.console import say
from flux_db.errors import UserError

PROJECT = "flux-db"


class Tracker(Protocol):
    """What the reporter asks of a tracker."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def picture(self, name: str, picture: Image.Image, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Files in --logging_dir; the settings stand under Text."""

    def __init__(self, config: Config) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(Path(config.output.output_dir, config.output.logging_dir)))
        text = yaml.safe_dump(shown_settings(config), sort_keys=False, allow_unicode=True)
        # four spaces make it a block of code in TensorBoard's Markdown
        self._writer.add_text("settings", "".join(f"    {line}\n" for line in text.splitlines()), 0)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self._writer.add_image(name, np.asarray(picture), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps everything in the output folder."""

    def __init__(self, config: Config) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        output = Path(config.output.output_dir)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", output.name),
            dir=str(output),
            config=shown_settings(config),
            settings={"console": "off"},  # what is printed stays here
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self._run.log({name: self._wandb.Image(picture)}, step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """SwanLab; SWANLAB_MODE=offline (or local, or disabled) keeps everything on this machine."""

    def __init__(self, config: Config) -> None:
        self._swanlab: Any = importlib.import_module("swanlab")
        output = Path(config.output.output_dir)
        self._run = self._swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            experiment_name=output.name,
            logdir=str(output / "swanlog"),
            config=shown_settings(config),
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self._run.log({name: self._swanlab.Image(picture)}, step=step)

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, Callable[[Config], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "swanlab": SwanLab}


class Trackers:
    """All trackers of a run. One that fails while training is given up with a warning; the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._each(lambda tracker: tracker.scalars(values, step))

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self._each(lambda tracker: tracker.picture(name, picture, step))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as problem:
                del self._trackers[name]
                say(f"warning: {name} is given up: {type(problem).__name__}: {problem}; metrics.jsonl has everything")


def without_tokens(argv: Sequence[str]) -> list[str]:
    """A command line without flags whose name ends in token, and without their values."""
    kept: list[str] = []
    secret = False
    for word in argv:
        flag = word.split("=")[0]
        if not secret and not (flag.startswith("--") and flag.endswith("token")):
            kept.append(word)
        secret = flag == word and flag.startswith("--") and flag.endswith("token")
    return kept


def open_trackers(config: Config) -> Trackers:
    """The trackers of --report_to. One that cannot start is an error now, not after hours."""
    opened: dict[str, Tracker] = {}
    # wandb and SwanLab send the command line along
    sys.argv[:] = without_tokens(sys.argv)
    for name in config.output.trackers:
        try:
            opened[name] = KINDS[name](config)
        except Exception as problem:
            Trackers(opened).close()
            text = f"{type(problem).__name__}: {problem}"
            hint = "" if name == "tensorboard" else f"; log in, or set {name.upper()}_MODE=offline"
            raise UserError(f"--report_to {name}: it does not start: {text}{hint}, or leave it out") from problem
    return Trackers(opened)
