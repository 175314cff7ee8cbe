"""What settings do to quality: train on the small model over settings and seeds, score the samples, print a table.

    python scripts/bench_quality.py                         # everything; goes on where it was stopped
    python scripts/bench_quality.py --only default rank_64  # some settings
    python scripts/bench_quality.py --table                 # only print what was measured so far
    python scripts/bench_quality.py --torch PYTHON          # the row of diffusers on torch, in an environment with it

Every run is the trainer as a user starts it, with configs/demo_cpu.yaml and a few changes. Its samples have prompts of
the subject in places where it was not photographed, and of the class. The judge of the small model scores them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flux_db.demo.pictures import write_demo_pictures  # noqa: E402  a script finds its package beside it
from flux_db.demo.tiny_model import write_tiny_model  # noqa: E402

SEEDS = (1, 2, 3)
MEASURES = ("subject", "prompt", "class_prompt", "class_subject", "class_change", "diversity", "copies")
PROMPTS = (
    *("a photo of sks dog on the beach", "a photo of sks dog in the snow", "a photo of sks dog at night"),
    *("a photo of sks dog in the desert", "a photo of a dog on the beach", "a photo of a brown dog in the snow"),
    *("a photo of a black dog at night", "a photo of a dog in the desert"),
)
PRIOR = ["--with_prior_preservation", "--class_prompt", "a photo of a dog", "--num_class_images", "48"]

SETTINGS: dict[str, list[str]] = {
    "default": [],
    "rank_4": ["--rank", "4"],
    "rank_64": ["--rank", "64"],
    "lr_3e-4": ["--learning_rate", "3e-4"],
    "lr_3e-3": ["--learning_rate", "3e-3"],
    "steps_100": ["--max_train_steps", "100"],
    "steps_400": ["--max_train_steps", "400"],
    "batch_1": ["--train_batch_size", "1"],
    "sigma_sqrt": ["--weighting_scheme", "sigma_sqrt"],
    "logit_normal": ["--weighting_scheme", "logit_normal"],
    "mode": ["--weighting_scheme", "mode"],
    "cosmap": ["--weighting_scheme", "cosmap"],
    "prior": PRIOR,
    "guidance_3.5": ["--guidance_scale", "3.5"],
    "captions": ["--instance_data_dir", "captioned"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "bench_quality", help="folder for all runs")
    parser.add_argument("--only", nargs="+", choices=[*SETTINGS], help="settings to run (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--table", action="store_true", help="print what was measured, and run nothing")
    parser.add_argument(
        "--torch", metavar="PYTHON", help="interpreter with the interop extra: run scripts/torch_lora.py"
    )
    given = parser.parse_args()
    if not given.table:
        prepare(given.work)
        # all settings with the first seed before any with the second: a part of the whole is a table already
        for seed in given.seeds:
            for name in ["torch"] if given.torch else given.only or SETTINGS:
                measure(given.work, name, seed, given.torch)
    print(table(given.work))
    return 0


def prepare(work: Path) -> None:
    from flux_db.demo.pictures import scene
    from flux_db.demo.world import WHERE

    write_tiny_model(work / "model", "small")
    write_demo_pictures(work / "pictures", size=64)
    write_demo_pictures(work / "captioned", size=64)
    for i in range(5):
        drawn = scene(i, 0)
        text = f"a photo of sks dog {drawn.pose} {WHERE[drawn.place][0]}\n"
        (work / "captioned" / f"dog_{i:02}.txt").write_text(text)


def measure(work: Path, name: str, seed: int, torch: str | None) -> None:
    """One run, unless it was made before."""
    result = work / "results" / f"{name}_{seed}.json"
    if result.exists():
        return
    output = work / "runs" / f"{name}_{seed}"
    command = torch_command(torch, work, output, seed) if torch else own_command(work, output, name, seed)
    print(f"{name}, seed {seed}", flush=True)
    start = time.monotonic()
    log = output.with_suffix(".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: failed with {done.returncode}; see {log}")
    seconds = time.monotonic() - start
    from flux_db.score.runs import score_run

    rounds = [{"step": r.step, **r.scores.as_dict()} for r in score_run(output)]
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps({"seconds": seconds, "first": rounds[0], "last": rounds[-1]}, indent=2))


def own_command(work: Path, output: Path, name: str, seed: int) -> list[str]:
    changes = [str(work / word) if word == "captioned" else word for word in SETTINGS[name]]
    if "--with_prior_preservation" in changes:
        changes += ["--class_data_dir", str(work / "class")]
    steps = changes[changes.index("--max_train_steps") + 1] if "--max_train_steps" in changes else "200"
    return [
        *(sys.executable, str(ROOT / "train_dreambooth_lora_flux.py"), "--config", str(ROOT / "configs/demo_cpu.yaml")),
        *("--pretrained_model_name_or_path", str(work / "model"), "--instance_data_dir", str(work / "pictures")),
        *("--output_dir", str(output), "--seed", str(seed), "--encode_cache_dir", str(work / "cache")),
        *("--checkpointing_steps", "100000", "--validation_steps", steps, "--report_to", "none"),
        *(word for prompt in PROMPTS for word in ("--validation_prompt", prompt)),
        *("--num_validation_images", "3"),
        *changes,
    ]


def torch_command(python: str, work: Path, output: Path, seed: int) -> list[str]:
    return [
        *(python, str(ROOT / "scripts/torch_lora.py"), "--model", str(work / "model"), "--output", str(output)),
        *("--pictures", str(work / "pictures"), "--seed", str(seed), "--prompts", *PROMPTS),
    ]


def table(work: Path) -> str:
    """Mean and standard deviation over seeds, as a table in Markdown."""
    lines = [
        f"| Setting | Runs | {' | '.join(m.replace('_', ' ') for m in MEASURES)} |",
        "|---" * (len(MEASURES) + 2) + "|",
    ]
    read = {
        name: [json.loads(path.read_text()) for path in sorted((work / "results").glob(f"{name}_[0-9]*.json"))]
        for name in [*SETTINGS, "torch"]
    }
    if start := [result["first"] for results in read.values() for result in results]:
        lines.append(row("before training", start[:1]))
    lines += [row(name, [result["last"] for result in results]) for name, results in read.items() if results]
    return "\n".join(lines)


def row(name: str, scores: list[dict[str, float | None]]) -> str:
    cells = []
    for measure_name in MEASURES:
        values = [value for one in scores if (value := one[measure_name]) is not None]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        cells.append(f"{statistics.fmean(values):.2f}{spread}" if values else "-")
    return f"| {name} | {len(scores)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
