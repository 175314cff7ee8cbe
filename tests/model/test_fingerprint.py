"""What a graph is made from: everything that reaches it changes the fingerprint, and nothing else does."""

import functools
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from flux_db.model import fingerprint, runtime
from flux_db.training.build import build_graph


@pytest.fixture
def of_step(world, tmp_path):
    """Of the training step that these settings build."""

    def read(**changes) -> object:
        config = world.config(tmp_path / "out", **changes)
        place = runtime.Runtime(device="CPU", dtype=runtime.DTYPES[config.runtime.mixed_precision])
        return fingerprint.of_cell(build_graph(config, place, world.model, prior=False).step)

    return read


REACHES_THE_GRAPH = [
    {"rank": 8},
    {"lora_alpha": 2.0},
    {"lora_layers": "attn.to_q"},
    {"lora_dropout": 0.1},
    {"guidance_scale": 2.0},
    {"max_grad_norm": 0.5},
    {"adam_beta1": 0.5},
    {"adam_weight_decay": 0.5},
    {"adam_epsilon": 1e-5},
    {"optimizer": "prodigy"},
    {"gradient_accumulation_steps": 2},
    {"gradient_checkpointing": "blocks"},
    {"weighting_scheme": "sigma_sqrt"},
    {"loss": "huber"},
    {"mixed_precision": "fp16"},
    {"base_precision": "int8"},
]


def test_every_setting_that_reaches_the_graph_changes_it(of_step):
    names = ["plain", *map(str, REACHES_THE_GRAPH)]
    found = [str(of_step()), *(str(of_step(**changes)) for changes in REACHES_THE_GRAPH)]
    same = [(a, b) for i, a in enumerate(names) for j, b in enumerate(names[:i]) if found[i] == found[j]]
    assert not same


def test_what_comes_in_as_inputs_does_not(of_step):
    # the values of the LoRA's first weights, the steps, the rate, and where things are
    assert of_step() == of_step(seed=5, max_train_steps=9, learning_rate=0.5, output_dir="elsewhere")


class Cell(nn.Cell):
    def __init__(self, **values) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros(3), ms.float32), name="weight")
        for name, value in values.items():
            setattr(self, name, value)

    def construct(self, x):
        return x * self.weight


def scaled_by(factor: float):
    return lambda x: x * factor


VALUES = [
    1,
    1.0,
    True,
    "1",
    None,
    (1,),
    [1],
    {"a": 1},
    {"a": 2},
    {1},
    b"1",
    ms.float16,
    ms.float32,
    np.float32,
    np.arange(2),
    np.arange(2.0),
    Tensor([1.0], ms.float32),
    Tensor([1.0], ms.bfloat16),
    Tensor([2.0], ms.float32),
    ops.Softmax(0),
    ops.Softmax(1),
    scaled_by(1.0),
    scaled_by(2.0),
    lambda x: x + 1,
    lambda x: x - 1,
    *(lambda x: x * 1, lambda x: x * 2),  # the same byte code in the same line, but for a constant
    *(lambda x: [x * i * 1 for i in (1, 2)], lambda x: [x * i * 2 for i in (1, 2)]),
    functools.partial(scaled_by, 1.0),
    functools.partial(scaled_by, 2.0),
    nn.CellList([nn.Dense(2, 2)]),
    nn.CellList([nn.Dense(2, 3)]),
    [nn.Dense(2, 2)],
    Path("a"),
]


def test_every_constant_that_a_cell_holds_counts():
    found = [str(fingerprint.of_cell(Cell(value=value))) for value in VALUES]
    assert len(set(found)) == len(found)


def test_values_of_weights_and_what_mindspore_notes_while_compiling_do_not(cpu):
    cell, other = Cell(layer=nn.Dense(3, 3)), Cell(layer=nn.Dense(3, 3))
    before = fingerprint.of_cell(cell)
    cell.weight.set_data(Tensor(np.ones(3), ms.float32))
    cell(Tensor(np.ones(3), ms.float32))
    assert fingerprint.of_cell(cell) == fingerprint.of_cell(other) == before
    cell.recompute()
    assert fingerprint.of_cell(cell) != before


def test_inputs_are_read_by_shape_and_type():
    read = fingerprint.of_inputs
    assert read([Tensor([1.0]), 2]) == read([Tensor([3.0]), 2]) != read([Tensor([1.0]), 3])
    assert read(Tensor([1.0])) != read(Tensor([1])) and read(Tensor([1.0])) != read(Tensor([1.0, 2.0]))


def test_what_cannot_be_read_has_no_fingerprint():
    with pytest.raises(fingerprint.Unreadable, match="generator"):
        fingerprint.of_cell(Cell(value=(n for n in range(3))))
