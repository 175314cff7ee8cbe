"""Compiled graphs on disk, so that a later run does not compile them again.

MindSpore stores graphs in one folder by their number alone: the third graph that a process compiles is loaded from the
third file, whatever it is. So the cache is switched on only around the graphs that are stored, these are compiled in a
fixed order, and the folder's name is a hash of everything that they are made from. And MindSpore gives a loaded graph
the values of the cell's own parameters only: one that the graph uses and the cell does not list would hold garbage, so
such a graph is not stored.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mindspore import nn
from mindspore.common.api import _cell_graph_executor

from flux_db.atomic import leftovers, remove_folder, remove_leftover, sync_folder, temp_path
from flux_db.console import say
from flux_db.errors import RunError
from flux_db.model.device import AscendFacts
from flux_db.settings.preserved import is_preserved
from flux_db.settings.schema import Config, to_flat_dict

ENABLE, PLACE = "MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH"
MOST_KEPT = 20
ABANDONED_SECONDS = 24 * 3600
PACKAGES = ("mindspore", "mindone", "numpy")

# Settings that reach neither the graph nor its constants. What is not listed, a new setting included, is part of the
# name: to list one too few costs a compilation, one too many a wrong result.
OUTSIDE_SECTIONS = ("model", "validation", "output", "hub")
OUTSIDE = frozenset(
    {
        # pictures and prompts come in as inputs, and learning rates too
        *("instance_data_dir", "dataset_name", "dataset_config_name", "image_column", "caption_column"),
        *("concepts", "instance_prompt", "trigger_word", "class_data_dir", "class_prompt", "num_class_images"),
        *("sample_batch_size", "aspect_ratio_buckets", "max_buckets", "center_crop", "cache_crops", "random_flip"),
        *("repeats", "mask_dir", "alpha_mask", "unmasked_weight", "caption_dropout", "alpha_background"),
        *("encode_cache_dir", "dataloader_num_workers"),
        *("logit_mean", "logit_std", "mode_scale", "timestep_sampling", "sigmoid_scale", "flow_shift"),
        *("init_lora", "init_lora_resize", "init_lora_transformer_only"),
        *("num_train_epochs", "max_train_steps", "max_train_minutes", "learning_rate", "scale_lr"),
        *("lr_scheduler", "lr_warmup_steps", "lr_num_cycles", "lr_power"),
        *("compile_cache", "compile_cache_dir", "distributed"),
    }
)


def is_on(wanted: str, device: str) -> bool:
    """`auto`: on Ascend, where compiling takes minutes."""
    return wanted == "on" or (wanted == "auto" and device == "Ascend")


def environment_problem(environment: Mapping[str, str]) -> str | None:
    """Why MindSpore's own switch is refused; None if it is not set."""
    if environment.get(ENABLE) != "1":
        return None
    return f"{ENABLE}=1: MindSpore would load graphs by their number alone; unset it and use --compile_cache on"


# --- the name --------------------------------------------------------------------------------------------------------


def key(parts: Mapping[str, Any]) -> str:
    """A hash of plain values; the same for equal ones in any order of names."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def graph_settings(config: Config) -> dict[str, Any]:
    """The settings that may reach the graph. The seed is one of them: a constant may be drawn with it."""
    values = to_flat_dict(config)
    for section in OUTSIDE_SECTIONS:
        for name in vars(getattr(config, section)):
            del values[name]
    inside = {name: value for name, value in values.items() if name not in OUTSIDE}
    return inside | {"seed": config.output.seed, "concepts": len(config.data.concepts), "held": is_preserved(config)}


def versions(facts: AscendFacts) -> dict[str, str | None]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {**found, "python": platform.python_version(), "cann": facts.cann, "driver": facts.driver}


def sources_digest(folder: Path) -> str:
    """Of every Python file below the folder, by name and content."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def parameter_list(cell: nn.Cell) -> list[tuple[str, tuple[int, ...], str, bool]]:
    return sorted((p.name, tuple(p.shape), str(p.dtype), p.requires_grad) for p in cell.get_parameters())


def hidden_parameters(cell: nn.Cell) -> list[str]:
    """Parameters that the cell's compiled graph uses and the cell does not list."""
    used = _cell_graph_executor._graph_executor.get_params(cell.current_phase)
    return sorted(set(used) - set(cell.parameters_dict()))


def default_folder(environment: Mapping[str, str]) -> Path:
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "flux_db", "graphs")


# --- the folder ------------------------------------------------------------------------------------------------------


class StoredGraphs:
    """The graphs of one kind of run: `count` of them, compiled inside `storing` in a fixed order.

    A process can use one folder only, because MindSpore reads its name once: `is_usable` is false for any further one.
    """

    _is_taken = False

    def __init__(self, root: Path, name: str, count: int) -> None:
        self.folder = root / name
        self.count = count
        self.is_usable = not StoredGraphs._is_taken
        self.is_stored = self.is_usable and self._is_whole(self.folder)
        self.hidden: list[str] = []
        """Names of hidden parameters, if there are any: then nothing is stored."""

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Load what is compiled in this block, or compile and store it: all of it, or nothing."""
        if not self.is_usable:
            yield
            return
        StoredGraphs._is_taken = True
        if self.is_stored:
            os.utime(self.folder)
            with self._loading():
                yield
            return
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            new = temp_path(self.folder)
            new.mkdir(mode=0o700)
        except OSError as error:
            say(f"warning: --compile_cache: {error.filename}: {error.strerror}; compiling without it")
            yield
            return
        try:
            with _switched_on(new):
                yield
            self._keep(new)
        finally:
            if new.exists():
                with suppress(OSError):
                    remove_leftover(new)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        try:
            with _switched_on(self.folder):
                yield
        except Exception as error:
            remove_folder(self.folder)
            raise RunError(
                f"--compile_cache: the stored graph in {self.folder} cannot be used and was removed"
                f" ({type(error).__name__}); start again to compile it anew"
            ) from error

    def _keep(self, new: Path) -> None:
        if self.hidden:
            say(f"warning: --compile_cache: not stored, because the graph hides parameters: {', '.join(self.hidden)}")
            return
        if not self._is_whole(new):
            say(f"warning: --compile_cache: MindSpore did not store the graph in {self.folder.parent}; is it full?")
            return
        with suppress(OSError):  # another run was faster, and its folder is as good
            new.rename(self.folder)
            sync_folder(self.folder.parent)
        _prune(self.folder.parent, keep=self.folder)

    def _is_whole(self, folder: Path) -> bool:
        files = list(folder.glob("rank_*/graph_cache/*compile_cache_*.mindir"))
        return len(files) >= self.count and all(file.stat().st_size for file in files)


@contextmanager
def _switched_on(folder: Path) -> Iterator[None]:
    os.environ[ENABLE], os.environ[PLACE] = "1", str(folder)
    try:
        yield
    finally:
        del os.environ[ENABLE], os.environ[PLACE]


def _prune(root: Path, keep: Path) -> None:
    """Keep the folders that were used last, and nothing that a dead run left."""
    with suppress(OSError):
        for path in leftovers(root):
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                remove_leftover(path)
        folders = sorted((f for f in root.iterdir() if f.is_dir() and not f.name.startswith(".")), key=_age)
        for folder in folders[MOST_KEPT:]:
            if folder != keep:
                remove_folder(folder)


def _age(folder: Path) -> float:
    return -folder.stat().st_mtime
