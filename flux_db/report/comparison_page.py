"""Several runs on one page: their curves over each other, what differs in their settings, their last samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flux_db import __version__
from flux_db.console import printable
from flux_db.errors import UserError
from flux_db.report.charts import Point, Series, chart, smoothed
from flux_db.report.page import escape, page, picture, section, table
from flux_db.report.run_page import public, shown_value, summary
from flux_db.report.thumbnails import data_uris
from flux_db.run.record import RunRecord

# As many as there are distinguishable colours.
MOST_RUNS = 6
MOST_SAMPLES = 4
BUDGET = 2_400_000

# Settings that say where a run lies, not what it is.
PLACES = {"output_dir", "logging_dir", "encode_cache_dir", "cache_dir", "resume_from_checkpoint"}


def render_comparison(runs: Sequence[RunRecord]) -> str:
    if len(runs) > MOST_RUNS:
        raise UserError(f"{len(runs)} runs are too many to compare on one page; give at most {MOST_RUNS}")
    names = distinct_names([run.folder for run in runs])
    body = (
        f"<header><h1>{len(runs)} runs</h1><p class='lead'>{escape(' · '.join(names))}</p></header>\n"
        + section("Results", results(runs, names))
        + section("Curves", curves(runs, names))
        + section("Last samples", last_samples(runs, names))
        + section("Settings that differ", differences(runs, names))
        + f"<footer>flux_db {__version__}</footer>"
    )
    return page(" · ".join(names), body)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, with as many parents as it takes to make them differ."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return list(map(printable, names))
    raise UserError("the same run is given twice; give each folder once")


def results(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    found = [{name: value for name, value, _ in summary(run)} for run in runs]
    heads = list(dict.fromkeys(name for entries in found for name in entries))
    states = ["Status", *(run.state.status if run.state else "unknown" for run in runs)]
    rows = [[head, *(entries.get(head, "-") for entries in found)] for head in heads]
    return table(["", *names], [states, *rows])


def curves(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    def overlaid(title: str, key: str, shape: Callable[[list[Point]], list[Point]], **more: Any) -> str:
        kind = more.pop("kind", "line")
        series = [
            Series(label=name, points=shape(run.points(key)), colour=colour, kind=kind)
            for colour, (name, run) in enumerate(zip(names, runs, strict=True))
        ]
        return chart(title, series, legend=True, **more)

    charts = [
        overlaid("Loss", "loss", smoothed, note="smoothed"),
        overlaid("Validation loss", "validation_loss", list, kind="dots"),
        overlaid("Gradient norm", "grad_norm", smoothed, note="smoothed"),
        overlaid("Learning rate", "lr", list),
        overlaid("Step time", "seconds", smoothed, unit="s", note="smoothed", from_zero=True),
        overlaid("Memory", "memory_mb", list, unit="MB", from_zero=True),
    ]
    found = "".join(charts)
    return f'<div class="charts">{found}</div>' if found else "<p>No steps yet.</p>"


def last_samples(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    # one of each prompt goes before a second of any
    ordered = [sorted(run.rounds[-1].pictures, key=lambda file: file.number) if run.rounds else [] for run in runs]
    shown = [files[:MOST_SAMPLES] for files in ordered]
    if not any(shown):
        return ""
    uris = iter(data_uris([file.path for files in shown for file in files], BUDGET))
    columns = []
    for name, run, files in zip(names, runs, shown, strict=True):
        images = [picture(next(uris), f"{name}: {file.title}", escape(file.title)) for file in files]
        step = f"step {run.rounds[-1].step}" if run.rounds else "no samples"
        head = f'<h3>{escape(name)} <span class="note">{step}</span></h3>'
        columns.append(f'<div>{head}<div class="pictures">{"".join(images)}</div></div>')
    return f'<div class="beside">{"".join(columns)}</div>'


def differences(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    settings = [public(run.settings) for run in runs]
    known = [name for name in dict.fromkeys(n for s in settings for n in s) if name not in PLACES]
    rows = [
        [name, *(shown_value(s.get(name)) for s in settings)]
        for name in known
        if any(s.get(name) != settings[0].get(name) for s in settings)
    ]
    return table(["Setting", *names], rows) if rows else "<p>All settings are the same.</p>"
