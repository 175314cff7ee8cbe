"""The frame of a report: one HTML file with its style and script inside, readable without the script."""

from __future__ import annotations

import functools
import html
from importlib import resources

from flux_db.console import printable


def escape(text: object) -> str:
    """What may come from a file, for a page: neither HTML nor characters that cannot be seen."""
    return html.escape(printable(str(text), keep="\n\t"))


def page(title: str, body: str, reload_seconds: float | None = None) -> str:
    """`reload_seconds`: the file is written again meanwhile, and a browser loads it again by itself."""
    reload = f'<meta http-equiv="refresh" content="{reload_seconds:.0f}">\n' if reload_seconds else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{reload}"
        f"<title>{escape(title)}</title>\n<style>\n{_part('page.css')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>\n{_part('page.js')}</script>\n</body>\n</html>\n"
    )


@functools.cache
def _part(name: str) -> str:
    """A file beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def section(title: str, content: str) -> str:
    """Nothing without content."""
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>\n" if content else ""


def tiles(entries: list[tuple[str, str, str]]) -> str:
    """(name, value, small print) as a row of boxes."""
    boxes = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(small)}</small></dd></div>"
        for name, value, small in entries
    )
    return f'<dl class="tiles">{"".join(boxes)}</dl>\n'


def table(head: list[str], rows: list[list[str]]) -> str:
    """Long names of settings in the first column break after an underscore."""
    lines = ([escape(row[0]).replace("_", "_<wbr>"), *map(escape, row[1:])] for row in rows)
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table></div>\n'


def picture(uri: str, description: str, caption: str = "") -> str:
    """A figure; the caption is HTML already."""
    image = f'<img src="{uri}" alt="{escape(description)}" title="{escape(description)}" loading="lazy">'
    return f"<figure>{image}{f'<figcaption>{caption}</figcaption>' if caption else ''}</figure>"
