"""What each setting does to the pictures: trains on the small model over settings and seeds, and lets its judge score.

    python scripts/bench_quality.py                        # all rows, three seeds; prints the table of docs/evidence.md
    python scripts/bench_quality.py --rows default "rank 4"
    python scripts/bench_quality.py --table                # print what is there, train nothing
    python scripts/bench_quality.py --rows diffusers --diffusers_script train_dreambooth_lora_flux.py

A run that is finished is not made again, so the script can be stopped at any time. The row `diffusers` runs the example
script of diffusers v0.35.2, which is not part of this project, on torch in .venv-interop; its LoRA is drawn here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from small_run import LORA_FILE, ROOT, bare, flag_words

from flux_db.demo.pictures import draw_picture, png_bytes, scene, write_demo_pictures
from flux_db.demo.tiny_model import write_once, write_tiny_model
from flux_db.demo.world import WHERE
from flux_db.output_folder import METRICS
from flux_db.run.sample_files import read_folder, round_folder
from flux_db.score.judged import Scores, Subject, score
from flux_db.score.samples import pictures_in, read_pictures, read_samples

STEPS, EVERY, LAST = 200, 100, 400
IMAGES, DENOISING, GUIDANCE, SAMPLE_SEED = 4, 12, 3.5, 42
PROMPTS = (
    *(f"a photo of sks dog {where}" for where in ("on the beach", "in the snow", "at night", "in the desert")),
    *("a photo of a dog on the beach", "a photo of a brown dog in the snow"),
    *("a photo of a grey dog with a red collar at night", "a photo of a cat in the desert"),
)
DEFAULT: dict[str, Any] = {
    "rank": 16,
    "learning_rate": 1e-3,
    "train_batch_size": 2,
    "guidance_scale": 1.0,
    "max_train_steps": STEPS,
    "validation_steps": STEPS,
}
COLUMNS = {
    "subject": "subject",
    "prompt": "prompt",
    "class_prompt": "class prompt",
    "class_subject": "subject in class",
    "class_change": "class change",
    "diversity": "diversity",
    "copies": "copies",
}
COSTS = {"seconds": "s/step", "memory_mb": "MB"}


@dataclass(frozen=True)
class Row:
    """A line of the table: what differs from the default."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    captions: str = "place"
    of: str = ""
    """Another row whose runs serve this one as well, at another step."""
    step: int = STEPS
    begun_by: str = ""
    """Another row whose LoRA of the same seed is the start of this one."""
    concepts: tuple[str, ...] = ()
    """Subjects that one LoRA learns together."""

    @property
    def flags(self) -> dict[str, Any]:
        return DEFAULT | dict(self.changes)


def only(steps: int) -> dict[str, int]:
    """One round of samples, after the last of so many steps."""
    return {"max_train_steps": steps, "validation_steps": steps}


PRIOR = {"with_prior_preservation": True, "class_prompt": "a photo of a dog", "num_class_images": 32}
ROWS: dict[str, Row] = {
    "default": Row({"max_train_steps": LAST, "validation_steps": EVERY}),
    **{f"{step} steps": Row(of="default", step=step) for step in (100, 300, 400)},
    "rank 4": Row({"rank": 4}),
    "rank 64": Row({"rank": 64}),
    **{f"learning rate {rate}": Row({"learning_rate": float(rate)}) for rate in ("1e-4", "5e-4", "2e-3", "4e-3")},
    "prodigy": Row({"optimizer": "prodigy", "learning_rate": 1.0}),
    **{
        f"weighting {name}": Row({"weighting_scheme": name})
        for name in ("sigma_sqrt", "logit_normal", "mode", "cosmap")
    },
    "prior preservation": Row(PRIOR),
    "captions: none": Row(captions="none"),
    "captions: full": Row(captions="full"),
    "guidance 3.5": Row({"guidance_scale": 3.5}),
    **{f"batch {size}": Row({"train_batch_size": size}) for size in (1, 4)},
    "sigmoid": Row({"timestep_sampling": "sigmoid"}),
    "shift 3": Row({"timestep_sampling": "shift"}),
    "flux_shift": Row({"timestep_sampling": "flux_shift"}),
    "preserved class": Row({"preserve_class": "dog"}),
    "preserved class, 600 steps": Row({"preserve_class": "dog"} | only(600), step=600),
    "prior preservation, 400 steps": Row(PRIOR | only(400), step=400),
    "preserved class, all layers": Row({"preserve_class": "dog", "lora_layers": "all"}),
    **{
        f"preserved class, {layers} layers, guidance 3.5": Row(
            {"preserve_class": "dog", "lora_layers": layers, "guidance_scale": 3.5}
        )
        for layers in ("default", "all")
    },
    "EMA 0.99": Row({"ema_decay": 0.99}),
    "huber": Row({"loss": "huber"}),
    "smooth_l1": Row({"loss": "smooth_l1"}),
    "layers: attention": Row({"lora_layers": "attention"}),
    "layers: all": Row({"lora_layers": "all"}),
    "LoRA+ 16": Row({"loraplus_ratio": 16}),
    "text encoder": Row({"train_text_encoder": True}),
    "text encoder 1e-3": Row({"train_text_encoder": True, "text_encoder_lr": 1e-3}),
    "warm start": Row({"init_lora": ""} | only(100), step=100, begun_by="learning rate 5e-4"),
    "two concepts, 400 steps": Row(only(400), step=400, concepts=("dog", "robot")),
    "int8": Row({"base_precision": "int8"}),
    "caption dropout 0.1": Row({"caption_dropout": 0.1}),
    "diffusers": Row({"lora_alpha": 16}, captions="none"),
}


class Bench:
    def __init__(self, work: Path, given: argparse.Namespace) -> None:
        self.work = work
        self.given = given
        self.model = work / "model"
        write_tiny_model(self.model, "small")
        for captions in ("none", "place", "full"):
            write_once(work / captions, pictures(captions), what="the pictures of this benchmark")
        write_demo_pictures(work / "robot", subject="robot")
        (work / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
        self.subject = Subject("a photo of sks dog", read_pictures(pictures_in(work / "none")))

    def run_folder(self, name: str, seed: int) -> Path:
        return self.work / name.replace(" ", "_").replace(":", "") / f"seed-{seed}"

    def make(self, name: str, seed: int) -> None:
        """Train a row with a seed, unless that is done."""
        output = self.run_folder(name, seed)
        if (output / LORA_FILE).is_file() and self.final_samples(name, seed).is_dir():
            return
        print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
        commands = self.of_diffusers(output, seed) if name == "diffusers" else [self.of_ours(ROWS[name], output, seed)]
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.with_suffix(".log").open("w") as log:
            for command, environment in commands:
                result = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
                if result.returncode:
                    raise SystemExit(f"{name}, seed {seed}: exit code {result.returncode}; see {log.name}")

    def of_ours(self, row: Row, output: Path, seed: int) -> tuple[list[str], dict[str, str]]:
        settings = self.common(row, output, seed) | {
            "validation_prompts_file": self.work / "prompts.txt",
            "num_validation_images": IMAGES,
            "validation_inference_steps": DENOISING,
            "validation_guidance": GUIDANCE,
            "validation_seed": SAMPLE_SEED,
            "encode_cache_dir": self.work / "cache",
            "compile_cache": "on",
            "compile_cache_dir": self.work / "graphs",
            "device": "CPU",
        }
        if row.changes.get("with_prior_preservation"):
            settings["class_data_dir"] = self.work / f"class-{seed}"
        if row.begun_by:
            settings["init_lora"] = self.run_folder(row.begun_by, seed) / LORA_FILE
        if row.concepts:
            settings["concepts"] = self.concepts_file(row.concepts)
            del settings["instance_data_dir"], settings["instance_prompt"]
        return [sys.executable, str(ROOT / "train_dreambooth_lora_flux.py"), *flag_words(settings)], bare()

    def concepts_file(self, subjects: Sequence[str]) -> Path:
        """`--concepts`, with the dog's pictures and captions as everywhere."""
        words = {"dog": ("sks", "place"), "robot": ("ukj", "robot")}
        path = self.work / f"{'_'.join(subjects)}.yaml"
        concepts = [{"dir": str(self.work / words[s][1]), "prompt": f"a photo of {words[s][0]} {s}"} for s in subjects]
        path.write_text(yaml.safe_dump(concepts), encoding="utf-8")
        return path

    def costs(self, name: str, seed: int) -> dict[str, float] | None:
        """Median seconds of a step and peak memory, of a run of ours."""
        metrics = self.run_folder(ROWS[name].of or name, seed) / METRICS
        if not metrics.is_file():
            return None
        rows = [row for line in metrics.read_text().splitlines() if "loss" in (row := json.loads(line))]
        return {
            "seconds": statistics.median(row["seconds"] for row in rows[1:]),
            "memory_mb": max(row["memory_mb"] for row in rows),
        }

    def common(self, row: Row, output: Path, seed: int) -> dict[str, Any]:
        """The flags that diffusers' script and ours share."""
        return row.flags | {
            "pretrained_model_name_or_path": self.model,
            "instance_data_dir": self.work / row.captions,
            "instance_prompt": "a photo of sks dog",
            "output_dir": output,
            "seed": seed,
            "resolution": 64,
            "max_sequence_length": 20,
            "checkpointing_steps": 10_000,
            "lr_scheduler": "constant",
            "report_to": "tensorboard" if "lora_alpha" in row.changes else "none",
            "dataloader_num_workers": 0,
        }

    def of_diffusers(self, output: Path, seed: int) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Their script, then pictures with its LoRA from the noise of our samples."""
        if not self.given.diffusers_script:
            raise SystemExit("the row diffusers needs --diffusers_script PATH, the example script of diffusers v0.35.2")
        settings = self.common(ROWS["diffusers"], output, seed) | {"cache_latents": True, "lr_warmup_steps": 0}
        del settings["validation_steps"]
        search = f"{ROOT / 'scripts/torchvision_stand_in'}"
        words = [str(self.given.torch_python), str(self.given.diffusers_script), *flag_words(settings)]
        yield words, bare() | {"PYTHONPATH": search}
        drawing = {
            "model": self.model,
            "lora": output,
            "num": IMAGES,
            "steps": DENOISING,
            "guidance": GUIDANCE,
            "seed": SAMPLE_SEED,
            "size": "64x64",
            "max_sequence_length": 20,
            "device": "CPU",
            "prompts_file": self.work / "prompts.txt",
            "output": self.final_samples("diffusers", seed),
        }
        yield [sys.executable, "-m", "flux_db", "generate", *flag_words(drawing)], bare()

    def final_samples(self, name: str, seed: int) -> Path:
        row = ROWS[name]
        folder = self.run_folder(row.of or name, seed)
        return folder / "drawn" if name == "diffusers" else round_folder(folder, row.step)

    def scores(self, name: str, seed: int) -> Scores | None:
        """None if the run is not there."""
        last = self.final_samples(name, seed)
        first = round_folder(self.run_folder("default", 0), 0)
        if not last.is_dir() or not first.is_dir():
            return None
        return score(read_samples(read_folder(last)), self.subject, read_samples(read_folder(first)))


def pictures(captions: str) -> dict[str, bytes]:
    """Five pictures of the dog; with the place, or with pose and place, in their captions."""
    files: dict[str, bytes] = {}
    for i in range(5):
        files[f"dog_{i:02}.png"] = png_bytes(draw_picture(256, i, 0))
        shown = scene(i, 0)
        pose = f" {shown.pose}" if captions == "full" else ""
        if captions != "none":
            files[f"dog_{i:02}.txt"] = f"a photo of sks dog{pose} {WHERE[shown.place][0]}\n".encode()
    return files


def table(bench: Bench, rows: Sequence[str], seeds: int) -> Iterator[str]:
    yield "| | runs | " + " | ".join([*COLUMNS.values(), *COSTS.values()]) + " |"
    yield "|---" * (len(COLUMNS) + len(COSTS) + 2) + "|"
    base = round_folder(bench.run_folder("default", 0), 0)
    if base.is_dir():
        samples = read_samples(read_folder(base))
        yield line("before training", [score(samples, bench.subject, samples)])
    for name in rows:
        if found := [s for seed in range(seeds) if (s := bench.scores(name, seed))]:
            costs = [costs for seed in range(seeds) if (costs := bench.costs(name, seed))]
            yield line(name, found, costs)


def line(name: str, found: Sequence[Scores], costs: Sequence[Mapping[str, float]] = ()) -> str:
    cells = []
    for column in COLUMNS:
        values = [value for scores in found if (value := scores.as_dict()[column]) is not None]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.2f}{spread}" if values else "-")
    for column, digits in zip(COSTS, (3, 0), strict=True):
        cells.append(f"{statistics.median(cost[column] for cost in costs):.{digits}f}" if costs else "-")
    return f"| {name} | {len(found)} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: all, diffusers only with its script")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs/quality", help="default: outputs/quality")
    parser.add_argument("--table", action="store_true", help="print the table of what is there and train nothing")
    parser.add_argument("--json", type=Path, help="write the scores of every run into this file as well")
    parser.add_argument("--diffusers_script", type=Path, help="example script of diffusers v0.35.2, for the last row")
    parser.add_argument("--torch_python", type=Path, default=ROOT / ".venv-interop/bin/python")
    given = parser.parse_args()
    rows = given.rows or [name for name in ROWS if name != "diffusers" or given.diffusers_script or given.table]
    given.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(given.work.resolve(), given)
    if not given.table:
        trained = [name for name in rows if not ROWS[name].of]
        with ThreadPoolExecutor(given.jobs) as pool:
            jobs = [pool.submit(bench.make, name, seed) for seed in range(given.seeds) for name in trained]
            for job in jobs:
                job.result()
    print("\n".join(table(bench, rows, given.seeds)))
    if given.json:
        every = {name: [s.as_dict() for seed in range(given.seeds) if (s := bench.scores(name, seed))] for name in rows}
        given.json.write_text(json.dumps(every, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
