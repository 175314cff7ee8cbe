"""What --base_precision int8 costs: errors of weights, velocity and loss, the LoRA after 20 steps, memory and time.

python scripts/bench_int8.py            # everything: about five minutes on two cores, 3 GB of disk
python scripts/bench_int8.py --errors   # without the 1.2 GB model

The small model, which is trained, gives the errors. A scale for each row is what the program does; scales for groups of
columns are computed here beside it, to see whether they would pay. Memory and time are those of the training command on
a transformer of 299 million random parameters, and quality is in the table of bench_quality.py.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench_load import write_wide_model
from bench_step import peak_memory
from safetensors.numpy import load_file, save_file
from small_run import LORA_FILE, ROOT, bare, flag_words

from flux_db.demo.pictures import write_demo_pictures
from flux_db.demo.tiny_model import write_tiny_model
from flux_db.model import int8
from flux_db.output_folder import METRICS
from flux_db.settings.schema import from_flat_dict

STEPS = 20
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
Rounding = Callable[[np.ndarray], np.ndarray]


def by_row(weight: np.ndarray) -> np.ndarray:
    return int8.dequantise(int8.quantise(weight))


def in_groups(size: int) -> Rounding:
    """A scale for each so many columns of a row."""

    def rounded(weight: np.ndarray) -> np.ndarray:
        parts = [by_row(weight[:, start : start + size]) for start in range(0, weight.shape[1], size)]
        return np.concatenate(parts, axis=1)

    return rounded


ROUNDINGS: dict[str, Rounding] = {"row": by_row, "group of 128": in_groups(128), "group of 32": in_groups(32)}


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Of the root mean squares."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# --- weights -----------------------------------------------------------------------------------------------------


def matrices(model: Path) -> Iterator[np.ndarray]:
    for name, weight in load_file(model / WEIGHTS).items():
        if int8.is_matrix(name, weight.shape):
            yield weight.astype(np.float32)


def layer_table(model: Path) -> None:
    """The error of each kind of layer, over the blocks."""
    errors: dict[str, list[float]] = {}
    for name, weight in load_file(model / WEIGHTS).items():
        if int8.is_matrix(name, weight.shape):
            kind = re.sub(r"\.\d+\.", ".", name, count=1).removesuffix(int8.WEIGHT)
            errors.setdefault(kind, []).append(relative(by_row(weight.astype(np.float32)), weight.astype(np.float32)))
    print("| layer | blocks | error: median | largest |\n|---|---|---|---|")
    for kind, found in sorted(errors.items()):
        print(f"| {kind} | {len(found)} | {statistics.median(found):.2%} | {max(found):.2%} |")
    print(flush=True)


def weight_table(model: Path) -> None:
    wide = np.random.default_rng(0).standard_normal((256, 3072), np.float32)
    print("| a scale for each | matrices of the small model: median | largest | normal numbers, rows of 3072 |")
    print("|---|---|---|---|")
    for name, rounded in ROUNDINGS.items():
        errors = [relative(rounded(weight), weight) for weight in matrices(model)]
        cells = (statistics.median(errors), max(errors), relative(rounded(wide), wide))
        print(f"| {name} | {' | '.join(f'{cell:.2%}' for cell in cells)} |", flush=True)


# --- velocity ----------------------------------------------------------------------------------------------------


def answer_table(folder: Path, model: Path) -> None:
    """What the transformer answers to the same inputs, in this process."""
    from flux_db.model import runtime
    from flux_db.settings.schema import RuntimeConfig

    device = runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))
    print("\n| transformer | compared with | velocity: off | largest | its standard deviation |\n|---|---|---|---|---|")
    for name, wanted, found in (random_answers(folder, device), trained_answers(folder, model, device)):
        off, largest = relative(found, wanted), np.abs(found - wanted).max()
        print(f"| {name} | {off:.2%} | {largest:.1e} | {wanted.std():.2f} |", flush=True)


def random_answers(folder: Path, device: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """Of the tiny model of the parity reference, with the stored result of torch."""
    from flux_db.model import loading
    from flux_db.parity import compare, golden
    from flux_db.training.build import step_settings

    (folder / "golden").mkdir()
    dev, *_ = golden.write_models(folder / "golden")
    config = from_flat_dict(settings_of(folder, "golden", dev) | {"guidance_scale": golden.GUIDANCE})
    settings = step_settings(config, device, dev, prior=False)
    quantised = loading.load_transformer(dev, device.dtype, is_int8=True)
    found = compare.answer_of(quantised, settings, golden.batch(0))
    return "tiny, random weights | torch, float32", golden.read().arrays["transformer.dev"], found


def trained_answers(folder: Path, model: Path, device: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """Of the small model, to batches of its training."""
    from flux_db.model import loading
    from flux_db.parity import compare
    from flux_db.training import build, run
    from flux_db.training.prepare import prepare

    config = from_flat_dict(settings_of(folder, "answers", model))
    prepared = prepare(config, device)
    training = build.build(config, device, prepared.model, prepared.dataset)
    source = run.batch_source(config, training, prepared.cache, prepared)
    settings = build.step_settings(config, device, prepared.model, prior=False)
    batches = [source[i]._asdict() for i in range(10)]
    full, quantised = (loading.load_transformer(model, device.dtype, is_int8=is_int8) for is_int8 in (False, True))
    answers = [
        np.stack([compare.answer_of(network, settings, b | {"pooled": b["pooled_prompt_embeds"]}) for b in batches])
        for network in (full, quantised)
    ]
    return "small, trained | the same, float32", *answers


# --- loss and LoRA -----------------------------------------------------------------------------------------------


def rounded_model(model: Path, target: Path, rounded: Rounding) -> Path:
    """The model with the matrices of its blocks as int8 would hold them, in their own type's place."""
    shutil.copytree(model, target)
    tensors = {name: value.astype(np.float32) for name, value in load_file(model / WEIGHTS).items()}
    for name, value in tensors.items():
        if int8.is_matrix(name, value.shape):
            tensors[name] = rounded(value)
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
    return target


def settings_of(folder: Path, name: str, model: Path, **changes: object) -> dict[str, Any]:
    """Of a short run."""
    return {
        "pretrained_model_name_or_path": str(model),
        "instance_data_dir": str(folder / "pictures"),
        "instance_prompt": "a photo of sks dog",
        "output_dir": str(folder / "runs" / name),
        "encode_cache_dir": str(folder / "cache"),
        "resolution": 64,
        "max_sequence_length": 20,
        "train_batch_size": 2,
        "rank": 16,
        "learning_rate": 1e-3,
        "max_train_steps": STEPS,
        "report_to": "none",
        "device": "CPU",
        "compile_cache": "off",
        **changes,
    }


def train(folder: Path, name: str, model: Path, **changes: object) -> Path:
    settings = settings_of(folder, name, model, **changes)
    output = Path(settings["output_dir"])
    output.parent.mkdir(exist_ok=True)
    words = [sys.executable, str(ROOT / "train_dreambooth_lora_flux.py"), *flag_words(settings)]
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(words, cwd=ROOT, env=bare(), stdout=log, stderr=log) as job,
    ):
        peak = 0
        while job.poll() is None:
            peak = max(peak, peak_memory(job.pid))
            try:
                job.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        if job.returncode:
            log.seek(0)
            sys.exit(f"{name} failed:\n{log.read()}")
    (output / "peak").write_text(str(peak))
    return output


def losses(run: Path) -> np.ndarray:
    return np.array([json.loads(line)["loss"] for line in (run / METRICS).read_text().splitlines()])


def changes_of(run: Path) -> np.ndarray:
    """What training has added to the weights: B A of every layer, end to end."""
    tensors = load_file(run / LORA_FILE)
    downs = sorted(name for name in tensors if ".lora_A." in name)
    products = [
        tensors[name.replace("lora_A", "lora_B")].astype(np.float64) @ tensors[name].astype(np.float64)
        for name in downs
    ]
    return np.concatenate([product.ravel() for product in products])


def training_table(folder: Path, model: Path) -> None:
    whole = train(folder, "whole", model)
    print(f"\n| a scale for each | loss of step 1, off | largest of {STEPS} | change by the LoRA, off | cosine |")
    print("|---|---|---|---|---|")
    runs = {"row (--base_precision int8)": train(folder, "int8", model, base_precision="int8")}
    for name, rounded in list(ROUNDINGS.items())[1:]:
        own = rounded_model(model, folder / name.replace(" ", "_"), rounded)
        runs[name] = train(folder, name.replace(" ", "_"), own)
    for name, run in runs.items():
        off = np.abs(losses(run) / losses(whole) - 1)
        ours, theirs = changes_of(run), changes_of(whole)
        cosine = ours @ theirs / (np.linalg.norm(ours) * np.linalg.norm(theirs))
        print(f"| {name} | {off[0]:.1e} | {off.max():.1e} | {relative(ours, theirs):.2%} | {cosine:.6f} |", flush=True)


# --- memory and time ---------------------------------------------------------------------------------------------


def cost_table(folder: Path) -> None:
    write_wide_model(folder, "F32")
    print("\n| base, 299 M parameters | peak memory of the training process, MB | s/step | loss of step 1 |")
    print("|---|---|---|---|")
    for base in ("full", "int8"):
        run = train(folder, f"wide_{base}", folder / "F32", base_precision=base, train_batch_size=1)
        rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
        seconds = statistics.median(row["seconds"] for row in rows[1:])
        print(f"| {base} | {(run / 'peak').read_text()} | {seconds:.3f} | {rows[0]['loss']:.5f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", action="store_true", help="without memory and time of the 1.2 GB model")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", "small")
        write_demo_pictures(folder / "pictures")
        layer_table(folder / "model")
        weight_table(folder / "model")
        training_table(folder, folder / "model")
        answer_table(folder, folder / "model")
        if not given.errors:
            cost_table(folder)


if __name__ == "__main__":
    main()
