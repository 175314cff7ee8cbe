"""The formulas of `plan` for activations, compared with the compiled graph of Ascend, read without a device.

The transformer has FLUX.1-dev's widths and two blocks of each kind, and the plan is made for the same. "kept" is what
is in memory between forward and backward; "block" is what comes on top at the worst moment of the backward, by the
liveness of the graph in the order in which MindSpore lists it. About ten seconds and 3 GB of memory for each row.

python scripts/check_plan.py
python scripts/check_plan.py --pixels 512 --batch 1 --recomputed blocks none --base_precision int8
python scripts/check_plan.py --pixels 640 --batch 2 --tokens 256    # sizes that the formulas were not fitted to
python scripts/check_plan.py --sampler                              # a denoising step instead of training
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import NamedTuple

from flux_db.check import device_memory
from flux_db.check.device_memory import Model
from flux_db.graph import ir
from flux_db.graph.ascend_graph import TRUE_WIDTHS, Case, sampler, training_step
from flux_db.graph.ir import Graph
from flux_db.model import flux_dev, runtime
from flux_db.model.expected_weights import expected_weights
from flux_db.settings.derived import Recomputed
from flux_db.settings.schema import Config, RuntimeConfig, from_flat_dict
from flux_db.size import Size

BLOCKS = {"num_layers": 2, "num_single_layers": 2}
RANK = 16


class Question(NamedTuple):
    """A row of the table."""

    pixels: int
    batch: int
    recomputed: str
    base: str
    tokens: int

    @property
    def size(self) -> Size:
        return Size.square(self.pixels)

    @property
    def config(self) -> Config:
        return from_flat_dict(
            {
                "pretrained_model_name_or_path": "-",
                "instance_data_dir": "-",
                "instance_prompt": "a photo of sks dog",
                "mixed_precision": "bf16",
                "resolution": self.pixels,
                "rank": RANK,
                "train_batch_size": self.batch,
                "max_sequence_length": self.tokens,
                "gradient_checkpointing": self.recomputed,
                "base_precision": self.base,
            }
        )

    @property
    def case(self) -> Case:
        return Case(
            widths={**TRUE_WIDTHS, **BLOCKS},
            pixels=self.pixels,
            tokens=self.tokens,
            batch=self.batch,
            recomputed=Recomputed(self.recomputed),
            is_int8=self.base == "int8",
            flags={"rank": RANK},
        )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--recomputed", nargs="+", default=["blocks", "none"], choices=["blocks", "attention", "none"])
    parser.add_argument("--base_precision", nargs="+", default=["full", "int8"], choices=["full", "int8"])
    parser.add_argument("--tokens", type=int, default=512, help="of the text (default: 512)")
    parser.add_argument("--sampler", action="store_true", help="a denoising step instead of a training step")
    given = parser.parse_args(argv)
    runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))
    recomputed = ["none"] if given.sampler else given.recomputed
    combinations = itertools.product(given.pixels, given.batch, recomputed, given.base_precision)
    questions = [Question(*values, given.tokens) for values in combinations]
    (sampler_table if given.sampler else training_table)(questions)


def training_table(questions: list[Question]) -> None:
    print("| px | batch | recomputed | base | kept: plan | graph | off | block: plan | graph | off | both off |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    model = two_blocks()
    for question in questions:
        config, size = question.config, question.size
        plan = device_memory.kept_bytes(config, model, size), device_memory.block_bytes(config, model, size)
        graph = ir.parse(training_step(question.case))
        found = sum(node.bytes for node in graph.kept()), most_in_backward(graph)
        cells = [*map(str, question[:4])]
        for ours, theirs in zip(plan, found, strict=True):
            cells += compared(ours, theirs)
        print("| " + " | ".join([*cells, compared(sum(plan), sum(found))[-1]]) + " |", flush=True)


def sampler_table(questions: list[Question]) -> None:
    print("| px | pictures | base | plan | graph | off |\n|---|---|---|---|---|---|")
    model = two_blocks()
    for question in questions:
        ours = device_memory.working_bytes(question.config, model, question.size, question.batch, device_memory.FORWARD)
        theirs = max(size for _, size in ir.parse(sampler(question.case)).live())
        cells = [str(question.pixels), str(question.batch), question.base, *compared(ours, theirs)]
        print("| " + " | ".join(cells) + " |", flush=True)


def compared(ours: int, theirs: int) -> list[str]:
    return [f"{ours / 1e6:.0f} MB", f"{theirs / 1e6:.0f} MB", f"{ours / theirs - 1:+.1%}"]


def two_blocks() -> Model:
    """FLUX.1-dev with as many blocks as the graph has."""
    own = flux_dev.SETTINGS | {"transformer": flux_dev.SETTINGS["transformer"] | BLOCKS}
    shapes = {part: expected_weights(part, values) for part, values in own.items()}
    return Model(settings=own, shapes=shapes, is_here=True)


def most_in_backward(graph: Graph) -> int:
    """The most bytes in the backward beside those that are kept for it."""
    return max(size for node, size in graph.live(beside={node.name for node in graph.kept()}) if node.is_backward)


if __name__ == "__main__":
    main(sys.argv[1:])
