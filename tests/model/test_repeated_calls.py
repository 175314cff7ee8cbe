"""Calls of what is compiled already."""

import numpy as np
from mindspore import Tensor, nn

from flux_db.model.repeated_calls import CalledOften


class Below(nn.Cell):
    written = 0

    @property
    def compile_phase(self):
        return self._compile_phase

    @compile_phase.setter
    def compile_phase(self, value):
        type(self).written += 1
        nn.Cell.compile_phase.fset(self, value)

    def construct(self, x):
        return x + 1.0


class Plain(nn.Cell):
    def __init__(self):
        super().__init__()
        self.below = Below()

    def construct(self, x):
        return self.below(x) * 2.0


class Often(CalledOften, Plain):
    pass


def writes(cell, *sizes):
    """How often a cell below was written to in each call, with inputs of these sizes; results are checked."""
    found = []
    for size in sizes:
        before = Below.written
        assert (cell(Tensor(np.ones(size, np.float32))).asnumpy() == 4.0).all()
        found.append(Below.written - before)
    return found


def test_the_cells_below_hear_of_a_graph_only_when_it_is_compiled(cpu):
    assert writes(Plain(), 2, 2, 3, 2) == [1, 1, 1, 1], "MindSpore no longer does this: CalledOften can go"
    assert writes(Often(), 2, 2, 3, 2, 3) == [1, 0, 1, 0, 0]


def test_a_cell_that_forgot_its_graphs_compiles_anew(cpu):
    cell = Often()
    writes(cell, 2)
    cell.compile_cache.clear()
    assert writes(cell, 2, 2) == [1, 0]
