"""The scores of a run, round by round, or of a folder of samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flux_db.atomic import write_file
from flux_db.console import say
from flux_db.errors import UserError
from flux_db.output_folder import SCORES
from flux_db.run.record import read_run
from flux_db.run.sample_files import SampleFile, read_folder
from flux_db.score.samples import pictures_in, read_pictures, read_samples
from flux_db.score.scorer import Folders, Scorer, Scores, by_features, by_judge
from flux_db.settings.concepts import comparable, replace_trigger
from flux_db.settings.subject_word import subject_word
from flux_db.size import Size

DEFAULT_PROMPT = "a photo of sks dog"

# The judge looks at 64 px, and so draws the small model; beyond this side samples are of another model.
LARGEST_DRAWING = 128
NETWORKS = "give --dino facebook/dinov2-base and --clip openai/clip-vit-large-patch14, which measure any subject"


@dataclass(frozen=True)
class ScoredRound:
    step: int | None
    """None for a folder of samples, which are of no step."""
    samples: int
    scores: Scores


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the command line says about the subject; of a run, its settings say the rest."""

    pictures: Path | None = None
    prompt: str | None = None
    trigger_word: str | None = None


def score_run(folder: Path, given: Given, folders: Folders) -> list[ScoredRound]:
    """Score every round of samples of a run and store the result in its output folder, where the report finds it."""
    run = read_run(folder)
    if not run.rounds:
        raise UserError(f"{folder}: no samples in it; train with --validation_prompt, or give a folder of pictures")
    settings = comparable(run.settings)  # a list of one concept as its flags
    if settings.get("concepts") and not (given.pictures and given.prompt):
        raise UserError(
            f"{folder}: trained several concepts; name one of them with --instance_data_dir and --instance_prompt"
        )
    pictures = given.pictures or _text(settings, "instance_data_dir")
    if not pictures or not Path(pictures).is_dir():
        raise UserError(f"{folder}: its training pictures are gone ({pictures}); give them with --instance_data_dir")
    word = given.trigger_word or _text(settings, "trigger_word")
    prompt = replace_trigger(given.prompt or _text(settings, "instance_prompt") or "", word)
    files = [file for round_ in run.rounds for file in round_.pictures]
    scorer = _open(prompt, word, _text(settings, "class_prompt"), Path(pictures), folders, files)
    first = read_samples(run.rounds[0].pictures)
    rounds = []
    for round_ in run.rounds:
        samples = read_samples(round_.pictures)
        rounds.append(ScoredRound(round_.step, len(samples), scorer.score(samples, first)))
    rows = [{"step": r.step, "samples": r.samples, **r.scores.as_dict()} for r in rounds]
    content = {"schema": 1, "by": scorer.by, "rounds": rows}
    write_file(folder / SCORES, (json.dumps(content, indent=2) + "\n").encode())
    return rounds


def score_folder(folder: Path, given: Given, folders: Folders) -> ScoredRound:
    """Score pictures that `generate` drew: each PNG file holds its prompt."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if given.pictures is None:
        raise UserError(f"{folder}: no run in it; for a folder of pictures give --instance_data_dir as well")
    found = read_folder(folder)
    if not found:
        raise UserError(f"{folder}: no PNG file in it")
    if nameless := [file.path.name for file in found if not file.prompt]:
        raise UserError(f"{folder}: {nameless[0]} does not hold its prompt; `generate` writes it into its pictures")
    prompt = replace_trigger(given.prompt or DEFAULT_PROMPT, given.trigger_word)
    scorer = _open(prompt, given.trigger_word, None, given.pictures, folders, found)
    samples = read_samples(found)
    return ScoredRound(None, len(samples), scorer.score(samples, ()))


def _open(
    prompt: str,
    trigger: str | None,
    class_prompt: str | None,
    pictures: Path,
    folders: Folders,
    files: Sequence[SampleFile],
) -> Scorer:
    """What scores; a UserError if none of the samples is of the subject, or if nothing here can judge them."""
    opened = open_scorer(prompt, trigger, class_prompt, lambda: read_pictures(pictures_in(pictures)), folders)
    if not any(opened.names_subject(file.prompt) for file in files):
        raise UserError(
            f'no sample is of the subject: no prompt has its word, which "{prompt}" names; give another '
            "--instance_prompt or --trigger_word, or draw the subject"
        )
    if opened.unmeasured:
        with Image.open(files[0].path) as sample:
            size = Size.of(sample)
        if max(size) > LARGEST_DRAWING:
            raise UserError(f"{opened.unmeasured}; it looks at 64 px, and the samples are of {size}: {NETWORKS}")
        text = "so subject and score are missing, and likeness is a rough measure by the judge's features"
        say(f"note: {opened.unmeasured}; {text}. For more {NETWORKS}")
    return opened


def open_scorer(
    prompt: str,
    trigger: str | None,
    class_prompt: str | None,
    read: Callable[[], list[Image.Image]],
    folders: Folders,
) -> Scorer:
    """The judge, or the networks of the folders; `read` gives the training pictures."""
    if not folders:
        return by_judge(prompt, read())
    word = subject_word(prompt, trigger, class_prompt)
    if word is None:
        raise UserError(no_word(prompt))
    return by_features(word, read(), folders)


def no_word(prompt: str) -> str:
    return f'instance prompt "{prompt}": no rare word in it, such as sks; name the subject\'s word with --trigger_word'


def _text(settings: Mapping[str, Any], name: str) -> str | None:
    value = settings.get(name)
    return None if value is None else str(value)


COLUMNS = {
    "score": "score",
    "dino": "DINO",
    "clip_i": "CLIP-I",
    "clip_t": "CLIP-T",
    "pres": "PRES",
    "div": "DIV",
    "subject": "subject",
    "likeness": "likeness",
    "prompt": "prompt",
    "class_prompt": "class prompt",
    "class_subject": "subject in class",
    "class_change": "class change",
    "diversity": "diversity",
    "nearest_likeness": "most alike",
    "copies": "copies",
    "nearest": "nearest",
}


def as_table(rounds: list[ScoredRound]) -> str:
    """Lines for the terminal."""
    shown = {name: text for name, text in COLUMNS.items() if name in rounds[0].scores.as_dict()}
    head = ["step", "samples", *shown.values()]
    rows = []
    for round_ in rounds:
        values = round_.scores.as_dict()
        # + 0.0: a difference of nothing may be -0
        cells = ["-" if values[name] is None else f"{round(values[name], 3) + 0.0:.3f}" for name in shown]
        rows.append(["-" if round_.step is None else str(round_.step), str(round_.samples), *cells])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    )
