"""Line charts: their points, thinned, and their values in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["number", "percent", "bytes", "watts", "si"]
Tone = Literal["error", "warning", "note", "good", "plain"]
Point = tuple[float, float | None]
"""Position and value; None if nothing finite was measured, which breaks the line."""
Curve = tuple[str, Sequence[Point], int]
"""Name, points and colour."""

LOG_FROM = 30.0
"""Values that span more than this factor are drawn on a logarithmic axis."""
BUCKETS = 400
"""Buckets of a drawn line; each keeps its lowest and highest point, so that every spike shows."""
LISTED = 10
"""Rows of the value table below a chart, for keyboards, screen readers and paper."""


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int
    look: Literal["line", "faint", "dots"] = "line"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A line chart, drawn by charts.js."""

    name: str
    """Stable, for links and tests."""
    title: str
    series: tuple[Series, ...]
    unit: Unit = "number"
    from_zero: bool = False
    log: bool = False
    note: str = ""
    wide: bool = False


def make_figure(
    name: str,
    title: str,
    *curves: Curve,
    log: bool = False,
    look: Literal["line", "dots"] = "line",
    **how: Any,
) -> list[Figure]:
    """A figure of the curves that have values, if any; `how`: other fields of the figure."""
    series = tuple(
        Series(name=label, points=points, colour=colour, look=look)
        for label, points, colour in curves
        if has_values(points)
    )
    log = log and spans_magnitudes([point for line in series for point in line.points])
    return [Figure(name=name, title=title, series=series, log=log, **how)] if series else []


def has_values(points: Sequence[Point]) -> bool:
    return any(value is not None for _, value in points)


def spans_magnitudes(points: Sequence[Point]) -> bool:
    """Whether a linear axis would flatten most of the values."""
    values = [value for _, value in points if value is not None]
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_FROM


def thinned(points: Sequence[Point], buckets: int = BUCKETS) -> list[Point]:
    """At most about 2 × `buckets` points: the first and last, and each bucket's extremes."""
    if len(points) <= 2 * buckets:
        return list(points)
    kept: list[Point] = [points[0]]
    inner = points[1:-1]
    for number in range(buckets):
        start = number * len(inner) // buckets
        part = inner[start : (number + 1) * len(inner) // buckets]
        known = [point for point in part if point[1] is not None]
        if not known:
            kept.extend(part[:1])  # a gap stays a gap
            continue
        low = min(known, key=lambda point: point[1] or 0.0)
        high = max(known, key=lambda point: point[1] or 0.0)
        kept.extend(sorted({low, high}, key=lambda point: point[0]))
    kept.append(points[-1])
    return kept


# --- values in words -----------------------------------------------------------------------------


def listed_values(figure: Figure) -> list[tuple[str, ...]]:
    """The position and the value of every line: the first, the last and some between; short lines
    in full."""
    lines = [dict(line.points) for line in figure.series if line.look != "faint"]
    every = sorted({at for line in lines for at, value in line.items() if value is not None})
    if not every:
        return []
    step = max(1, (len(every) - 1) / (LISTED - 1))
    places = {every[round(number * step)] for number in range(min(LISTED, len(every)))}
    places = places.union(*(line for line in lines if len(line) <= LISTED))
    rows = []
    for at in sorted(places):
        values = [line.get(at) for line in lines]
        cells = [format_value(v, figure.unit) if v is not None else "–" for v in values]
        rows.append((f"{at:,.0f}", *cells))
    return rows


def format_value(value: float, unit: Unit) -> str:
    if unit == "si":
        return f"{value:,.0f}"
    if unit == "number":
        return f"{value:.4g}"
    size, sign = {"percent": (0.01, " %"), "watts": (1.0, " W"),
                  "bytes": (2.0**30, " GiB")}[unit]  # fmt: skip
    shown = value / size
    return f"{shown:,.1f}{sign}" if abs(shown) < 100 else f"{shown:,.0f}{sign}"


def clock_words(seconds: float) -> str:
    """`0`, `40 s`, `2:30 min`, `1:15 h`: short enough for an axis."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds else "0"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"
