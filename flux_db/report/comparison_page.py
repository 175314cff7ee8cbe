"""Several runs on one page: their curves over each other, what differs in their settings, their last samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
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
from flux_db.run.sample_files import Round, columns

# As many as there are distinguishable colours.
MOST_RUNS = 6
MOST_SAMPLES = 16
WIDEST_SAMPLE = 260
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
    """A row for each sample and a column for each run, so that the same prompt and noise stand side by side."""
    last = [run.rounds[-1] if run.rounds else None for run in runs]
    shown = _chosen([round_ for round_ in last if round_])
    if not shown:
        return ""
    found = [{(p.title, p.number): p.path for p in round_.pictures} if round_ else {} for round_ in last]
    uris = iter(data_uris([files[key] for key in shown for files in found if key in files], BUDGET))
    steps = (f"step {round_.step}" if round_ else "no samples" for round_ in last)
    cells = [
        f'<h3>{escape(name)} <span class="note">{step}</span></h3>' for name, step in zip(names, steps, strict=True)
    ]
    for title, keys in groupby(shown, key=lambda key: key[0]):
        cells.append(f'<p class="prompt">{escape(title)}</p>')
        cells += [
            picture(next(uris), f"{name}: {title}") if key in files else "<span></span>"
            for key in keys
            for name, files in zip(names, found, strict=True)
        ]
    style = f"grid-template-columns: repeat({len(runs)}, minmax(110px, {WIDEST_SAMPLE}px))"
    return f'<div class="scroll"><div class="pictures compared" style="{style}">{"".join(cells)}</div></div>'


def _chosen(rounds: list[Round]) -> list[tuple[str, int]]:
    """(title, number) of the samples to show, by prompts; of too many, one of each prompt before a second of any."""
    known = columns(rounds)
    chosen = sorted(known, key=lambda key: key[1])[:MOST_SAMPLES]
    titles = list(dict.fromkeys(title for title, _ in known))
    return sorted(chosen, key=lambda key: (titles.index(key[0]), key[1]))


def differences(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    settings = [public(run.settings) for run in runs]
    known = [name for name in dict.fromkeys(n for s in settings for n in s) if name not in PLACES]
    rows = [
        [name, *(shown_value(s.get(name)) for s in settings)]
        for name in known
        if any(s.get(name) != settings[0].get(name) for s in settings)
    ]
    return table(["Setting", *names], rows) if rows else "<p>All settings are the same.</p>"
