"""What this program does around each compilation of MindSpore: one hook for all of it.

MindSpore's executor is asked to compile at every call of a cell, and mostly finds that it has. The last thing that it
does before it really compiles is to list the sources of the script, for a cache that this program does not use; there
is the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from mindspore import nn

try:  # MindSpore 2.9 and later
    from mindspore.graph.api import _cell_graph_executor, _CellGraphExecutor
except ImportError:
    from mindspore.common.api import _cell_graph_executor, _CellGraphExecutor

Around = Callable[[nn.Cell, Sequence[Any], Mapping[str, Any]], AbstractContextManager[None]]
"""A context for the compilation of a cell with such inputs, positional and by name."""

_compile, _note_sources = _CellGraphExecutor.compile, _CellGraphExecutor._set_compile_cache_dep_files
_OWN_OPTIONS = ("phase", "do_convert", "jit_config_dict")
"""Of the executor's `compile`; other options are inputs of the cell."""
_around: tuple[Around, ...] = ()


def install(*around: Around) -> None:
    """From now on every compilation of this process happens inside these contexts; with none, as MindSpore has it."""
    global _around
    _around = around
    _CellGraphExecutor.compile = _compile_inside if around else _compile
    _CellGraphExecutor._set_compile_cache_dep_files = _begin if around else _note_sources


def parameters_of_graph(cell: nn.Cell) -> set[str]:
    """Names of the parameters that the graph compiled last for the cell uses."""
    return set(_cell_graph_executor._graph_executor.get_params(cell.current_phase))


def _compile_inside(executor: _CellGraphExecutor, cell: nn.Cell, *inputs: Any, **options: Any) -> Any:
    """In the place of the executor's `compile`."""
    with ExitStack() as stack:

        def begin() -> None:
            given = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
            for around in _around:
                stack.enter_context(around(cell, inputs, given))

        executor.begin_compiling = begin
        return _compile(executor, cell, *inputs, **options)


def _begin(executor: _CellGraphExecutor, phase: str) -> None:
    executor.begin_compiling()
    executor._graph_executor.set_compile_cache_dep_files([])
