#!/usr/bin/env python
"""What Ctrl-C, SIGTERM and SIGHUP do in each phase of a run, as a table.

    python scripts/signal_table.py [PHASE ...]

For each of them the tiny model trains until it is in that phase, and gets the signal. A cell has the exit code, the
seconds until the end, the status in train_state.json, the newest checkpoint, and the processes that were left.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
from small_run import bare

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flux_db.atomic import leftovers  # noqa: E402  a script finds its package beside it
from flux_db.demo.pictures import write_demo_pictures  # noqa: E402
from flux_db.demo.tiny_model import write_tiny_model  # noqa: E402
from flux_db.interrupt import SIGNALS  # noqa: E402
from flux_db.run.checkpoint import numbered  # noqa: E402
from flux_db.run.status import read_status  # noqa: E402

STEPS = 30
CHILDREN_END_WITHIN = 5
LORA = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Run:
    process: subprocess.Popen
    output: Path
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def rows(self) -> int:
        path = self.output / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    @property
    def blocks_signals(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("SigBlk:")[2].split()[0], 16) & 1 << (signal.SIGTERM - 1) > 0


@dataclass(frozen=True)
class Phase:
    reached: Callable[[Run], bool]
    settings: dict[str, object] = field(default_factory=dict)
    poll: float = 0.02
    """Seconds between two looks."""


SAMPLES = {"validation_prompt": "a dog", "validation_steps": 5, "validation_inference_steps": 30}
CLASS_PICTURES = {"with_prior_preservation": "", "class_data_dir": "class", "class_prompt": "a dog"}
CLASS_PICTURES |= {"num_class_images": 200}
PHASES = {
    "check": Phase(lambda run: run.blocks_signals and not run.text, {"instance_data_dir": "many"}),
    "encode": Phase(lambda run: run.text.count("device CPU") > 1, {"encode_cache_dir": "empty"}),
    "class pictures": Phase(lambda run: "class pictures:" in run.text, CLASS_PICTURES),
    "compile": Phase(lambda run: "Compiling" in run.text, {"compile_cache": "off"}),
    "training": Phase(lambda run: run.rows > 3),
    "validation": Phase(lambda run: "samples at step 5" in run.text, SAMPLES | {"num_validation_images": 30}),
    "saving": Phase(lambda run: run.rows > 3 and any(leftovers(run.output)), {"checkpointing_steps": 1}, 0.0005),
    "final": Phase(lambda run: (run.output / f"checkpoint-{STEPS}").exists()),
    "upload": Phase(lambda run: "Uploading to" in run.text, {"push_to_hub": "", "hub_model_id": "me/dog"}),
}


class BusyHub(BaseHTTPRequestHandler):
    """Does not answer questions now, and never comes to an end with an upload."""

    def do_GET(self) -> None:
        self.send_error(503)

    def do_POST(self) -> None:
        time.sleep(60)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def busy_hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), BusyHub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_abcdefghijklmnop"}
    server.shutdown()


def command(folder: Path, changes: dict[str, object]) -> list[str]:
    flags = {
        "pretrained_model_name_or_path": "model",
        "instance_data_dir": "pictures",
        "instance_prompt": "a photo of sks dog",
        "encode_cache_dir": "cache",
        "output_dir": "out",
        "resolution": 32,
        "max_sequence_length": 16,
        "rank": 4,
        # LoRA in the last block only: the step compiles in seconds
        "lora_layers": "single_transformer_blocks.1.attn.to_q",
        "max_train_steps": STEPS,
        "dataloader_num_workers": 0,
        "device": "CPU",
        "report_to": "none",
        **changes,
    }
    folders = {"pretrained_model_name_or_path", *(name for name in flags if name.endswith("_dir"))}
    values = {name: folder / str(value) if name in folders else value for name, value in flags.items()}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value)) if word]
    return [sys.executable, str(ROOT / "train_dreambooth_lora_flux.py"), *words]


def try_signal(folder: Path, phase: Phase, number: signal.Signals, variables: dict[str, str]) -> str:
    for name in ("out", "empty", "class"):
        shutil.rmtree(folder / name, ignore_errors=True)
    log = folder / "log"
    with log.open("wb") as file:
        words = command(folder, phase.settings)
        run = Run(subprocess.Popen(words, env=bare() | variables, stdout=file, stderr=file), folder / "out", log)
    while not phase.reached(run):
        if run.process.poll() is not None:
            raise RuntimeError(f"the run ended too early:\n{run.text[-3000:]}")
        time.sleep(phase.poll)
    family = psutil.Process(run.process.pid).children(recursive=True)
    begin = time.monotonic()
    run.process.send_signal(number)
    code = run.process.wait(120)
    seconds = time.monotonic() - begin
    end = time.monotonic() + CHILDREN_END_WITHIN
    while (left := sum(map(is_alive, family))) and time.monotonic() < end:
        time.sleep(0.05)
    state = read_status(run.output)
    newest = max((step for step, _ in numbered(run.output)), default=None) if run.output.is_dir() else None
    words = [str(code), f"{seconds:.1f} s", state.status if state else "no state"]
    words += [f"checkpoint {newest}"] if newest is not None else []
    words += ["LoRA file"] if (run.output / LORA).exists() else []
    words += [f"**{left} left**"] if left else []
    words += ["**Traceback**"] if "Traceback" in run.text else []
    return ", ".join(words)


def is_alive(process: psutil.Process) -> bool:
    """Whether the process has not ended; one that nobody waited for has."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="*", metavar="PHASE", help=f"of {', '.join(PHASES)} (default: all)")
    phases = parser.parse_args().phases or list(PHASES)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # nohup and background jobs ignore some, and children inherit that
    print("| phase |", " | ".join(number.name for number in SIGNALS), "|")
    print("|---|" + "---|" * len(SIGNALS))
    with tempfile.TemporaryDirectory() as name, busy_hub() as variables:
        folder = Path(name)
        write_tiny_model(folder / "model", "tiny")
        write_demo_pictures(folder / "pictures", count=3, size=64)
        write_demo_pictures(folder / "many", count=200, size=512)
        subprocess.run(command(folder, {"max_train_steps": 1}), env=bare(), check=True, capture_output=True)
        for phase in phases:
            cells = [try_signal(folder, PHASES[phase], number, variables) for number in SIGNALS]
            print(f"| {phase} |", " | ".join(cells), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
