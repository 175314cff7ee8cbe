#!/usr/bin/env python
"""Where the time of a training step goes on the CPU: its kernels, and what compiling costs as blocks are added.

    python scripts/profile_step.py --resolution 384            # kernel, count, ms of one step of the mid model
    python scripts/profile_step.py --blocks 1+2 2+4 4+8 19+38  # seconds and memory of compiling, for each a process

With --blocks the model is narrow (2 heads of 16), so that FLUX.1-dev's 19+38 blocks fit; nothing is trained.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_step import peak_memory  # noqa: E402  a script finds its package beside it

from flux_db.demo.tiny_model import draw_all, json_bytes, write_tiny_model  # noqa: E402

TOKENS, REPEATS, WARM = 64, 10, 20
NARROW = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": [4, 6, 6]}


def build(model: Path, resolution: int) -> tuple[Any, list[Any]]:
    """The step of the trainer, and inputs of zeros."""
    import numpy as np

    from flux_db.model import runtime
    from flux_db.settings.schema import from_flat_dict
    from flux_db.step_inputs import StepInputs
    from flux_db.training.build import build_graph
    from flux_db.training.compiling import tensors

    config = from_flat_dict(
        {
            "pretrained_model_name_or_path": str(model),
            "instance_data_dir": "-",
            "instance_prompt": "sks dog",
            "device": "CPU",
            "compile_cache": "off",
            "rank": 16,
            "resolution": resolution,
            "max_sequence_length": TOKENS,
        }
    )
    step = build_graph(config, runtime.start(config.runtime), model, prior=False).step
    widths = json.loads((model / "transformer/config.json").read_text())
    side = resolution // 8
    rng = np.random.default_rng(0)
    inputs = StepInputs(
        pictures=rng.standard_normal((1, 32, side, side), np.float32),
        eps=rng.standard_normal((1, 16, side, side), np.float32),
        noise=rng.standard_normal((1, 16, side, side), np.float32),
        index=np.full(1, 500, np.int32),
        prompt_embeds=rng.standard_normal((1, TOKENS, widths["joint_attention_dim"]), np.float32),
        pooled_prompt_embeds=rng.standard_normal((1, widths["pooled_projection_dim"]), np.float32),
        dropout_key=np.zeros((1, 3), np.float32),
        lr=np.float32(1e-4),
        boundary=np.array(True),
    )
    return step, tensors(inputs)


def kernels(resolution: int) -> None:
    """Print the table of one step."""
    from mindspore import Profiler

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", "mid")
        step, inputs = build(folder / "model", resolution)
        seconds = []
        for _ in range(WARM):
            start = time.monotonic()
            step(*inputs).asnumpy()
            seconds.append(time.monotonic() - start)
        profiler = Profiler(output_path=str(folder / "profile"))
        for _ in range(REPEATS):
            step(*inputs).asnumpy()
        profiler.analyse()
        [file] = folder.glob("profile/*/FRAMEWORK/cpu_op_type_info_0.csv")
        rows = list(csv.DictReader(file.open()))
    print(f"{resolution} px: {1e3 * statistics.median(seconds[WARM // 2 :]):.1f} ms a step")
    print("| kernel | count | ms |\n|---|---|---|")
    found = [
        (float(r["total_compute_time"]) / REPEATS, int(r["type_occurrences"]) // REPEATS, r["op_type"]) for r in rows
    ]
    for ms, count, kernel in sorted(found, reverse=True)[:20]:
        print(f"| {kernel} | {count} | {ms:.2f} |")
    print(f"| all {len(found)} | {sum(count for _, count, _ in found)} | {sum(ms for ms, _, _ in found):.2f} |")


def compile_blocks(double: int, single: int) -> None:
    """Print a row: in a process of its own, because memory is measured at its peak."""
    import os

    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        write_tiny_model(model, "tiny")
        part = model / "transformer"
        sizes = {"num_layers": double, "num_single_layers": single, **NARROW}
        config = json.loads((part / "config.json").read_text()) | sizes
        (part / "config.json").write_bytes(json_bytes(config))
        (part / "diffusion_pytorch_model.safetensors").write_bytes(draw_all("transformer", config, seed=0))
        step, inputs = build(model, 64)
        before, start = peak_memory(os.getpid()), time.monotonic()
        step.compile(*inputs)
        seconds, grown = time.monotonic() - start, peak_memory(os.getpid()) - before
    print(f"| {double}+{single} | {seconds:.1f} | {seconds / (double + single):.2f} | {grown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolution", type=int, default=128)
    parser.add_argument("--blocks", nargs="+", metavar="D+S", help="instead: what compiling so many blocks costs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        compile_blocks(*map(int, given.one.split("+")))
    elif given.blocks:
        print("| blocks | compiling, s | s a block | memory, MB |\n|---|---|---|---|", flush=True)
        for blocks in given.blocks:
            words = [sys.executable, __file__, "--one", blocks]
            subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    else:
        kernels(given.resolution)


if __name__ == "__main__":
    main()
