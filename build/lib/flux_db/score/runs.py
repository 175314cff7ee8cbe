"""The scores of a run, round by round, or of a folder of samples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from flux_db.atomic import write_file
from flux_db.data.pixels import load_rgb
from flux_db.errors import UserError
from flux_db.output_folder import SCORES
from flux_db.run.record import read_run
from flux_db.run.sample_files import SampleFile, read_folder
from flux_db.score.judged import Sample, Scores, Subject, score
from flux_db.settings.derived import replace_trigger

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


@dataclass(frozen=True)
class ScoredRound:
    step: int | None
    """None for a folder of samples, which are of no step."""
    samples: int
    scores: Scores


def score_run(folder: Path) -> list[ScoredRound]:
    """Score every round of samples of a run and store the result in its output folder, where the report finds it."""
    run = read_run(folder)
    if not run.rounds:
        raise UserError(f"{folder}: no samples in it; train with --validation_prompt, or give a folder of pictures")
    pictures = run.settings.get("instance_data_dir")
    if not pictures or not Path(str(pictures)).is_dir():
        raise UserError(f"{folder}: its training pictures are gone ({pictures}); give them with --instance_data_dir")
    word = run.settings.get("trigger_word")
    prompt = replace_trigger(str(run.settings.get("instance_prompt", "")), None if word is None else str(word))
    subject = Subject(prompt, read_pictures(Path(str(pictures))))
    first = read_samples(run.rounds[0].pictures)
    rounds = []
    for round_ in run.rounds:
        samples = read_samples(round_.pictures)
        rounds.append(ScoredRound(round_.step, len(samples), score(samples, subject, first)))
    rows = [{"step": r.step, "samples": r.samples, **r.scores.as_dict()} for r in rounds]
    content = {"schema": 1, "by": "judge", "subject": subject.name, "rounds": rows}
    write_file(folder / SCORES, (json.dumps(content, indent=2) + "\n").encode())
    return rounds


def score_folder(folder: Path, pictures: Path, instance_prompt: str) -> ScoredRound:
    """Score pictures that `generate` drew: each PNG file holds its prompt."""
    samples = read_samples(read_folder(folder))
    if not samples:
        raise UserError(f"{folder}: no PNG file in it")
    if nameless := [file.path.name for file in read_folder(folder) if not file.prompt]:
        raise UserError(f"{folder}: {nameless[0]} does not hold its prompt; `generate` writes it into its pictures")
    subject = Subject(instance_prompt, read_pictures(pictures))
    return ScoredRound(None, len(samples), score(samples, subject))


def read_samples(files: tuple[SampleFile, ...]) -> list[Sample]:
    return [Sample(file.prompt, file.number, Image.open(file.path).convert("RGB")) for file in files]


def read_pictures(folder: Path) -> list[Image.Image]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    if not paths:
        raise UserError(f"{folder}: no pictures in it")
    return [load_rgb(path) for path in paths]


COLUMNS = {
    "subject": "subject",
    "prompt": "prompt",
    "class_prompt": "class prompt",
    "class_subject": "subject in class",
    "class_change": "class change",
    "diversity": "diversity",
    "copies": "copies",
    "nearest": "nearest",
}


def as_table(rounds: list[ScoredRound]) -> str:
    """Lines for the terminal."""
    head = ["step", "samples", *COLUMNS.values()]
    rows = []
    for round_ in rounds:
        values = round_.scores.as_dict()
        cells = ["-" if values[name] is None else f"{values[name]:.3f}" for name in COLUMNS]
        rows.append(["-" if round_.step is None else str(round_.step), str(round_.samples), *cells])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    )
