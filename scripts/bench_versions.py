#!/usr/bin/env python
"""One job on several versions of MindSpore, in the environments that scripts/versions.sh makes.

    python scripts/bench_versions.py 2.7.1 2.8.0 2.9.0 2.10.0      # Markdown tables; losses compared with the first
    python scripts/bench_versions.py --resume 2.7.1 2.10.0         # the demo, half on the one, then on the other
    python scripts/bench_versions.py --install 2.10.0              # seconds and size of a new environment

Everything starts in a bare environment. `cached` is the CPU time of a run of one step when all is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SIZES = (64, 384, 1024)


def environment(version: str) -> Path:
    folder = ROOT / f".venv-{version}"
    if not (folder / "bin/python").exists():
        sys.exit(f"{folder.name} is missing: bash scripts/versions.sh {version} --co -q")
    return folder


class Ended(NamedTuple):
    """A child that has ended well."""

    output: str
    seconds: float
    cpu: float
    megabytes: int
    """Of the largest process that this script has started so far."""


def run(version: str, home: Path, *words: object) -> Ended:
    python = environment(version) / "bin/python"
    variables = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [str(python), *map(str, words)], env=variables, cwd=ROOT, capture_output=True, text=True, check=False
    )
    seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{version}: {' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(done.stdout + done.stderr, seconds, cpu, after.ru_maxrss // 1024)


def losses(output: Path) -> dict[int, float]:
    rows = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def largest_difference(found: dict[int, float], wanted: dict[int, float]) -> float:
    """Relative."""
    assert found.keys() == wanted.keys(), "other steps"
    return max(abs(found[step] - wanted[step]) / abs(wanted[step]) for step in wanted)


def demo(version: str, folder: Path, model: Path, *flags: object) -> Ended:
    """The demo's training with its samples; nothing encoded or compiled before, unless the folder is used again."""
    given = {"pretrained_model_name_or_path": model, "instance_data_dir": model.parent / "pictures"}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    config = ["--config", ROOT / "configs/demo_cpu.yaml", "--output_dir", folder / "run", *words]
    return run(version, folder, ROOT / "train_dreambooth_lora_flux.py", *config, *flags)


def prepare(version: str, folder: Path) -> Path:
    run(version, folder, "-m", "flux_db", "tiny-model", "--size", "small", folder / "model")
    run(version, folder, "-m", "flux_db", "demo-pictures", folder / "pictures")
    return folder / "model"


def compare(versions: list[str]) -> None:
    columns = ["MindSpore", "demo, s", "loss, largest difference", "cached, CPU-s", "compile, CPU-s", "ms/step", "MB"]
    columns += [f"VAE {px} px, encode / decode ms (MB)" for px in SIZES]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        model, first = prepare(versions[0], Path(name)), None
        for version in versions:
            folder = Path(name, version)
            folder.mkdir()
            took = demo(version, folder, model)
            found = losses(folder / "run")
            first = first or found
            again = (
                "--max_train_steps",
                1,
                "--lr_warmup_steps",
                0,
                "--encode_cache_dir",
                folder / "run/cache",
                "--validation_epochs",
                1000,
            )
            shutil.rmtree(folder / "run/samples")
            demo(version, folder, model, *again, "--output_dir", folder / "one")  # its graphs are stored by this one
            cached = demo(version, folder, model, *again, "--output_dir", folder / "two")
            step = measured(version, folder, "step")
            row = [
                version,
                f"{took.seconds:.1f}",
                f"{largest_difference(found, first):.1e}",
                f"{cached.cpu:.1f}",
                f"{step['compile']:.1f}",
                f"{step['ms']:.1f}",
                f"{step['mb']}",
            ]
            for px in SIZES:
                vae = measured(version, folder, "vae", model, px)
                row.append(f"{vae['encode']:.0f} / {vae['decode']:.0f} ({vae['mb']})")
            print(f"| {' | '.join(row)} |", flush=True)


def measured(version: str, folder: Path, *words: object) -> dict[str, float]:
    """What this script measures in the version's own python."""
    lines = run(version, folder, __file__, "--child", *words).output.splitlines()
    return json.loads(next(line for line in lines if line.startswith("{")))


def resume(first: str, second: str) -> None:
    """Half of the demo on one version, the rest on another, compared with all of it on the first."""
    with tempfile.TemporaryDirectory() as name:
        model = prepare(first, Path(name))
        for part in ("whole", "parted"):
            Path(name, part).mkdir()
        demo(first, Path(name, "whole"), model)
        demo(first, Path(name, "parted"), model)
        middle = Path(name, "parted/run/checkpoint-100")
        went_on = demo(second, Path(name, "parted"), model, "--resume_from_checkpoint", middle)
        (note,) = (line for line in went_on.output.splitlines() if "was saved with MindSpore" in line)
        found = largest_difference(losses(Path(name, "parted/run")), losses(Path(name, "whole/run")))
    print(f"{first} to step 100, {second} to step 200: largest relative difference of a loss {found:.1e}\n{note}")


def install(versions: list[str]) -> None:
    print("| MindSpore | seconds to install | MB |\n|---|---|---|")
    for version in versions:
        with tempfile.TemporaryDirectory() as name:
            begin = time.monotonic()
            subprocess.run([environment(version) / "bin/python", "-m", "venv", name], check=True)
            words = [f"{name}/bin/python", "-m", "pip", "install", "-q", str(ROOT), f"mindspore=={version}"]
            subprocess.run(words, check=True, capture_output=True)
            seconds = time.monotonic() - begin
            size = sum(file.stat().st_size for file in Path(name).rglob("*") if file.is_file())
        print(f"| {version} | {seconds:.0f} | {size / 1e6:.0f} |", flush=True)


# --- in the version's own python ---------------------------------------------------------------------------------


def measure_step() -> dict[str, float]:
    """Of the mid model at 128 px."""
    sys.path.insert(0, str(ROOT))
    from profile_step import build

    from flux_db.demo.tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory() as name:
        write_tiny_model(Path(name) / "model", "mid")
        step, inputs = build(Path(name) / "model", 128)
        begin = time.process_time()
        step.compile(*inputs)
        compiling, found = time.process_time() - begin, []
        for _ in range(60):
            begin = time.monotonic()
            step(*inputs).asnumpy()
            found.append(1e3 * (time.monotonic() - begin))
    return {"compile": compiling, "ms": statistics.median(found[10:]), "mb": peak()}


def measure_vae(model: str, px: int) -> dict[str, float]:
    """The best of several, because other guests of a machine only ever add."""
    sys.path.insert(0, str(ROOT))
    import numpy as np
    from mindspore import Tensor, nn

    from flux_db.model import loading, runtime
    from flux_db.settings.schema import RuntimeConfig

    runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))
    vae = loading.load_vae(Path(model), loading.VAE_DTYPE)

    class Encode(nn.Cell):
        def __init__(self):
            super().__init__()
            self.vae = vae

        def construct(self, x):
            return self.vae.encode(x)[0]

    class Decode(Encode):
        def construct(self, x):
            return self.vae.decode(x, return_dict=False)[0]

    rng = np.random.default_rng(0)
    side = px // 2 ** (len(vae.config.block_out_channels) - 1)
    found = {}
    for name, cell, shape in (
        ("encode", Encode(), (1, 3, px, px)),
        ("decode", Decode(), (1, vae.config.latent_channels, side, side)),
    ):
        x, times = Tensor(rng.standard_normal(shape, np.float32)), []
        cell(x).asnumpy()
        for _ in range(3 if px > 512 else 9):
            begin = time.monotonic()
            cell(x).asnumpy()
            times.append(1e3 * (time.monotonic() - begin))
        found[name] = min(times)
    return {**found, "mb": peak()}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--resume", action="store_true")
    way.add_argument("--install", action="store_true")
    way.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        kind, *words = given.versions
        os.environ.setdefault("GLOG_v", "3")
        print(json.dumps(measure_step() if kind == "step" else measure_vae(words[0], int(words[1]))))
    elif given.resume:
        resume(*given.versions)
    elif given.install:
        install(given.versions)
    else:
        compare(given.versions)


if __name__ == "__main__":
    main()
