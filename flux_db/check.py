"""What a run would do, told before it starts: pictures, problems, duplicates, steps, and a contact sheet."""

from __future__ import annotations

import collections
import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from flux_db import contact_sheet, images
from flux_db.atomic import write_file
from flux_db.cli import read_config
from flux_db.config import Config, background, global_batch, has_trigger, total_steps
from flux_db.dataset import Dataset, Sample, Survey, read_dataset, survey
from flux_db.errors import UserError
from flux_db.preflight import check, check_files

SHEET_NAME = "contact_sheet.png"
TABLE_NAME = "pictures.csv"
# Rows of the table on the terminal: the first ones, and those with warnings. The file has all of them.
FIRST_ROWS = 20
MOST_ROWS = 100
NAME_WIDTH = 32
CAPTION_WIDTH = 56


def run(argv: Sequence[str]) -> int:
    """Tell what a run with these flags would do; raises all problems at once if it could not train."""
    surveys: list[Survey] = []

    def look(config: Config) -> list[str]:
        surveys.append(survey(config))
        return surveys[-1].problems

    config, faults = read_config(argv, checks=(check,))
    _, problems = read_config(argv, checks=(check, check_files, look))
    seen = surveys[-1]
    # With faulty settings there is no telling what the run would be.
    if not faults and seen.subject is not None and seen.subject.pictures:
        dataset, warnings = read_dataset(config, seen.subject)
        print(*map(printable, report(config, seen, dataset, warnings)), sep="\n")
        problems += _write_files(config, seen, dataset)
    if problems:
        raise UserError(problems)
    print("\nNo problems: the run can start.")
    return 0


def size_of(sample: Sample, config: Config) -> tuple[int, int]:
    """Height and width at which the model sees a sample."""
    return config.data.resolution, config.data.resolution


# --- the text ----------------------------------------------------------------------------------------------------


def report(config: Config, seen: Survey, dataset: Dataset, warnings: Sequence[str]) -> Iterator[str]:
    """The lines that are printed, except for the problems."""
    folder, samples = seen.found.folder, _one_each(dataset)
    yield f"Pictures: {len(samples)} in {folder}; {len(seen.found.ignored)} other files left alone"
    yield "Sizes are width x height; the bucket is what the model sees."
    yield ""
    yield from _table(config, folder, samples)
    of_pictures = {f"{s.picture.path}: {w}" for s in samples for w in s.picture.warnings}
    general = [warning for warning in warnings if warning not in of_pictures]
    if config.data.trigger_word and not _uses_trigger(config, seen):
        general.append(f"--trigger_word {config.data.trigger_word}: no caption and no prompt holds {{trigger}}")
    yield ""
    yield f"Warnings: {_count_warnings(samples)}"
    yield from (f"  {warning}" for warning in general)
    yield ""
    yield from _plan(config, dataset, samples)


def _one_each(dataset: Dataset) -> list[Sample]:
    """The samples of the subject, without their repeats."""
    return list({sample.picture.path: sample for sample in dataset.samples}.values())


def _table(config: Config, folder: Path, samples: Sequence[Sample]) -> Iterator[str]:
    shown = [n for n, s in enumerate(samples) if n < FIRST_ROWS or s.picture.warnings][:MOST_ROWS]
    head = ("file", "size", "bucket", "caption")
    rows = {n: _row(samples[n], folder, config) for n in shown}
    widths = [max(len(row[i]) for row in (head, *rows.values())) for i in range(3)]
    for number, row in [(None, head), *rows.items()]:
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(row, [*widths, 0], strict=True))
        if number is not None:
            yield from (f"      ! {warning}" for warning in _warnings(samples[number], folder))
    if len(shown) < len(samples):
        yield f"  ... and {len(samples) - len(shown)} more: all are in {Path(config.output.output_dir, TABLE_NAME)}"


def _row(sample: Sample, folder: Path, config: Config) -> tuple[str, str, str, str]:
    sizes = _size(sample.picture.size), _size(size_of(sample, config)[::-1])
    return _cut(_name(sample, folder), NAME_WIDTH), *sizes, _cut(sample.prompt, CAPTION_WIDTH)


def printable(text: str) -> str:
    """File names may hold anything: line breaks, bytes that are no text."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _name(sample: Sample, folder: Path) -> str:
    return sample.picture.path.relative_to(folder).as_posix()


def _warnings(sample: Sample, folder: Path) -> list[str]:
    """Paths in them relative, as they are in the table."""
    return [warning.replace(f"{folder}{os.sep}", "") for warning in sample.picture.warnings]


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _count_warnings(samples: Sequence[Sample]) -> str:
    texts = [warning for sample in samples for warning in sample.picture.warnings]
    kinds = {images.SAME: "exact duplicates", images.ALIKE: "near duplicates", images.SMALL: "scaled up"}
    counts = collections.Counter(
        next((kind for mark, kind in kinds.items() if mark in text), "with an empty caption") for text in texts
    )
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def _uses_trigger(config: Config, seen: Survey) -> bool:
    captions = [source.caption or "" for source in seen.found.sources]
    return any(map(has_trigger, [config.data.instance_prompt, *config.validation.validation_prompt, *captions]))


def _plan(config: Config, dataset: Dataset, samples: Sequence[Sample]) -> Iterator[str]:
    cards, optim, data = number_of_cards(), config.optim, config.data
    batch, count = global_batch(config, cards), len(dataset.samples)
    steps = total_steps(config, count, batch)
    least, most = times_seen(count, data.repeats, steps * batch)
    sizes = collections.Counter(size_of(sample, config)[::-1] for sample in samples)
    yield "Training"
    parts = f"{optim.train_batch_size} x {optim.gradient_accumulation_steps} accumulated x {cards} cards"
    yield f"  batch              {parts} = {batch}"
    if config.runtime.distributed and cards == 1:
        yield "                     counted for one card: with more, the batch grows and an epoch has fewer steps"
    yield f"  samples per epoch  {count}: {len(samples)} pictures, each {data.repeats} times"
    yield f"  steps              {count / batch:g} per epoch, {steps} in all"
    yield f"  epochs             {steps * batch / count:g}"
    yield f"  each picture       is seen {least if least == most else f'{least} to {most}'} times"
    yield f"  graphs             {len(sizes)} to compile: " + ", ".join(
        f"{_size(size)} for {number} pictures" for size, number in sizes.items()
    )
    if data.with_prior_preservation:
        have = len(dataset.class_samples)
        yield f"  class pictures     {have} of {data.num_class_images} are there; " + (
            "the rest is drawn first" if have < data.num_class_images else "none need be drawn"
        )


def number_of_cards() -> int:
    """As msrun tells its processes; 1 without it."""
    return int(os.environ.get("MS_WORKER_NUM", "1"))


def times_seen(samples: int, repeats: int, draws: int) -> tuple[int, int]:
    """How often a picture is drawn at least and at most, if each stands `repeats` times among the samples."""
    rounds, rest = divmod(draws, samples)
    return rounds * repeats + max(0, rest - (samples - repeats)), rounds * repeats + min(rest, repeats)


# --- the files ---------------------------------------------------------------------------------------------------


def _write_files(config: Config, seen: Survey, dataset: Dataset) -> list[str]:
    """Contact sheet and table; the problems there were with them."""
    output, folder, samples = Path(config.output.output_dir), seen.found.folder, _one_each(dataset)
    buffer = io.BytesIO()
    sheet(config, folder, samples).save(buffer, "PNG")
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_file(output / SHEET_NAME, buffer.getvalue())
        write_file(output / TABLE_NAME, table_file(config, folder, samples))
    except OSError as error:
        return [f"--output_dir {output}: cannot be written ({error.strerror or error})"]
    print(f"\nContact sheet: {output / SHEET_NAME}\nTable:         {output / TABLE_NAME}")
    return []


def sheet(config: Config, folder: Path, samples: Sequence[Sample]):
    """The contact sheet. Of very many pictures those with warnings come first."""
    data = config.data
    order = samples
    if len(samples) > contact_sheet.MOST_CELLS:
        order = sorted(samples, key=lambda s: not s.picture.warnings)
    cells = [
        contact_sheet.Cell(
            path=s.picture.path,
            size=size_of(s, config),
            crop=s.crop,
            name=printable(_name(s, folder)),
            note=f"{_size(s.picture.size)} to {_size(size_of(s, config)[::-1])}",
            caption=printable(s.prompt),
            warnings=tuple(map(printable, _warnings(s, folder))),
        )
        for s in order[: contact_sheet.MOST_CELLS]
    ]
    title = f"{len(cells)} of {len(samples)} pictures of {folder}, cropped as the model sees them"
    if not (data.cache_latents or data.center_crop):
        title += " (an example: the crop is drawn anew at every step)"
    return contact_sheet.draw(cells, title, background(config))


def table_file(config: Config, folder: Path, samples: Sequence[Sample]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["file_name", "width", "height", "bucket_width", "bucket_height", "caption", "warnings"])
    for s in samples:
        bucket = size_of(s, config)[::-1]
        writer.writerow([_name(s, folder), *s.picture.size, *bucket, s.prompt, "; ".join(_warnings(s, folder))])
    return text.getvalue().encode("utf-8", "surrogateescape")
