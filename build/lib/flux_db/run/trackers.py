"""Where a run is shown besides its own files: TensorBoard, wandb, SwanLab."""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml
from PIL import Image

from flux_db.console import say
from flux_db.errors import UserError, describe, is_full, leave_behind
from flux_db.settings.derived import shown_settings
from flux_db.settings.schema import Config

PROJECT = "flux-db"

# TensorBoard shows what has been flushed.
FLUSH_SECONDS = 10.0
# Calls that a slow tracker may be behind, and how long a run waits, once, for one that is further behind.
MOST_WAITING = 500
PATIENCE_SECONDS = 10.0
# wandb and SwanLab upload what is left when they are closed.
CLOSING_SECONDS = 120.0


class Tracker(Protocol):
    """What the metrics_log asks of a tracker."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def picture(self, name: str, picture: Image.Image, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Files in --logging_dir; the settings are under Text.

    tensorboardX's SummaryWriter is not used: on a full disk its thread dies, and then every call blocks for ever.
    """

    def __init__(self, config: Config) -> None:
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto.event_pb2 import Event

        folder = Path(config.output.output_dir, config.output.logging_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._summary, self._event = summary, Event
        self._writer = event_file_writer.EventsWriter(str(folder / "events"))
        text = yaml.safe_dump(shown_settings(config), sort_keys=False, allow_unicode=True)
        # four spaces make it a block of code in TensorBoard's Markdown
        self._write(summary.text("settings", "".join(f"    {line}\n" for line in text.splitlines())), 0)
        self._flush()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._write(self._summary.scalar(name, value), step)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self._write(self._summary.image(name, np.asarray(picture), dataformats="HWC"), step)
        self._flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, content: Any, step: int) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=content))

    def _flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()


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


class Feed:
    """Feeds a tracker from a thread of its own: one that fails or hangs is given up, and the run goes on."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_WAITING)
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name=f"feed of {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Have the tracker called. None ends the thread."""
        if self._given_up:
            return
        try:
            self._calls.put(call, timeout=PATIENCE_SECONDS)
        except queue.Full:
            if not self._given_up:  # it may have failed meanwhile
                self._leave(f"it has taken nothing for {PATIENCE_SECONDS:g} s")

    def close(self) -> None:
        self.put(lambda tracker: tracker.close())
        self.put(None)
        if self._given_up:
            return
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            self._leave(f"it has not finished within {CLOSING_SECONDS:g} s")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call(self._tracker)
            except Exception as problem:
                self._give_up(f"{type(problem).__name__}: {problem}")
                return

    def _leave(self, reason: str) -> None:
        leave_behind(self._name)
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        if not self._given_up:
            say(f"warning: {self._name} is given up: {reason}; metrics.jsonl has everything")
        self._given_up = True


class Trackers:
    """All trackers of a run."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._feeds = [Feed(name, tracker) for name, tracker in trackers.items()]

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._each(lambda tracker: tracker.scalars(values, step))

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self._each(lambda tracker: tracker.picture(name, picture, step))

    def close(self) -> None:
        for feed in self._feeds:
            feed.close()
        self._feeds.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for feed in self._feeds:
            feed.put(call)


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
    """The trackers of --report_to. One that cannot start is an error now, not after hours; a full disk is a warning."""
    opened: dict[str, Tracker] = {}
    # wandb and SwanLab send the command line along
    sys.argv[:] = without_tokens(sys.argv)
    for name in config.output.trackers:
        try:
            opened[name] = KINDS[name](config)
        except Exception as problem:
            if is_full(problem):
                say(f"warning: {name} is left out: {describe(problem)}")
                continue
            Trackers(opened).close()
            text = f"{type(problem).__name__}: {problem}"
            hint = "" if name == "tensorboard" else f"; log in, or set {name.upper()}_MODE=offline"
            raise UserError(f"--report_to {name}: it does not start: {text}{hint}, or leave it out") from problem
    return Trackers(opened)
