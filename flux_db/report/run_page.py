"""`report.html`: a run on one page, in one file, made from the files of its output folder."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from flux_db import __version__
from flux_db.atomic import write_file
from flux_db.console import say
from flux_db.errors import describe
from flux_db.output_folder import LORA_FILE, REPORT
from flux_db.report import usage
from flux_db.report.charts import Series, chart, number, smoothed
from flux_db.report.memory_chart import memory_chart
from flux_db.report.page import escape, page, picture, section, table, tiles
from flux_db.report.thumbnails import data_uris, read_training_pictures
from flux_db.run.record import Point, RunRecord, read_run
from flux_db.run.sample_files import Round, spread
from flux_db.settings.concepts import replace_trigger
from flux_db.settings.schema import SECTIONS

# So much is shown, and so many characters the pictures may take: a report stays below 3 MB.
MOST_ROUNDS = 16
MOST_PER_ROUND = 12
SAMPLE_BUDGET = 1_900_000
TRAINING_BUDGET = 500_000
# As many as there are distinguishable colours.
MOST_CONCEPTS = 6
# While a run goes on its report is written every so many seconds, and a browser that shows it loads it again.
REPORT_SECONDS = 20.0
# The share of the run's time that this may take.
REPORT_SHARE = 0.02


def write_report(output: Path) -> None:
    """Write the run's report. A failure is reported and ends nothing: it is only a view of the other files."""
    try:
        write_file(output / REPORT, render(read_run(output)).encode())
    except Exception as problem:
        reason = describe(problem) if isinstance(problem, OSError) else f"{type(problem).__name__}: {problem}"
        say(f"warning: the report was not written: {reason}; python -m flux_db report {output} makes it again")


class LiveReport:
    """The report of a run that goes on: written again from time to time, for a small share of the run's time."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._due = time.monotonic() + REPORT_SECONDS

    def renew(self) -> bool:
        """Write the report if it is time; true if it was."""
        start = time.monotonic()
        if start < self._due:
            return False
        write_report(self.output)
        end = time.monotonic()
        self._due = end + max(REPORT_SECONDS, (end - start) / REPORT_SHARE)
        return True


def render(run: RunRecord) -> str:
    written = f"{run.state.time} · " if run.state else ""
    body = (
        header(run)
        + tiles(summary(run))
        + section("Samples", samples(run))
        + section("Scores of the samples", scores_table(run))
        + section("Curves", curves(run))
        + section("Memory on Ascend", memory_chart(run.settings) if _may_be_on_ascend(run) else "")
        + section("How to use the LoRA", how_to_use(run))
        + section("Settings", settings_tables(run.settings))
        + f"<footer>{escape(written)}flux_db {__version__}</footer>"
    )
    is_running = run.state is not None and run.state.status == "running"
    return page(run.name, body, reload_seconds=REPORT_SECONDS if is_running else None)


def _may_be_on_ascend(run: RunRecord) -> bool:
    """Not if it was on the CPU: a step on Ascend has the device's memory."""
    if run.steps:
        return bool(run.points("device_memory_mb"))
    return run.settings.get("device") != "CPU"


def concepts(run: RunRecord) -> list[dict[str, Any]]:
    """The entries of --concepts as config.yaml has them."""
    found = run.settings.get("concepts")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _prompts(run: RunRecord) -> list[str]:
    """The prompts of all concepts."""
    entries = concepts(run) or [
        {"prompt": run.settings.get("instance_prompt") or "", "trigger": run.settings.get("trigger_word")}
    ]
    words = [(str(entry.get("prompt", "")), entry.get("trigger")) for entry in entries]
    return [replace_trigger(text, None if word is None else str(word)) for text, word in words]


def _prompt(run: RunRecord) -> str:
    return _prompts(run)[0]


# --- head --------------------------------------------------------------------------------------------------------


def header(run: RunRecord) -> str:
    get = run.settings.get
    facts = [*_prompts(run)[:MOST_CONCEPTS], base_model(run.settings)]
    facts += [f"rank {get('rank')}", f"{get('resolution')} px"] if run.settings else []
    status = run.state.status if run.state else "unknown"
    text = f'<header><h1>{escape(run.name)}<span class="pill {escape(status)}">{escape(status)}</span></h1>'
    text += f'<p class="lead">{escape(" · ".join(fact for fact in facts if fact))}</p>'
    if run.state and run.state.message:
        text += f'<p class="message">{escape(run.state.message)}</p>'
    return text + "</header>\n"


def base_model(settings: dict[str, Any]) -> str:
    """The model's name without the path that it had on this machine."""
    name = str(settings.get("pretrained_model_name_or_path", ""))
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/")) and not os.path.exists(name)
    return name if is_hub_name else name.rstrip("/").rsplit("/", 1)[-1]


def summary(run: RunRecord) -> list[tuple[str, str, str]]:
    """The figures that one looks for first: name, value, small print."""
    if not run.steps:
        return [("Steps", "0", "no metrics yet")]
    last = run.steps[-1]
    total = run.settings.get("max_train_steps")
    entries = [("Steps", f"{last['step']}", f"of {total}" if total and total != last["step"] else "")]
    if loss := run.points("loss"):
        first, now = smoothed(loss[:5])[-1][1], smoothed(loss)[-1][1]
        entries.append(("Loss", number(now), f"smoothed; at first {number(first)}"))
    if best := run.best:
        entries.append(("Validation loss", number(best[1]), f"lowest, at step {best[0]:.0f}"))
    if scores := [point for point in score_points(run) if point[0] > 0]:
        best = max(scores, key=lambda point: point[1])
        entries.append(("Score", number(best[1]), f"highest, at step {best[0]:.0f}"))
    if seconds := run.points("seconds"):
        entries.append(("Step time", f"{number(statistics.median(y for _, y in seconds))} s", "median"))
    skipped = last.get("skipped", 0)
    entries.append(("Skipped steps", str(skipped), "gradients not finite" if skipped else ""))
    for key, name in (("memory_mb", "Memory"), ("device_memory_mb", "Device memory")):
        if memory := run.points(key):
            entries.append((name, _size(max(y for _, y in memory) * 1e6), "at most"))
    file = run.folder / LORA_FILE
    if file.is_file():
        entries.append(("LoRA file", _size(file.stat().st_size), ""))
    return entries


def _size(size: float) -> str:
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")) if size >= u or u == 1)
    return f"{number(size / unit)} {name}"


# --- curves ------------------------------------------------------------------------------------------------------


def curves(run: RunRecord) -> str:
    skipped = any(y for _, y in run.points("skipped"))
    charts = [
        _noisy(run, "Loss", "loss"),
        _by_concept(run, "Loss by concept", "loss_by_concept", smoothed, note="smoothed"),
        _plain(run, "Validation loss", "validation_loss", colour=1, kind="dots"),
        _by_concept(run, "Validation loss by concept", "validation_loss_by_concept", list, kind="dots"),
        chart("Score of the samples", [Series(label="score", points=score_points(run), colour=1, kind="dots")]),
        _noisy(run, "Gradient norm", "grad_norm"),
        _plain(run, "Learning rate", "lr"),
        _plain(run, "Learning rate, text encoder", "text_encoder_lr"),
        _noisy(run, "Step time", "seconds", unit="s", from_zero=True),
        _plain(run, "Skipped steps, in all", "skipped", colour=1) if skipped else "",
        _plain(run, "Memory", "memory_mb", unit="MB", note="of the process", from_zero=True),
        _plain(run, "Device memory", "device_memory_mb", unit="MB", note="largest so far", from_zero=True),
        _plain(run, "Loss scale", "loss_scale"),
    ]
    found = "".join(charts)
    if not found:
        return "<p>No steps yet.</p>"
    hint = "Over optimizer steps. Point at a chart for its values."
    return f'<div class="charts">{found}</div><p class="note">{hint}</p>'


def _noisy(run: RunRecord, title: str, key: str, **more: Any) -> str:
    raw = run.points(key)
    series = [Series(label="raw", points=raw, kind="faint"), Series(label=title.lower(), points=smoothed(raw))]
    return chart(title, series, note="smoothed", **more)


def _by_concept(
    run: RunRecord, title: str, key: str, shape: Callable[[list[Point]], list[Point]], kind: str = "line", **more: Any
) -> str:
    """A line for each concept; empty unless there are several."""
    found = list(run.points_by_name(key).items())
    series = [
        Series(label=name, points=shape(points), colour=colour, kind=kind)
        for colour, (name, points) in enumerate(found[:MOST_CONCEPTS])
    ]
    return chart(title, series, legend=True, **more)


def _plain(run: RunRecord, title: str, key: str, colour: int = 0, kind: str = "line", **more: Any) -> str:
    return chart(title, [Series(label=title.lower(), points=run.points(key), colour=colour, kind=kind)], **more)


SCORES = {
    "score": "Score",
    "dino": "DINO",
    "clip_i": "CLIP-I",
    "clip_t": "CLIP-T",
    "pres": "PRES",
    "div": "DIV",
    "subject": "Subject",
    "likeness": "Likeness",
    "prompt": "Prompt followed",
    "class_prompt": "Prompt followed, class",
    "class_subject": "Subject in the class",
    "class_change": "Change of the class",
    "diversity": "Diversity",
    "nearest_likeness": "Most alike",
    "copies": "Copies",
}
SCORE_HINTS = {
    "score": "The score is the geometric mean of how well samples show the subject (DINO; CLIP-I without it; by the "
    "judge: subject) and follow their prompts (CLIP-T; by the judge: prompt followed).",
    "dino": "DINO, CLIP-I: cosine of samples of the subject and training pictures; higher is better.",
    "clip_t": "CLIP-T: cosine of a sample and its prompt without the subject's word; higher is better.",
    "pres": "PRES: cosine of samples of the class and training pictures; lower is better.",
    "div": "DIV: 1 - cosine of DINOv2's features among samples of one prompt; the DreamBooth paper takes LPIPS.",
    "subject": "Subject and prompt: 1 is best; subject in the class: 0 is best.",
    "likeness": "Likeness: cosine of the judge's features, samples of the subject and training pictures; 1 is best.",
    "class_change": "Change of the class, copies: 0 is best.",
    "nearest_likeness": "Most alike: cosine of a sample and the training picture most like it.",
}


def scores_table(run: RunRecord) -> str:
    """A line for each round of samples that was scored."""
    there = {round_.step for round_ in run.rounds}
    scored = [row for row in run.scores if row["step"] in there]
    if not scored:
        return ""
    shown = [name for name in SCORES if any(_score(row.get(name)) != "-" for row in scored)]
    rows = [[f"{row['step']:.0f}", *(_score(row.get(name)) for name in shown)] for row in scored]
    hint = " ".join(text for name, text in SCORE_HINTS.items() if name in shown)
    return table(["Step", *(SCORES[name] for name in shown)], rows) + f'<p class="note">{escape(hint)}</p>'


def _score(value: object) -> str:
    return f"{value:.3f}" if _is_score(value) else "-"


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1 <= value <= 2


def score_points(run: RunRecord) -> list[Point]:
    """(step, score) of every round that was scored."""
    return [(float(row["step"]), float(row["score"])) for row in run.scores if _is_score(row.get("score"))]


# --- pictures ----------------------------------------------------------------------------------------------------


def samples(run: RunRecord) -> str:
    """The samples, and beside them what they should look like."""
    rounds, training = timeline(list(run.rounds)), training_pictures(run.folder)
    if training:
        training = f"<aside><h3>Training pictures, as the model saw them</h3>{training}</aside>"
    return f'<div class="with-training">{rounds}{training}</div>' if rounds and training else rounds + training


def timeline(rounds: list[Round]) -> str:
    """Every round readable one below the other; the script shows one at a time and a slider to move between them."""
    if not rounds:
        return ""
    shown = spread(rounds, MOST_ROUNDS)
    uris = iter(data_uris([p.path for round_ in shown for p in round_.pictures[:MOST_PER_ROUND]], SAMPLE_BUDGET))
    parts = []
    for round_ in shown:
        text = f"<h3>Step {round_.step}</h3>"
        for prompt, files in groupby(round_.pictures[:MOST_PER_ROUND], key=lambda file: file.title):
            images = (picture(next(uris), f"Sample at step {round_.step}: {prompt}") for _ in files)
            text += f'<p class="prompt">{escape(prompt)}</p><div class="pictures">{"".join(images)}</div>'
        parts.append(f'<article class="round">{text}</article>')
    slider = (
        '<div class="slider"><output>Step</output>'
        f'<input type="range" min="0" max="{len(shown) - 1}" value="{len(shown) - 1}" aria-label="Step of the samples">'
        '<button type="button">All steps</button></div>'
    )
    return f'<div class="rounds">{slider}{"".join(parts)}</div>{_left_out(rounds, shown)}'


def _left_out(rounds: list[Round], shown: list[Round]) -> str:
    notes = []
    if len(shown) < len(rounds):
        notes.append(f"{len(shown)} of {len(rounds)} rounds are shown")
    most = max(len(round_.pictures) for round_ in shown)
    if most > MOST_PER_ROUND:
        notes.append(f"{MOST_PER_ROUND} of {most} pictures of a round are shown")
    return f'<p class="note">{"; ".join(notes)}. All are in the folder samples.</p>' if notes else ""


def training_pictures(output: Path) -> str:
    found = read_training_pictures(output)
    if not found or not found.pictures:
        return ""
    uris = data_uris([found.folder / p.file for p in found.pictures], TRAINING_BUDGET)
    images = (
        picture(uri, f"Training picture {p.name}", f"{escape(p.caption)}<span>{escape(p.name)}</span>")
        for uri, p in zip(uris, found.pictures, strict=True)
    )
    count = f"{len(found.pictures)} of {found.total} pictures." if found.total > len(found.pictures) else ""
    return f'<div class="pictures training">{"".join(images)}</div><p class="note">{count}</p>'


# --- words -------------------------------------------------------------------------------------------------------


def how_to_use(run: RunRecord) -> str:
    name = base_model(run.settings) or "black-forest-labs/FLUX.1-dev"
    model = name if "/" in name else f"path/to/{name}"
    prompt = _prompt(run) or "a photo of sks dog"
    code = {
        "flux-db": usage.command(str(run.settings.get("output_dir") or run.name), prompt, "pictures"),
        "diffusers": usage.diffusers(run.settings, model, run.name, prompt),
        "mindone (MindSpore)": usage.mindone(run.settings, model, run.name, prompt),
    }
    comfy = (
        f"Copy <code>{LORA_FILE}</code> to <code>ComfyUI/models/loras</code>, add a <b>LoraLoaderModelOnly</b> node "
        "after the FLUX model, and choose the file there with strength 1."
    )
    return (
        f"<p>The prompt names the subject as it was trained: <b>{escape(prompt)}</b></p>"
        + "".join(f"<h3>{name}</h3><pre>{escape(text)}</pre>" for name, text in code.items())
        + f"<h3>ComfyUI</h3><p>{comfy}</p>"
    )


def defaults() -> dict[str, Any]:
    """Default of every setting that has one."""
    fields = [field for cls in SECTIONS.values() for field in dataclasses.fields(cls)]
    return {
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default
        for field in fields
        if field.default is not dataclasses.MISSING
    }


def public(settings: dict[str, Any]) -> dict[str, Any]:
    """Without secrets, which a config.yaml written by hand may hold."""
    return {name: value for name, value in settings.items() if not name.endswith("token")}


def settings_tables(settings: dict[str, Any]) -> str:
    """What was changed first; the rest folded away."""
    usual, shown = defaults(), public(settings)
    if not shown:
        return ""
    changed = [
        [n, shown_value(v), shown_value(usual.get(n))] for n, v in shown.items() if n not in usual or usual[n] != v
    ]
    others = [[n, shown_value(v)] for n, v in shown.items() if n in usual and usual[n] == v]
    folded = f"<summary>{len(others)} settings at their defaults</summary>{table(['Setting', 'Value'], others)}"
    return table(["Setting", "Value", "Default"], changed) + f"<details>{folded}</details>"


def shown_value(value: Any) -> str:
    """A setting as people write it."""
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(shown_value, value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shown_value(item)}" for name, item in value.items()) + "}"
    return number(value) if isinstance(value, float) else str(value)
