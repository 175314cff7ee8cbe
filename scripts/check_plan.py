"""The formulas of `plan` for activations, compared with the compiled graph of Ascend, read without a device.

The transformer has FLUX.1-dev's widths and two blocks of each kind, and the plan is made for the same. "kept" is what
is in memory between forward and backward; "block" is what comes on top at the worst moment of the backward, by the
liveness of the graph in the order in which MindSpore lists it. One to three minutes and 3 GB of memory for each row.

python scripts/check_plan.py
python scripts/check_plan.py --pixels 512 --batch 1 --recomputed blocks none --base_precision int8
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from flux_db.check import device_memory
from flux_db.check.device_memory import Model
from flux_db.graph import ir
from flux_db.graph.ascend_graph import TRUE_WIDTHS, Case, training_step
from flux_db.graph.ir import Graph
from flux_db.model import flux_dev, runtime
from flux_db.model.expected_weights import expected_weights
from flux_db.settings.derived import Recomputed
from flux_db.settings.schema import Config, RuntimeConfig, from_flat_dict
from flux_db.size import Size

BLOCKS = {"num_layers": 2, "num_single_layers": 2}
TEXT_TOKENS = 512
RANK = 16


class Bytes(NamedTuple):
    kept: int
    block: int


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--recomputed", nargs="+", default=["blocks", "none"], choices=["blocks", "attention", "none"])
    parser.add_argument("--base_precision", nargs="+", default=["full", "int8"], choices=["full", "int8"])
    given = parser.parse_args(argv)
    runtime.start(RuntimeConfig(device="CPU"))
    print("| px | batch | recomputed | base | kept: plan | graph | off | block: plan | graph | off | both off |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for pixels in given.pixels:
        for batch in given.batch:
            for cells in given.recomputed:
                for base in given.base_precision:
                    print(row(pixels, batch, cells, base), flush=True)


def row(pixels: int, batch: int, cells: str, base: str) -> str:
    plan, graph = planned(pixels, batch, cells, base), measured(pixels, batch, cells, base)
    words = [str(pixels), str(batch), cells, base]
    for ours, theirs in zip(plan, graph, strict=True):
        words += [f"{ours / 1e6:.0f} MB", f"{theirs / 1e6:.0f} MB", f"{ours / theirs - 1:+.1%}"]
    return "| " + " | ".join([*words, f"{sum(plan) / sum(graph) - 1:+.1%}"]) + " |"


def planned(pixels: int, batch: int, cells: str, base: str) -> Bytes:
    config, size = settings(pixels, batch, cells, base), Size.square(pixels)
    own = flux_dev.SETTINGS | {"transformer": flux_dev.SETTINGS["transformer"] | BLOCKS}
    shapes = {part: expected_weights(part, values) for part, values in own.items()}
    model = Model(settings=own, shapes=shapes, is_here=True)
    return Bytes(device_memory.kept_bytes(config, model, size), device_memory.block_bytes(config, model, size))


def settings(pixels: int, batch: int, cells: str, base: str) -> Config:
    return from_flat_dict(
        {
            "pretrained_model_name_or_path": "-",
            "instance_data_dir": "-",
            "instance_prompt": "a photo of sks dog",
            "mixed_precision": "bf16",
            "resolution": pixels,
            "rank": RANK,
            "train_batch_size": batch,
            "gradient_checkpointing": cells,
            "base_precision": base,
        }
    )


def measured(pixels: int, batch: int, cells: str, base: str) -> Bytes:
    case = Case(
        widths={**TRUE_WIDTHS, **BLOCKS},
        pixels=pixels,
        tokens=TEXT_TOKENS,
        batch=batch,
        recomputed=Recomputed(cells),
        is_int8=base == "int8",
        flags={"rank": RANK},
    )
    graph = ir.parse(training_step(case))
    kept = graph.kept()
    return Bytes(sum(node.bytes for node in kept), inside(graph))


def inside(graph: Graph) -> int:
    """The most bytes in the backward beside those that are kept for it."""
    return max(size for node, size in graph.live(beside={node.name for node in graph.kept()}) if node.is_backward)


if __name__ == "__main__":
    main(sys.argv[1:])
