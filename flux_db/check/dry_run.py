"""What a run would do, printed before it starts: pictures, problems, duplicates, steps, and a contact sheet."""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from flux_db.atomic import write_file, write_png
from flux_db.check import contact_sheet, plan
from flux_db.check.device import check_device, describe_device
from flux_db.check.device_memory import device_line
from flux_db.check.everything import find_problems
from flux_db.check.hub_model import find_model
from flux_db.check.memory import memory_lines, memory_warnings
from flux_db.check.model import model_warnings
from flux_db.check.peer_notes import notes
from flux_db.check.subject import subject_warnings
from flux_db.check.values import check_values
from flux_db.check.values import warnings as setting_warnings
from flux_db.console import counted, printable, show
from flux_db.data.dataset import Dataset, Example, number_of_devices, preserved_prompts, read_dataset
from flux_db.data.selection import Subject, Survey
from flux_db.errors import UserError
from flux_db.output_folder import CONTACT_SHEET, PICTURE_TABLE
from flux_db.problem import Problem
from flux_db.settings.command_line import Check, Given
from flux_db.settings.concepts import has_trigger, setting_name
from flux_db.settings.derived import background, raw_sample_prompts
from flux_db.settings.schema import Config
from flux_db.size import Size
from flux_db.terminal import strong, width

# Rows of the table on the terminal: the first ones, and those with warnings. The file has all of them.
FIRST_ROWS = 20
MOST_ROWS = 100
NAME_WIDTH = 32
CAPTION_WIDTH, LEAST_CAPTION = 56, 16
# How a cell begins that a spreadsheet would compute.
FORMULA = ("=", "+", "-", "@")


@dataclass(frozen=True)
class Row:
    """A picture of the subject in the table."""

    example: Example
    name: str
    """Relative to the folder; of several concepts with the concept's name before it."""
    size: Size
    """Of the picture."""
    bucket: Size
    """What the model sees."""
    warnings: tuple[Problem, ...]


def run(given: Given, demand_resumable: Callable[[Config, Dataset], None] | None = None, *more: Check) -> int:
    """Print what a run with these settings would do; raises all problems at once if it could not train.

    `demand_resumable` raises a UserError if the run could not go on from its checkpoint. `more`: checks of the trainer
    that are not of this package.
    """
    config = given.config
    problems, seen = find_problems(given, *more)
    # With faulty settings nobody knows what the run would be.
    faulty = given.problems_by(check_values)
    dataset = None
    if not faulty and seen.subjects and all(subject.pictures for subject in seen.subjects):
        dataset, warnings = read_dataset(config, seen)
        if dataset.examples:  # none if all are held out, which is among the problems
            rows, general = _rows(config, seen, dataset, warnings)
            general += given.notes
            for line in _report(config, seen, dataset, rows, general, notes(given, dataset, number_of_devices())):
                show(line)
            if all(problem.flag != "output_dir" for problem in problems):
                problems += _write_files(config, seen.subjects, rows)
    if problems:
        raise UserError(problems)
    if dataset is not None and demand_resumable is not None:
        demand_resumable(config, dataset)
    for line in _machine(config):
        show(line)
    return 0


def _rows(config: Config, seen: Survey, dataset: Dataset, warnings: Sequence[Problem]) -> tuple[list[Row], list[str]]:
    """The rows of the table, and the warnings that are about none of them."""
    folders, examples = [subject.found.folder for subject in seen.subjects], plan.one_each(dataset)
    of_picture: dict[Path, list[Problem]] = {example.picture.path: [] for example in examples}
    general: list[str] = [*setting_warnings(config), *model_warnings(config), *memory_warnings(config)]
    general += subject_warnings(config, dataset)
    general += [warning for warning in warnings if warning.path not in of_picture]
    for warning in warnings:
        if warning.path in of_picture:
            short = warning.text
            for folder in folders:
                short = short.replace(f"{folder}{os.sep}", "")
            of_picture[warning.path].append(Problem(short, kind=warning.kind))
    general += [
        f"{setting_name(config, subject.concept, 'trigger')} {subject.concept.trigger}: no caption and no prompt holds"
        " {trigger}"
        for subject in seen.subjects
        if subject.concept.trigger and not _uses_trigger(config, subject)
    ]
    rows = [
        Row(
            example=example,
            name=_row_name(seen.subjects, example),
            size=example.picture.size,
            bucket=example.size,
            warnings=tuple(of_picture.pop(example.picture.path, ())),  # at the first of its sizes
        )
        for example in examples
    ]
    return rows, general


def _row_name(subjects: Sequence[Subject], example: Example) -> str:
    subject = subjects[example.concept]
    name = example.picture.path.relative_to(subject.found.folder).as_posix()
    return name if len(subjects) == 1 else f"{subject.concept.name}/{name}"


def _uses_trigger(config: Config, subject: Subject) -> bool:
    prompts = [subject.concept.raw_prompt, *(source.caption or "" for source in subject.found.sources)]
    with contextlib.suppress(UserError):  # a file that cannot be read is reported as a problem
        prompts += [line.text for line in raw_sample_prompts(config)]
    return any(map(has_trigger, prompts))


# --- the text ----------------------------------------------------------------------------------------------------


def _report(
    config: Config,
    seen: Survey,
    dataset: Dataset,
    rows: Sequence[Row],
    general: Sequence[str],
    notes: Sequence[str],
) -> Iterator[str]:
    """The lines that are printed, except for the problems."""
    for number, subject in enumerate(seen.subjects):
        own = {row.example.picture.path for row in rows if row.example.concept == number}
        yield f"Pictures: {len(own)} in {subject.found.folder}"
    yield "Sizes are width x height; the bucket is what the model sees."
    yield ""
    yield from _table(config, rows)
    yield ""
    if config.data.concepts:
        yield from _concept_table(config, dataset)
        yield ""
    yield f"Warnings: {_count_warnings(rows, general)}"
    yield from (f"  ! {warning}" for warning in general[:MOST_ROWS])
    if len(general) > MOST_ROWS:
        yield f"  ... and {len(general) - MOST_ROWS} more"
    yield ""
    if notes:
        yield from ("Beside diffusers' and mindone's scripts", *(f"  {line}" for line in notes), "")
    yield from _plan(config, dataset)


def _table(config: Config, rows: Sequence[Row]) -> Iterator[str]:
    shown = [row for number, row in enumerate(rows) if number < FIRST_ROWS or row.warnings][:MOST_ROWS]
    lines = [("file", "size", "bucket", "caption")]
    lines += [
        (_cut(printable(row.name), NAME_WIDTH), str(row.size), str(row.bucket), printable(row.example.prompt))
        for row in shown
    ]
    widths = [*(max(len(line[column]) for line in lines) for column in range(3)), 0]
    room = (width(sys.stdout) or math.inf) - sum(widths) - 4 * len("  ")
    lines = [(*line[:3], _cut(line[3], max(LEAST_CAPTION, min(CAPTION_WIDTH, room)))) for line in lines]
    for line, row in zip(lines, [None, *shown], strict=True):
        yield "  " + "  ".join(text.ljust(wide) for text, wide in zip(line, widths, strict=True))
        yield from (f"      ! {warning}" for warning in (row.warnings if row else ()))
    if len(shown) < len(rows):
        yield f"  ... and {len(rows) - len(shown)} more: all are in {Path(config.output.output_dir, PICTURE_TABLE)}"


def _concept_table(config: Config, dataset: Dataset) -> Iterator[str]:
    run = plan.make(config, dataset)
    lines = [("concept", "pictures", "repeats", "examples", "share", "seen", "weight", "sides", "prompt")]
    for own in run.concepts:
        concept = own.concept
        lines.append(
            (
                _cut(printable(concept.name), NAME_WIDTH),
                str(own.pictures),
                str(concept.repeats),
                str(own.examples),
                f"{100 * own.examples / run.examples:.3g} %",
                _span(own.seen),
                f"{concept.weight:g}",
                ",".join(map(str, concept.resolutions)),
                _cut(printable(concept.prompt), CAPTION_WIDTH),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    yield "Concepts (examples: in an epoch; seen: how often each picture is, in the whole run; weight: of the loss)"
    for line in lines:
        yield "  " + "  ".join(text.ljust(wide) for text, wide in zip(line, widths, strict=True)).rstrip()


def _span(values: tuple[int, int]) -> str:
    least, most = values
    return str(least) if least == most else f"{least} to {most}"


def _count_warnings(rows: Sequence[Row], general: Sequence[str]) -> str:
    counts = collections.Counter(warning.kind.value for row in rows for warning in row.warnings)
    if general:
        counts["in general"] = len(general)
    return ", ".join(f"{kind} {count}" for kind, count in counts.items()) or "none"


def _plan(config: Config, dataset: Dataset) -> Iterator[str]:
    run, optim, data = plan.make(config, dataset), config.optim, config.data
    sizes = [f"{size} (pictures: {count})" for size, count in run.sizes.items()]
    devices = counted(run.devices, "device")
    parts = f"{optim.train_batch_size} x {optim.gradient_accumulation_steps} accumulated x {devices}"
    repeats = _repeats(run)
    yield "Training"
    yield f"  batch              {parts} = {run.batch}"
    if config.runtime.distributed and run.devices == 1:
        yield "                     counted for one device: with more, the batch grows and an epoch has fewer steps"
    yield f"  examples per epoch {run.examples}{repeats}"
    yield f"  steps              {run.steps_per_epoch:.4g} per epoch, {strong(str(run.steps))} in all"
    yield f"  epochs             {strong(f'{run.epochs:.4g}')}"
    if (patience := config.validation.early_stop_patience) is not None:
        watched = "a higher score" if config.validation.keep_best == "score" else "a lower validation loss"
        rounds = "1 validation round" if patience == 1 else f"{patience} validation rounds"
        yield f"                     fewer after {rounds} without {watched}"
    if optim.max_train_minutes is not None:
        yield f"                     stopped after {optim.max_train_minutes:g} minutes with a checkpoint, to be resumed"
    yield f"  each picture       is seen {strong(_span(run.seen))} {'time' if run.seen == (1, 1) else 'times'}"
    yield f"  graphs             {len(sizes)} to compile: {', '.join(sizes)}"
    for number, line in enumerate(memory_lines(config)):
        yield f"  {'' if number else 'host memory':18} {line}"
    if (line := device_line(config, run.devices, list(run.sizes))) is not None:
        yield f"  device memory      {line}"
    if dataset.held_out:
        yield f"  held out           {counted(len(dataset.held_out), 'picture')}, of which only the loss is measured"
    if prompts := preserved_prompts(config, dataset):
        more = f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
        yield f"  preserved          the base model's answers to {printable(prompts[0])!r}{more}"
    if data.with_prior_preservation:
        missing = data.num_class_images - len(dataset.class_examples)
        yield f"  class pictures     {data.num_class_images}, of which {missing} are still to be drawn"


def _machine(config: Config) -> Iterator[str]:
    """Whether the device and the model are here. A run may be checked where it cannot start."""
    model = find_model(config)
    yield ""
    yield "This machine"
    yield f"  device             {describe_device(config)}"
    yield f"  model              {model.text}"
    yield ""
    if missing := [*check_device(config), *model.problems]:
        yield "No problems, but the run cannot start on this machine:"
        yield from (f"  {problem}" for problem in missing)
    else:
        yield "No problems: the run can start."


def _repeats(run: plan.Plan) -> str:
    if run.examples == run.pictures:
        return ""
    if len(run.concepts) == 1 and len(run.concepts[0].concept.resolutions) == 1:
        return f": {run.pictures} pictures, each {counted(run.concepts[0].concept.repeats, 'time')}"
    return f": {run.pictures} pictures with their repeats and sizes"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


# --- the files ---------------------------------------------------------------------------------------------------


def _write_files(config: Config, subjects: Sequence[Subject], rows: Sequence[Row]) -> list[Problem]:
    """Contact sheet and table; the problems there were with them."""
    output = Path(config.output.output_dir)
    sheet = _sheet(config, subjects, rows)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_png(output / CONTACT_SHEET, sheet)
        write_file(output / PICTURE_TABLE, _table_file(rows))
    except OSError as error:
        return [Problem(f"--output_dir {output}: cannot be written ({error.strerror or error})", flag="output_dir")]
    places = f"Contact sheet: {output / CONTACT_SHEET}", f"Table:         {output / PICTURE_TABLE}"
    print("", *map(printable, places), sep="\n")
    return []


def _sheet(config: Config, subjects: Sequence[Subject], rows: Sequence[Row]) -> Image.Image:
    """The contact sheet. Of very many pictures those with warnings come first."""
    data, most = config.data, contact_sheet.MOST_CELLS
    chosen = rows if len(rows) <= most else sorted(rows, key=lambda row: not row.warnings)[:most]
    cells = [
        contact_sheet.Cell(
            path=row.example.picture.path,
            size=row.bucket,
            crop=row.example.crop,
            name=printable(row.name),
            note=f"{row.size} to {row.bucket}",
            caption=printable(row.example.prompt),
            warnings=tuple(map(printable, row.warnings)),
        )
        for row in chosen
    ]
    folders = printable(", ".join(str(subject.found.folder) for subject in subjects))
    title = f"{len(cells)} of {len(rows)} pictures of {folders}, cropped as the model sees them"
    if not (data.cache_latents or data.center_crop):
        title += " (an example: the crop is drawn anew at every step)"
    return contact_sheet.draw(cells, title, background(config))


def _table_file(rows: Sequence[Row]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["file_name", "height", "width", "bucket_height", "bucket_width", "caption", "warnings"])
    for row in rows:
        caption, warnings = map(_harmless, (row.example.prompt, "; ".join(row.warnings)))
        writer.writerow([_harmless(row.name), *row.size, *row.bucket, caption, warnings])
    return text.getvalue().encode()


def _harmless(text: str) -> str:
    """A cell on one line that no spreadsheet takes for a formula."""
    text = printable(text)
    return f"'{text}" if text.startswith(FORMULA) else text
