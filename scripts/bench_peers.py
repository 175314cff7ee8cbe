"""This trainer and diffusers' example script on the same model and pictures, in turns: start, step, memory, growth.

    python scripts/bench_peers.py --diffusers_script train_dreambooth_lora_flux.py   # of diffusers v0.35.2
    python scripts/bench_peers.py --diffusers_script ... --growth                    # sizes, batches, blocks, tokens
    python scripts/bench_peers.py --sampling                                         # four pictures in 20 steps

Both start as a user starts them, with nothing cached; then this trainer once more with everything cached. Medians and
the spread of three rounds. diffusers runs on torch in .venv-interop; its script is not part of this project. Without
it, a loop that does the same takes its place (torch_run.py). On a machine that does other work the ratios mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_step import peak_memory
from small_run import ROOT, bare, flag_words

from flux_db.demo.pictures import write_demo_pictures
from flux_db.demo.tiny_model import draw_all, json_bytes, write_tiny_model
from flux_db.report.charts import Series, chart

POLL_SECONDS = 0.05
PICTURES, DENOISING, SIDE = 4, 20, 128
# The bar of diffusers' script, as tqdm writes it: Steps:  20%|██ | 10/50 [00:01<...
BAR = re.compile(rb"Steps:.*?(\d+)/\d+ \[")


@dataclass(frozen=True, kw_only=True)
class Case:
    resolution: int = 128
    batch: int = 1
    blocks: tuple[int, int] = (2, 4)
    tokens: int = 64
    steps: int = 50

    def __str__(self) -> str:
        double, single = self.blocks
        return f"{self.resolution} px, batch {self.batch}, {double}+{single} blocks, {self.tokens} tokens, {self.steps}"


BASE = (Case(), Case(resolution=384))
GROWTH = {
    "side in pixels": [Case(resolution=side, steps=20) for side in (128, 256, 384, 512)],
    "batch": [Case(batch=batch, steps=20) for batch in (1, 2, 4)],
    "blocks": [Case(blocks=blocks, steps=20) for blocks in ((2, 4), (4, 8), (8, 16))],
    "text tokens": [Case(tokens=tokens, steps=20) for tokens in (64, 256)],
    "steps": [Case(steps=steps) for steps in (50, 200)],
}
FIGURES = {"wall": "whole run, s", "first": "to the end of step 1, s", "step": "s/step", "memory": "peak memory, MB"}


@dataclass(frozen=True, kw_only=True)
class Figures:
    wall: float
    first: float
    """Seconds from the start of the program to the end of its first step."""
    step: float
    """Median over all but the first."""
    memory: float
    """Peak of the process that trains, in MB."""


def run(words: list[str], environment: dict[str, str], ends_of_steps: Any) -> tuple[float, float, list[float]]:
    """Seconds, peak memory, and the times at which steps ended, as `ends_of_steps(process, start)` sees them."""
    start = time.monotonic()
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    ends: list[float] = []
    tail: list[bytes] = []
    reader = threading.Thread(target=lambda: ends.extend(ends_of_steps(process.stderr, start, tail)))
    reader.start()
    peak = 0
    while process.poll() is None:
        peak = max(peak, peak_memory(process.pid))
        time.sleep(POLL_SECONDS)
    wall = time.monotonic() - start
    reader.join()
    if process.returncode:
        sys.exit(f"{words[1]} failed:\n{b''.join(tail[-50:]).decode(errors='replace')}")
    return wall, peak, ends


def read_bar(stderr: Any, start: float, tail: list[bytes]) -> Iterator[float]:
    """Times at which the bar of diffusers' script moved; tqdm ends each state with a carriage return."""
    seen, buffer = 0, b""
    while block := os.read(stderr.fileno(), 4096):
        tail.append(block)
        buffer = (buffer + block)[-8192:]
        for match in BAR.finditer(buffer):
            if int(match[1]) == seen + 1:
                seen += 1
                yield time.monotonic() - start
        buffer = buffer[buffer.rfind(b"\r") + 1 :] if b"\r" in buffer else buffer


def read_nothing(stderr: Any, start: float, tail: list[bytes]) -> Iterator[float]:
    while block := os.read(stderr.fileno(), 4096):
        tail.append(block)
    yield from ()


class Bench:
    def __init__(self, folder: Path, case: Case, given: argparse.Namespace) -> None:
        self.folder, self.case, self.given = folder, case, given
        write_tiny_model(folder / "model", "mid")
        if case.blocks != (2, 4):
            part = folder / "model/transformer"
            sizes = dict(zip(("num_layers", "num_single_layers"), case.blocks, strict=True))
            config = json.loads((part / "config.json").read_text()) | sizes
            (part / "config.json").write_bytes(json_bytes(config))
            (part / "diffusion_pytorch_model.safetensors").write_bytes(draw_all("transformer", config, seed=0))
        write_demo_pictures(folder / "pictures", count=5)

    def settings(self, output: str) -> dict[str, Any]:
        return {
            "pretrained_model_name_or_path": self.folder / "model",
            "instance_data_dir": self.folder / "pictures",
            "instance_prompt": "a photo of sks dog",
            "output_dir": self.folder / output,
            "resolution": self.case.resolution,
            "train_batch_size": self.case.batch,
            "max_sequence_length": self.case.tokens,
            "max_train_steps": self.case.steps,
            "rank": 16,
            "lora_alpha": 16,
            "learning_rate": 1e-4,
            "seed": 0,
            "checkpointing_steps": 100_000,
            "report_to": "tensorboard",
        }

    def diffusers(self, number: int) -> Figures:
        settings = self.settings(f"theirs-{number}") | {"cache_latents": True, "lr_warmup_steps": 0}
        stand_in = str(ROOT / "scripts/torchvision_stand_in")
        # without HF_HUB_OFFLINE, under which its last lines find no LoRA in a folder; nothing of it asks the hub
        environment = bare() | {"PYTHONPATH": stand_in, "TQDM_MININTERVAL": "0"}
        words = [str(self.given.torch_python), str(self.given.diffusers_script), *flag_words(settings)]
        if self.given.diffusers_script is None:
            words = [*torch_run(self.given, "train"), *(str(self.folder / n) for n in ("model", "pictures", "theirs"))]
            sizes = {name: getattr(self.case, name) for name in ("resolution", "batch", "tokens", "steps")}
            words += flag_words(sizes)
        wall, peak, ends = run(words, environment, read_bar)
        between = [b - a for a, b in pairwise(ends)]
        return Figures(wall=wall, first=ends[0], step=statistics.median(between), memory=peak)

    def ours(self, number: int, *, cached: bool = False) -> Figures:
        """Cached: with the encodings and the compiled graphs of the run before."""
        output = f"ours-{number}{'-again' if cached else ''}"
        settings = self.settings(output) | {"device": "CPU", "compile_cache": "off"}
        if cached:
            kept = {"encode_cache_dir": self.folder / "cache", "compile_cache_dir": self.folder / "graphs"}
            settings |= kept | {"compile_cache": "on"}
        metrics = self.folder / output / "metrics.jsonl"
        seen: list[float] = []
        start = time.monotonic()
        watch = threading.Thread(target=lambda: seen.append(first_line(metrics, start)), daemon=True)
        watch.start()
        words = [sys.executable, str(ROOT / "train_dreambooth_lora_flux.py"), *flag_words(settings)]
        wall, peak, _ = run(words, bare(), read_nothing)
        watch.join(timeout=5)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        return Figures(
            wall=wall, first=seen[0], step=statistics.median(row["seconds"] for row in rows[1:]), memory=peak
        )


def first_line(path: Path, start: float) -> float:
    while not (path.exists() and path.stat().st_size):
        time.sleep(0.01)
    return time.monotonic() - start


def measure(case: Case, given: argparse.Namespace) -> dict[str, list[Figures]]:
    """Rounds in turns, so that a slow minute of the machine meets both."""
    found: dict[str, list[Figures]] = {"diffusers": [], "here": []}
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), case, given)
        if not given.growth:
            bench.ours(-1, cached=True)  # fills the caches
            found["here, cached"] = []
        for number in range(given.rounds):
            found["diffusers"].append(bench.diffusers(number))
            found["here"].append(bench.ours(number))
            if not given.growth:
                found["here, cached"].append(bench.ours(number, cached=True))
    return found


def torch_run(given: argparse.Namespace, what: str) -> list[str]:
    return [str(given.torch_python), str(ROOT / "scripts/torch_run.py"), what]


def sampling(given: argparse.Namespace) -> Iterator[str]:
    """Seconds of a round of four pictures in 20 steps, the first and a second one, in a process each."""
    found: dict[str, list[list[float]]] = {"diffusers": [], "here": []}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        write_tiny_model(model, "mid")
        ours = [sys.executable, __file__, "--draw", str(model)]
        theirs = [*torch_run(given, "sample"), str(model), "--steps", str(DENOISING), "--pictures", str(PICTURES)]
        for _ in range(given.rounds):
            for key, words in (("diffusers", theirs), ("here", ours)):
                done = subprocess.run(words, cwd=ROOT, env=bare(), capture_output=True, text=True, check=True)
                found[key].append([float(line) for line in done.stdout.split()[-2:]])
    yield f"\n{PICTURES} pictures of {SIDE} px in {DENOISING} steps; median (least-most) of {given.rounds} rounds\n"
    yield "| | diffusers | here | ratio |\n|---|---|---|---|"
    for i, title in enumerate(("first round, s", "a later round, s")):
        values = {key: sorted(row[i] for row in rows) for key, rows in found.items()}
        cells = [f"{statistics.median(v):.2f} ({v[0]:.2f}-{v[-1]:.2f})" for v in values.values()]
        ratio = statistics.median(values["here"]) / statistics.median(values["diffusers"])
        yield f"| {title} | {' | '.join(cells)} | {ratio:.2f} |"


def draw(model: Path) -> None:
    """Our side of `sampling`, with compiling in the first round."""
    import numpy as np

    from flux_db.model import loading, runtime
    from flux_db.model.sampler import Request, Sampler, SampleSettings
    from flux_db.settings.schema import RuntimeConfig
    from flux_db.size import Size

    machine = runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))
    widths = json.loads((model / "transformer/config.json").read_text())
    embeds = np.zeros((64, widths["joint_attention_dim"]), np.float32)
    pooled = np.zeros(widths["pooled_projection_dim"], np.float32)
    requests = [
        Request(prompt_embeds=embeds, pooled_prompt_embeds=pooled, seed=0, number=number) for number in range(PICTURES)
    ]
    sampler = Sampler(model, loading.load_transformer(model, machine.dtype, None), machine.dtype)
    settings = SampleSettings(size=Size.square(SIDE), steps=DENOISING, guidance=3.5, batch=PICTURES)
    for _ in range(2):
        start = time.perf_counter()
        list(sampler.draw(requests, settings))
        print(time.perf_counter() - start)


def middle(rounds: list[Figures], name: str) -> float:
    return statistics.median(getattr(figures, name) for figures in rounds)


def shown(rounds: list[Figures], name: str) -> str:
    values = [getattr(figures, name) for figures in rounds]
    digits = {"step": 3, "memory": 0}.get(name, 1)
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(case: Case, found: dict[str, list[Figures]]) -> Iterator[str]:
    yield f"\n{case} steps; median (least-most) of {len(found['here'])} rounds\n"
    yield "| | diffusers | here | ratio | here, cached | ratio |\n|---|---|---|---|---|---|"
    for name, title in FIGURES.items():
        base = middle(found["diffusers"], name)
        cells = [shown(found["diffusers"], name)]
        for key in ("here", "here, cached"):
            cells += [shown(found[key], name), f"{middle(found[key], name) / base:.2f}"]
        yield f"| {title} | {' | '.join(cells)} |"


def growth(given: argparse.Namespace) -> Iterator[str]:
    """A table for each thing that grows, and a plot of the seconds per step against the side of a picture."""
    for what, cases in GROWTH.items():
        yield f"\n| {what} | " + " | ".join(f"{t}: diffusers | here | ratio" for t in FIGURES.values()) + " |"
        yield "|---" * (1 + 3 * len(FIGURES)) + "|"
        points: dict[str, list[tuple[float, float]]] = {"diffusers": [], "here": []}
        for case in cases:
            found = measure(case, given)
            value = {"side in pixels": case.resolution, "batch": case.batch, "text tokens": case.tokens}.get(what)
            value = value or (case.steps if what == "steps" else sum(case.blocks))
            cells = []
            for name in FIGURES:
                ratio = middle(found["here"], name) / middle(found["diffusers"], name)
                cells += [shown(found["diffusers"], name), shown(found["here"], name), f"{ratio:.2f}"]
            yield f"| {value} | {' | '.join(cells)} |"
            for key, line in points.items():
                line.append((value, middle(found[key], "step")))
        if what == "side in pixels" and given.plot:
            lines = [
                Series(label=key, points=line, colour=i, kind="dots") for i, (key, line) in enumerate(points.items())
            ]
            given.plot.write_text(picture(chart("s/step against the side in pixels", lines)), encoding="utf-8")
            yield f"\nplot: {given.plot}"


STYLE = (
    "text{font:11px sans-serif;fill:#555}.grid{stroke:#ddd}path{fill:none;stroke-width:2}"
    ".c0{stroke:#2a6fb0}.c1{stroke:#c8553d}circle.c0{fill:#2a6fb0}circle.c1{fill:#c8553d}"
)


def picture(figure: str) -> str:
    """The drawing of a chart by itself, as an SVG file: blue is diffusers, red is this trainer."""
    drawing = figure[figure.index("<svg") : figure.rindex("</svg>") + len("</svg>")]
    return drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "<title>", f"<style>{STYLE}</style><title>", 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--diffusers_script", type=Path, help="example script of diffusers v0.35.2")
    parser.add_argument("--torch_python", type=Path, default=ROOT / ".venv-interop/bin/python")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--growth", action="store_true", help="instead: how the cost grows")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="with --growth: seconds per step against size")
    parser.add_argument("--sampling", action="store_true", help="instead: a round of samples")
    parser.add_argument("--draw", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.draw:
        draw(given.draw)
        return
    if given.sampling:
        print("\n".join(sampling(given)))
        return
    if given.growth:
        for line in growth(given):
            print(line, flush=True)
        return
    for case in BASE:
        print("\n".join(table(case, measure(case, given))), flush=True)


if __name__ == "__main__":
    main()
