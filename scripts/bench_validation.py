#!/usr/bin/env python
"""What validation costs on the mid model: 4 pictures of 128 px in 20 denoising steps, beside a run of 200 steps.

    python scripts/bench_validation.py

Prints the seconds of the first round, which compiles, and of a later one, their shares of the time that the 200 steps
take, and whether the LoRA file has the same bytes as that of a run without validation and trackers.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flux_db.demo.pictures import write_demo_pictures  # noqa: E402  a script finds its package beside it
from flux_db.demo.tiny_model import write_tiny_model  # noqa: E402
from flux_db.output_folder import LORA_FILE  # noqa: E402

STEPS, EVERY, PICTURES = 200, 50, 4


def run(folder: Path, name: str, *flags: str) -> tuple[str, Path]:
    """What the run said, and its output folder."""
    output = folder / name
    words = (
        f"--pretrained_model_name_or_path {folder}/model --instance_data_dir {folder}/pictures --resolution 128 "
        f"--max_sequence_length 64 --output_dir {output} --encode_cache_dir {folder}/cache --max_train_steps {STEPS} "
        f"--dataloader_num_workers 0 --device CPU"
    ).split()
    script = str(ROOT / "train_dreambooth_lora_flux.py")
    command = [sys.executable, script, *words, "--instance_prompt", "a photo of sks dog", *flags]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    return result.stderr, output


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", "mid")
        write_demo_pictures(folder / "pictures")
        write_demo_pictures(folder / "held_out", count=7)
        for number in range(5):  # the last two are not trained on
            (folder / "held_out" / f"dog_{number:02d}.png").unlink()
        flags = (
            f"--validation_steps {EVERY} --num_validation_images {PICTURES} --validation_inference_steps 20 "
            f"--validation_data_dir {folder}/held_out --keep_best --report_to tensorboard"
        ).split()
        said, watched = run(folder, "watched", "--validation_prompt", "a photo of sks dog in a bucket", *flags)
        _, plain = run(folder, "plain", "--report_to", "none")
        same = (watched / LORA_FILE).read_bytes() == (plain / LORA_FILE).read_bytes()
        rows = [json.loads(line) for line in (watched / "metrics.jsonl").read_text().splitlines()]
        size = (watched / "report.html").stat().st_size
    step = statistics.median(row["seconds"] for row in rows if "loss" in row)
    drawn = f"Drawing {PICTURES} samples at step \\d+.*?done in ([\\d.]+) s"
    rounds = [float(seconds) for seconds in re.findall(drawn, said, re.DOTALL)]
    first, later = rounds[0], statistics.median(rounds[1:])
    print(f"step {step:.3f} s, so {STEPS} steps {STEPS * step:.0f} s")
    for label, seconds in (("first round, with compiling", first), ("a later round", later)):
        print(f"{label}: {seconds:.1f} s, {100 * seconds / (STEPS * step):.0f} % of the {STEPS} steps")
    print(f"report.html {size / 1e6:.2f} MB")
    print(f"LoRA file with and without validation and trackers: {'the same bytes' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
