"""The training step, compiled: how long it takes, for which sizes, and whether it is stored."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn

from flux_db.check.compile_time import expected_time
from flux_db.console import stage
from flux_db.data.batches import BatchSource
from flux_db.model import compile_cache, model_folder
from flux_db.model.runtime import Runtime
from flux_db.size import Size
from flux_db.step_inputs import StepInputs


class StepCompiler:
    """Compiles the step once for each size, from the disk if it is stored there. Of `source` only shapes matter."""

    def __init__(self, runtime: Runtime, model: Path, step: nn.Cell, source: BatchSource) -> None:
        self.runtime = runtime
        self.model = model
        self.step = step
        self.source = source
        self._compiled: set[Size] = set()

    def compile_first(self) -> None:
        """Before the loop needs it."""
        self.demand(self.source.size(0), tensors(self.source[0]))

    def demand(self, size: Size, inputs: Sequence[Tensor]) -> bool:
        """Have the step compiled for this size; returns whether that was to be done."""
        if size in self._compiled:
            return False
        self._compile(size, inputs)
        return True

    def _compile(self, size: Size, inputs: Sequence[Tensor]) -> None:
        several = len(self.source.dataset.sizes) > 1
        is_stored = compile_cache.is_stored(self.step, inputs)
        what = ("Loading the compiled" if is_stored else "Compiling the") + " training step"
        text = what + (f" for {size}" if several else "")
        if not is_stored and (duration := expected_time(block_count(self.model), self.runtime.device)):
            text += f", which takes {duration}"
        with stage(text):
            self.step.compile(*inputs)
        give_back_memory()
        self._compiled.add(size)


def give_back_memory() -> None:
    """To the system, what compiling has freed: the step's own memory then takes its place instead of coming on top."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def tensors(batch: StepInputs) -> list[Tensor]:
    return [Tensor(np.asarray(column)) for column in batch.given]


def block_count(model: Path) -> int:
    settings = model_folder.read_config(model, "transformer")
    return settings.get("num_layers", 19) + settings.get("num_single_layers", 38)
