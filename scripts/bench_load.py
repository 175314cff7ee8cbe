"""Host memory and seconds of loading a transformer of 1.2 GB, compared with mindone's own loading and plain reading.

python scripts/bench_load.py            # everything, about five minutes on two cores; needs 2 GB of disk
python scripts/bench_load.py --shard    # only the table of --shard_base, in two processes

Every figure is the median of three processes. The files are in the page cache: from a disk, reading takes longer, and
so does every way of loading. CPU seconds are counted as well: other work on the machine changes them less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from safetensors.numpy import save_file

from flux_db.demo.tiny_model import json_bytes, write_tiny_model
from flux_db.model.expected_weights import expected_weights
from flux_db.training.launch import Devices, Supervisor
from flux_db.weight_file import DTYPES

if TYPE_CHECKING:
    from mindspore import nn

T = TypeVar("T")

REPEATS = 3
# 299 million parameters
WIDE = {"num_attention_heads": 8, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
WIDE |= {"num_layers": 4, "num_single_layers": 9}
SHARD_BYTES = 400_000_000
RESULT = "figures: "

# (type of the files, --mixed_precision)
CASES = (("F32", "fp16"), ("F32", "no"), ("BF16", "bf16"))
PRECISIONS = {"no": "float32", "fp16": "fp16", "bf16": "bf16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", action="store_true", help="only the table of --shard_base")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        way, folder, stored, precision = arguments.child
        print(RESULT + json.dumps(WAYS[way](Path(folder), stored, precision)), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "tiny", "tiny")
        for stored in ("F32",) if arguments.shard else ("F32", "BF16"):
            write_wide_model(folder, stored)
        if not arguments.shard:
            compare_loading(folder)
        compare_sharded(folder)


# --- tables ------------------------------------------------------------------------------------------------------


def compare_loading(folder: Path) -> None:
    print("| Files | Loaded as | By | Model in its type | Peak | Peak in models | Seconds | CPU seconds | of reading |")
    print("|---|---|---|---|---|---|---|---|---|")
    for stored, precision in CASES:
        ways = {"read": "reading alone", "mindone": "mindone's `from_pretrained`", "ours": "flux_db"}
        found = {way: median([run(folder, way, stored, precision) for _ in range(REPEATS)]) for way in ways}
        for way, name in ways.items():
            ratio = found[way]["cpu"] / found["read"]["cpu"]
            row = f"| {stored} | {PRECISIONS[precision]} | {name} | {memory(found[way])} | {times(found[way])}"
            print(f"{row} | {ratio:.1f} |", flush=True)


def compare_sharded(folder: Path) -> None:
    print("\n| `--shard_base`, two processes, by | Part of a process | Peak | Peak in parts | Seconds | CPU seconds |")
    print("|---|---|---|---|---|---|")
    for way, name in (("mindone_sharded", "mindone: load all, then split"), ("ours_sharded", "flux_db: read a part")):
        found = median([ranks for _ in range(REPEATS) for ranks in run_two(folder, way)])
        print(f"| {name} | {memory(found)} | {times(found)} |", flush=True)


def times(found: Mapping[str, float]) -> str:
    return f"{found['seconds']:.2f} | {found['cpu']:.2f}"


def memory(found: Mapping[str, float]) -> str:
    size, peak = found["size"] / 1e6, found["peak"] / 1e6
    return f"{size:.0f} MB | {peak:.0f} MB | {peak / size:.2f}"


def median(figures: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in figures) for name in figures[0]}


# --- processes ---------------------------------------------------------------------------------------------------


def run(folder: Path, way: str, stored: str, precision: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", way, str(folder), stored, precision]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stdout}{done.stderr}")
    return figures_in(done.stdout)


def run_two(folder: Path, way: str) -> list[dict[str, float]]:
    """The figures of both workers."""
    logs = folder / "logs"
    with Supervisor(logs) as supervisor, silenced():
        command = [__file__, "--child", way, str(folder), "F32", "fp16"]
        code = supervisor.run_workers(command, Devices(devices=2), 0)
    texts = [(logs / f"worker_{rank}.log").read_text() for rank in range(2)]
    if code:
        sys.exit("\n".join([f"{way} failed:", *texts]))
    return [figures_in(text) for text in texts]


def figures_in(text: str) -> dict[str, float]:
    return json.loads(text.partition(RESULT)[2].splitlines()[0])


@contextmanager
def silenced() -> Iterator[None]:
    """Keep the workers' lines off the terminal."""
    sys.stdout.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in kept:
        os.dup2(null, descriptor)
    try:
        yield
    finally:
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(null)


# --- in a process ------------------------------------------------------------------------------------------------


def read_alone(folder: Path, stored: str, _precision: str) -> dict[str, float]:
    """The files as they are, into memory that is kept."""

    def read(model: Path) -> list[bytes]:
        return [path.read_bytes() for path in sorted((model / "transformer").glob("*.safetensors"))]

    return measured(read, folder, stored, lambda contents: sum(map(len, contents)))


def load_by_mindone(folder: Path, stored: str, precision: str) -> dict[str, float]:
    """As the program did until now."""
    runtime = start(precision)
    from mindone.diffusers import FluxTransformer2DModel

    def load(model: Path) -> object:
        part = str(model / "transformer")
        return FluxTransformer2DModel.from_pretrained(part, mindspore_dtype=runtime.dtype, local_files_only=True)

    return measured(load, folder, stored)


def load_by_us(folder: Path, stored: str, precision: str) -> dict[str, float]:
    runtime = start(precision)
    from flux_db.model import loading

    return measured(lambda model: loading.load_transformer(model, runtime.dtype), folder, stored)


def shard_by_mindone(folder: Path, stored: str, precision: str) -> dict[str, float]:
    runtime = start(precision)
    import mindspore as ms
    from mindone.diffusers import FluxTransformer2DModel
    from mindone.trainers.zero import prepare_network
    from mindspore.communication import GlobalComm

    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL)  # or it splits nothing

    def load(model: Path) -> object:
        part = str(model / "transformer")
        network = FluxTransformer2DModel.from_pretrained(part, mindspore_dtype=runtime.dtype, local_files_only=True)
        return prepare_network(network, 3, GlobalComm.WORLD_COMM_GROUP)

    return measured(load, folder, stored)


def shard_by_us(folder: Path, stored: str, precision: str) -> dict[str, float]:
    runtime = start(precision)
    from flux_db.model import loading, sharding

    def load(model: Path) -> object:
        network = loading.load_transformer(model, runtime.dtype, None, sharding.share_of(runtime))
        sharding.shard_base(network, runtime)
        return network

    return measured(load, folder, stored)


WAYS: dict[str, Callable[[Path, str, str], dict[str, float]]] = {
    "read": read_alone,
    "mindone": load_by_mindone,
    "ours": load_by_us,
    "mindone_sharded": shard_by_mindone,
    "ours_sharded": shard_by_us,
}


def start(precision: str):
    from flux_db.model import runtime
    from flux_db.settings.schema import RuntimeConfig

    os.environ.setdefault("GLOG_v", "3")
    here = runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))  # where bf16 can be loaded, but not computed
    return runtime.Runtime(device="CPU", dtype=runtime.DTYPES[precision], rank=here.rank, world_size=here.world_size)


def network_size(network: nn.Cell) -> int:
    return sum(parameter.nbytes for parameter in network.get_parameters())


def measured(
    load: Callable[[Path], T], folder: Path, stored: str, size: Callable[[T], int] = network_size
) -> dict[str, float]:
    """Seconds, and the most memory beyond what the process had before; imports are done by then."""
    load(folder / "tiny")
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    begin, cpu = time.monotonic(), time.process_time()
    loaded = load(folder / stored)
    found = {"seconds": time.monotonic() - begin, "cpu": time.process_time() - cpu}
    return found | {"peak": status("VmHWM") - before, "size": size(loaded)}


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# --- the model ---------------------------------------------------------------------------------------------------


def write_wide_model(folder: Path, stored: str) -> None:
    """The tiny model with a wide transformer of random weights, in several files as FLUX.1-dev has them."""
    model = folder / stored
    write_tiny_model(model, "tiny")
    part = model / "transformer"
    config = json.loads((part / "config.json").read_text()) | WIDE
    (part / "config.json").write_bytes(json_bytes(config))
    (part / "diffusion_pytorch_model.safetensors").unlink()
    generator = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    number = 0
    names = list(expected_weights("transformer", config).items())
    for name, shape in names:
        shard[name] = (generator.standard_normal(shape, np.float32) * 0.02).astype(DTYPES[stored])
        if sum(array.nbytes for array in shard.values()) > SHARD_BYTES or name == names[-1][0]:
            file = f"diffusion_pytorch_model-{number:05d}.safetensors"
            save_file(shard, part / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard, number = {}, number + 1
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (part / "diffusion_pytorch_model.safetensors.index.json").write_bytes(json_bytes(index))


if __name__ == "__main__":
    main()
