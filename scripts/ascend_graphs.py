"""What the training step keeps on Ascend between forward and backward, and its kernels, read from its compiled graph.

No device is needed. The transformer has FLUX.1-dev's widths and one or two blocks of each kind; the difference is what
a block costs, and everything is linear in blocks. About two minutes and 3 GB of memory for each row.

python scripts/ascend_graphs.py
python scripts/ascend_graphs.py --pixels 512 --batch 1 --recomputed blocks none
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import numpy as np

from flux_db.graph import ir
from flux_db.graph.ascend_graph import TRUE_WIDTHS, Case, training_step
from flux_db.model import runtime
from flux_db.settings.derived import Recomputed
from flux_db.settings.schema import RuntimeConfig

DOUBLE, SINGLE = 19, 38
TEXT_TOKENS = 512


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--recomputed", nargs="+", default=["blocks"], choices=["blocks", "attention", "none"])
    given = parser.parse_args(argv)
    runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))
    print("| px | batch | recomputed | double block | single block | block inputs | 57 blocks | kernels |")
    print("|---|---|---|---|---|---|---|---|")
    for pixels in given.pixels:
        for batch in given.batch:
            for cells in given.recomputed:
                print(row(pixels, batch, cells), flush=True)


def row(pixels: int, batch: int, cells: str) -> str:
    case = Case(pixels=pixels, tokens=TEXT_TOKENS, batch=batch, recomputed=Recomputed(cells), flags={"rank": 16})
    least, more_double, more_single = (np.array(measure(case, *blocks)) for blocks in ((1, 1), (2, 1), (1, 2)))
    double, single = more_double - least, more_single - least
    whole = least + (DOUBLE - 1) * double + (SINGLE - 1) * single
    inputs = batch * (TEXT_TOKENS + case.image_tokens) * 3072 * 2
    cells_of_row = [
        pixels,
        batch,
        cells,
        f"{double[0] / 1e6:.1f} MB",
        f"{single[0] / 1e6:.1f} MB",
        f"{inputs / 1e6:.1f} MB",
        f"{whole[0] / 1e9:.2f} GB",
        f"{whole[1]:,}",
    ]
    return "| " + " | ".join(map(str, cells_of_row)) + " |"


def measure(case: Case, double: int, single: int) -> tuple[int, int]:
    """(bytes kept, kernels) of a transformer with so many blocks."""
    widths = {**TRUE_WIDTHS, "num_layers": double, "num_single_layers": single}
    graph = ir.parse(training_step(replace(case, widths=widths)))
    return sum(node.bytes for node in graph.kept()), graph.kernels()


if __name__ == "__main__":
    main(sys.argv[1:])
