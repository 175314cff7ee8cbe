"""Line charts as SVG: pure functions from numbers to text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

# Of a chart, in units of its own: about the pixels that it has on a phone.
WIDTH, HEIGHT = 420, 200
TOP, BOTTOM, RIGHT = 10, 24, 12
MOST_POINTS = 600


@dataclass(frozen=True, kw_only=True)
class Series:
    label: str
    points: Sequence[Point]
    """Finite numbers, in order of x."""
    colour: int = 0
    """Number of a colour of the page."""
    kind: str = "line"
    """line, faint (raw data behind a smoothed line) or dots (a line with its few points marked)."""


# --- numbers -----------------------------------------------------------------------------------------------------


def smoothed(points: Sequence[Point]) -> list[Point]:
    """A running mean that forgets: over about a twentieth of the points, and over no fewer than five."""
    keep = 1.0 - 1.0 / max(5.0, len(points) / 20)
    total = weight = 0.0
    result = []
    for x, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        result.append((x, total / weight))
    return result


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points; of each stretch the lowest and the highest stay, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    inner, buckets = points[1:-1], (most - 2) // 2
    kept = [points[0]]
    for i in range(buckets):
        stretch = inner[i * len(inner) // buckets : (i + 1) * len(inner) // buckets]
        extremes = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(extremes)
    return [*kept, points[-1]]


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most so many round numbers from low to high."""
    if not high > low:
        return [low]
    power = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    for step in (power * m for m in (1, 2, 5, 10, 20, 50, 100)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [n * step for n in range(first, last + 1)]
    return [low]


def number(value: float, digits: int = 3) -> str:
    """Short: 0.123, 1.5e-4, 12000."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    if abs(value) >= 10**digits:
        return f"{value:.0f}"
    return f"{float(f'{value:.{digits}g}'):.10f}".rstrip("0").rstrip(".")


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of an axis, all with as many decimals as its step needs."""
    step = values[1] - values[0] if len(values) > 1 else 0.0
    largest = max(map(abs, values))
    if step == 0 or largest >= 1e6 or largest < 1e-2:
        return [number(value, 6) for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:.{decimals}f}" for value in values]


def value_range(series: Sequence[Series], *, from_zero: bool = False) -> tuple[float, float]:
    """What the y axis shows. Of long raw data one percent at each end may stick out: one spike must not flatten all."""
    lows, highs = [], []
    for one in series:
        values = sorted(y for _, y in one.points)
        cut = len(values) // 100 if one.kind == "faint" else 0
        lows.append(values[cut])
        highs.append(values[-1 - cut])
    low, high = min(lows), max(highs)
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    if from_zero:
        return min(0.0, low), high * 1.06 or 1.0
    return (max(0.0, low - pad) if low >= 0 else low - pad), high + pad


# --- drawing -----------------------------------------------------------------------------------------------------


def chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    note: str = "",
    legend: bool = False,
    from_zero: bool = False,
) -> str:
    """A figure with its title; the last value of each line is in the title's row. Empty without points."""
    series = [one for one in series if one.points]
    if not series:
        return ""
    named = [one for one in series if one.kind != "faint"]
    last = "" if legend else _value(named[0].points[-1][1], unit)
    words = "; ".join(
        f"{one.label}: from {_value(one.points[0][1], unit)} to {_value(one.points[-1][1], unit)}" for one in named
    )
    head = f'<span class="name">{escape(title)}</span> <span class="value">{escape(last)}</span>'
    if note:
        head += f' <span class="note">{escape(note)}</span>'
    return (
        f'<figure class="chart"><figcaption>{head}</figcaption>'
        f"{_legend(named) if legend else ''}{_svg(f'{title}. {words}', series, unit, from_zero)}</figure>"
    )


def _value(value: float, unit: str) -> str:
    return f"{number(value)}{' ' + unit if unit else ''}"


def _legend(series: Sequence[Series]) -> str:
    items = (
        f'<li><i class="c{one.colour}"></i>{escape(one.label)} <b>{number(one.points[-1][1])}</b></li>'
        for one in series
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _svg(description: str, series: Sequence[Series], unit: str, from_zero: bool) -> str:
    y_low, y_high = value_range(series, from_zero=from_zero)
    xs = [x for one in series for x, _ in one.points]
    x_low, x_high = min(xs), max(xs)
    y_ticks = ticks(y_low, y_high, 4)
    y_labels = tick_labels(y_ticks)
    left = 12 + 7.2 * max(map(len, y_labels))
    width, height = WIDTH - left - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return left + across * width, TOP + (1 - (y - y_low) / (y_high - y_low)) * height

    parts = []
    for y, label in zip(y_ticks, y_labels, strict=True):
        at = place(x_low, y)[1]
        parts.append(f'<line class="grid" x1="{left:.0f}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 6:.0f}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for x in ticks(x_low, x_high, 5):
        at = place(x, y_low)[0]
        anchor = "end" if at > WIDTH - RIGHT - 12 else "middle"
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{number(x, 6)}</text>')
    lines = "".join(_line(one, [place(x, y) for x, y in thinned(one.points)]) for one in series)
    clip = f"{left - 4:.0f} {TOP - 4} {width + 8:.0f} {height + 8}"
    box = 'x="{}" y="{}" width="{}" height="{}"'.format(*clip.split())
    # what a pointer needs to turn a place back into numbers
    scale = f'data-box="{left:.1f} {TOP} {width:.1f} {height}" data-x="{x_low:g} {x_high:g}"'
    scale += f' data-y="{y_low:.8g} {y_high:.8g}" data-unit="{escape(unit)}"'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description)}" {scale}>'
        f"<title>{escape(description)}</title>{''.join(parts)}"
        f'<svg {box} viewBox="{clip}">{lines}</svg></svg>'
    )


def _line(series: Series, places: Sequence[Point]) -> str:
    style = f"{series.kind} c{series.colour}"
    path = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(places))
    line = f'<path class="{style}" d="{path}"/>'
    if series.kind == "dots" or len(places) == 1:
        line += "".join(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places)
    return line
