"""The training step, compiled: how long it takes, for which sizes, and whether it is stored."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn

import flux_db
from flux_db.check.compile_time import expected_time
from flux_db.console import say, stage
from flux_db.data.batches import BatchSource
from flux_db.model import compile_cache, model_folder
from flux_db.model.compile_cache import StoredGraphs
from flux_db.model.device import AscendFacts, ascend_facts, soc_name
from flux_db.model.runtime import Runtime
from flux_db.settings.schema import Config
from flux_db.size import Size
from flux_db.step_inputs import StepInputs

# A size that no step has among so many is compiled when it comes, and not stored.
LOOK_AHEAD = 10_000


class StepCompiler:
    """Compiles the step once for each size, from the disk if it is stored there. Of `source` only shapes matter."""

    def __init__(self, config: Config, runtime: Runtime, model: Path, step: nn.Cell, source: BatchSource) -> None:
        self.config = config
        self.runtime = runtime
        self.model = model
        self.step = step
        self.source = source
        self._compiled: set[Size] = set()

    def prepare(self) -> None:
        """With the compile cache: all sizes now, in a fixed order. Otherwise each is compiled when it comes."""
        wanted = self.config.runtime
        if self._compiled or not compile_cache.is_on(wanted.compile_cache, self.runtime.device):
            return
        first = first_of_each_size(self.source)
        if not first:  # the run has taken its last step, and only its last round or files are missing
            return
        inputs = {size: tensors(self.source[first[size]]) for size in sorted(first)}
        root = Path(wanted.compile_cache_dir or compile_cache.default_folder(os.environ)).expanduser().absolute()
        name = compile_cache.key(self._parts(list(inputs.values()), ascend_facts()))
        stored = StoredGraphs(root, name, len(inputs))
        if self.runtime.is_main and stored.is_usable:
            say(f"Compiled steps are {'loaded from' if stored.is_stored else 'stored in'} {stored.folder}")
        with stored.storing():
            for size, given in inputs.items():
                self._compile(size, given, is_stored=stored.is_stored)
                stored.hidden += compile_cache.hidden_parameters(self.step)

    def compile_first(self) -> None:
        """Before the loop needs it."""
        self.prepare()
        self.demand(self.source.size(0), tensors(self.source[0]))

    def demand(self, size: Size, inputs: Sequence[Tensor]) -> bool:
        """Have the step compiled for this size; returns whether that was to be done."""
        if size in self._compiled:
            return False
        self._compile(size, inputs, is_stored=False)
        return True

    def _compile(self, size: Size, inputs: Sequence[Tensor], *, is_stored: bool) -> None:
        several = len(self.source.dataset.sizes) > 1
        what = ("Loading the compiled" if is_stored else "Compiling the") + " training step"
        text = what + (f" for {size}" if several else "")
        if not is_stored and (told := expected_time(block_count(self.model), self.runtime.device)):
            text += f", which takes {told}"
        with stage(text):
            self.step.compile(*inputs)
        give_back_memory()
        self._compiled.add(size)

    def _parts(self, inputs: Sequence[Sequence[Tensor]], facts: AscendFacts) -> dict:
        return {
            "schema": 1,
            "sources": compile_cache.sources_digest(Path(flux_db.__file__).parent),
            "versions": compile_cache.versions(facts),
            "settings": compile_cache.graph_settings(self.config),
            "model": {part: model_folder.read_config(self.model, part) for part in self._network_parts()},
            "parameters": compile_cache.parameter_list(self.step),
            "inputs": [[(tuple(x.shape), str(x.dtype)) for x in given] for given in inputs],
            "device": [self.runtime.device, soc_name(), str(self.runtime.dtype)],
            "rank": [self.runtime.rank, self.runtime.world_size],
        }

    def _network_parts(self) -> tuple[str, ...]:
        clip = ("text_encoder",) if self.config.text_encoder.train_text_encoder else ()
        return ("transformer", "vae", "scheduler", *clip)


def give_back_memory() -> None:
    """To the system, what compiling has freed: the step's own memory then takes its place instead of coming on top."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def tensors(batch: StepInputs) -> list[Tensor]:
    return [Tensor(np.asarray(column)) for column in batch.given]


def first_of_each_size(source: BatchSource) -> dict[Size, int]:
    """The number of the first batch of every size."""
    found: dict[Size, int] = {}
    for i in range(min(len(source), LOOK_AHEAD)):
        found.setdefault(source.size(i), i)
        if len(found) == len(source.dataset.sizes):
            break
    return found


def block_count(model: Path) -> int:
    settings = model_folder.read_config(model, "transformer")
    return settings.get("num_layers", 19) + settings.get("num_single_layers", 38)
