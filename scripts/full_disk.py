#!/usr/bin/env python
"""Train on disks that are too small, and see that no run hangs and nothing good is lost.

    python scripts/full_disk.py --sizes 20

The tiny model trains to the end once, with room for everything. Then the same run is started on small file systems,
from one that holds hardly anything to one that holds all. Every second run resumes from a checkpoint. An earlier run's
files lie on the same disk. Each run must end in time, with a sensible exit code and without a traceback; whatever it
left must be whole, and the earlier files untouched. Then the disk is enlarged, and the resumed run must come to the
bytes of the undisturbed one.

Small file systems are mounts of tmpfs, which takes root. Without that the size of every file is limited instead
(RLIMIT_FSIZE), so that large files are refused and small ones are not.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from small_run import bare, keep_one_block, lora_bytes, metrics, trainer, write_inputs

from flux_db.atomic import leftovers
from flux_db.run import checkpoint

STEPS = 12
SAVE_EVERY = 2
RESUME_AT = 4
SECONDS = 300
"""A run that takes longer hangs."""
PAGE = 4096
FILES_OF_A_CHECKPOINT = ("pytorch_lora_weights.safetensors", "optimizer.safetensors")


@dataclass
class Result:
    size: int
    resumed: bool
    exit_code: int | None = None
    """None: it hung."""
    step: int = 0
    """Of the newest checkpoint that was left."""
    message: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Disk:
    """A folder with little room; `limit` is the largest size of a file where nothing can be mounted."""

    folder: Path
    limit: int | None

    def enlarge(self) -> None:
        if self.limit is None:
            _mount("-o", "remount,size=1g", str(self.folder))


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Disk]:
    """A file system of `size` bytes at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)):
        yield Disk(folder, limit=size)
        return
    try:
        yield Disk(folder, limit=None)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def can_mount(folder: Path) -> bool:
    with small_disk(folder, PAGE) as disk:
        return disk.limit is None


def _mount(*words: str) -> bool:
    try:
        return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def command(inputs: Path, folder: Path, **changes: Any) -> list[str]:
    return trainer(
        inputs,
        folder / "out",
        encode_cache_dir=folder / "cache",
        # stored by the undisturbed run
        compile_cache="on",
        compile_cache_dir=inputs / "graphs",
        lora_layers="single_transformer_blocks.0.attn.to_q",
        # checkpoints larger than most other files
        rank=64,
        max_train_steps=STEPS,
        checkpointing_steps=SAVE_EVERY,
        validation_prompt="a drawing of sks dog",
        validation_steps=5,
        validation_inference_steps=1,
        report_to="tensorboard",
        **changes,
    )


class FullDisk:
    """The undisturbed run, and the runs on small disks that are compared with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_inputs(folder)
        keep_one_block(folder / "model" / "transformer")
        self.calm = folder / "calm"
        done = self._train(self.calm)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}:\n{done.stderr[-3000:]}")
        self.earlier = folder / "earlier"
        shutil.copytree(self.calm / "out" / f"checkpoint-{RESUME_AT}", self.earlier / f"checkpoint-{RESUME_AT}")
        self.mounts = can_mount(folder / "probe")

    @property
    def enough(self) -> int:
        """Bytes of a disk that holds everything, with some to spare because files are written anew beside the old.

        Where nothing can be mounted, bytes of the largest file.
        """
        sizes = [PAGE * (1 + path.stat().st_size // PAGE) for path in self.calm.rglob("*") if path.is_file()]
        return 3 * (sum(sizes) if self.mounts else max(sizes)) // 2

    def run(self, size: int, *, resumed: bool) -> Result:
        result = Result(size, resumed)
        with small_disk(self.folder / f"disk-{size}", size) as disk:
            _lay_out(disk.folder, self.calm, self.earlier, resumed=resumed)
            kept = _contents(disk.folder)
            more = {"resume_from_checkpoint": "latest"} if resumed else {}
            try:
                done = self._train(disk.folder, disk.limit, **more)
            except subprocess.TimeoutExpired:
                result.problems.append(f"no end within {SECONDS} s")
                return result
            result.exit_code = done.returncode
            _judge(done, result)
            self._judge_files(disk.folder, kept, result)
            disk.enlarge()
            done = self._train(disk.folder, resume_from_checkpoint="latest")
            if done.returncode:
                result.problems.append(f"with room again, exit code {done.returncode}: {done.stderr[-500:]}")
            elif lora_bytes(disk.folder / "out") != lora_bytes(self.calm / "out"):
                result.problems.append("with room again, the LoRA differs from the undisturbed run's")
        return result

    def _train(self, folder: Path, limit: int | None = None, **changes: Any) -> subprocess.CompletedProcess:
        words = command(self.folder, folder, **changes)

        def refuse_large_files() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

        return subprocess.run(
            words,
            env=bare(),
            timeout=SECONDS,
            preexec_fn=refuse_large_files,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )

    def _judge_files(self, folder: Path, kept: dict[str, bytes], result: Result) -> None:
        """Everything that is there must be whole, and what was there before still the same."""
        found = _contents(folder)
        result.problems += [
            f"{name} was there before and is not the same" for name in kept if found.get(name) != kept[name]
        ]
        output = folder / "out"
        for step, path in checkpoint.numbered(output):
            try:
                files, expected = checkpoint.load(path).files, checkpoint.load(self.calm / "out" / path.name).files
            except checkpoint.DamagedCheckpoint as problem:
                result.problems.append(f"a damaged checkpoint: {problem}")
                continue
            result.step = step
            if any(files[name] != expected[name] for name in FILES_OF_A_CHECKPOINT):
                result.problems.append(f"checkpoint {step} differs from the undisturbed run's")
        result.problems += [f"left over: {path.name}" for path in leftovers(output)]
        result.problems += _judge_metrics(output / "metrics.jsonl", self.calm / "out" / "metrics.jsonl")
        if result.exit_code == 0 and lora_bytes(output) != lora_bytes(self.calm / "out"):
            result.problems.append("exit code 0, and the LoRA differs from the undisturbed run's")


def _lay_out(folder: Path, calm: Path, earlier: Path, *, resumed: bool) -> None:
    """What lies on the small disk before the run, as far as there is room for it."""
    try:
        shutil.copytree(earlier, folder / "earlier")
        if resumed:
            name = f"checkpoint-{RESUME_AT}"
            shutil.copytree(calm / "out" / name, folder / "out" / name)
            shutil.copytree(calm / "cache", folder / "cache", ignore=shutil.ignore_patterns("*.json"))
    except (OSError, shutil.Error):
        for path in folder.iterdir():
            shutil.rmtree(path)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _judge(done: subprocess.CompletedProcess, result: Result) -> None:
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    result.message = errors[-1] if errors else ""
    if done.returncode not in (0, 1):
        result.problems.append(f"exit code {done.returncode}: {done.stderr[-500:]}")
    if done.returncode == 1 and not errors:
        result.problems.append(f"no line says what went wrong: {done.stderr[-500:]}")
    for word in ("Traceback", "Exception ignored", "Fatal"):
        if word in done.stderr:
            result.problems.append(f"{word}: {done.stderr[-2000:]}")


def _judge_metrics(path: Path, calm: Path) -> list[str]:
    if not path.exists():
        return []
    expected = {json.dumps(row) for row in metrics(calm)}
    try:
        steps = [row for row in metrics(path) if "loss" in row]
    except ValueError as problem:
        return [f"{path.name} has half a line: {problem}"]
    wrong = [row["step"] for row in steps if json.dumps(row) not in expected]
    return [f"{path.name} differs at steps {wrong}"] if wrong else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, default=20, help="how many sizes of the disk to try (default: 20)")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        disks = FullDisk(Path(name))
        kind = "of a tmpfs" if disks.mounts else "of files, by RLIMIT_FSIZE"
        print(f"{arguments.sizes} sizes {kind} up to {disks.enough // 1024} KiB", flush=True)
        for number in range(arguments.sizes):
            size = round(PAGE + (disks.enough - PAGE) * number / max(1, arguments.sizes - 1))
            result = disks.run(size, resumed=number % 2 == 1)
            failed += bool(result.problems)
            how = "resumed" if result.resumed else "fresh"
            print(
                f"{size // 1024:5d} KiB, {how:7}: exit code {result.exit_code}, checkpoint {result.step:2d}; "
                f"{result.message or 'no error'}",
                flush=True,
            )
            for problem in result.problems:
                print(f"  problem: {problem}", flush=True)
    print(f"{arguments.sizes - failed} of {arguments.sizes} held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
