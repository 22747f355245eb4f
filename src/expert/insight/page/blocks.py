"""The building blocks of a page, independent of its format: text, numbers, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["number", "count", "percent", "bytes", "seconds", "ms", "watts", "si"]
Tone = Literal["error", "warning", "note", "good", "plain"]
Look = Literal["line", "faint", "dots"]
Point = tuple[float, float | None]
"""Position and value; None if nothing finite was measured, which breaks the line."""

MADE_BY = "Made by expert "
"""The start of every page's footer; it identifies a page."""


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int
    look: Look = "line"


@dataclass(frozen=True, kw_only=True)
class LineChart:
    series: tuple[Series, ...]
    x_name: str = "step"
    x_unit: Unit = "count"
    unit: Unit = "number"
    from_zero: bool = False
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class StackChart:
    """Shares along the run: `columns` holds the amount of every part."""

    parts: tuple[str, ...]
    colours: tuple[int, ...]
    at: tuple[float, ...]
    columns: tuple[tuple[float, ...], ...]
    x_name: str = "step"


@dataclass(frozen=True, kw_only=True)
class BarPart:
    name: str
    amount: float
    words: str
    colour: int


@dataclass(frozen=True, kw_only=True)
class WideBar:
    """One bar of several parts, such as an average step."""

    segments: tuple[BarPart, ...]


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    amount: float | None
    words: str
    note: str = ""
    marked: bool = False
    """Grey: left out, failed or slower."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    bars: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class Histogram:
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    what: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    lane: str
    at: float
    words: str
    tone: Tone = "plain"


@dataclass(frozen=True, kw_only=True)
class EventTimeline:
    """A timeline with a lane for every kind of event."""

    lanes: tuple[str, ...]
    counts: tuple[int, ...]
    """Events per lane, including those not drawn."""
    marks: tuple[Mark, ...]
    end: float
    """Seconds since the run started, without pauses."""


Chart = LineChart | StackChart | WideBar | Bars | Histogram | EventTimeline


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    """Stable, for links and tests."""
    title: str
    chart: Chart
    note: str = ""
    look: str = ""
    """Legend of its colours and lines; left out of Markdown."""
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Tile:
    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    cards: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True)
class Words:
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table. Columns in `numbers` are right-aligned; a tone colours a row's first cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    tones: tuple[Tone, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Short lines, each with a mark."""

    lines: tuple[tuple[Tone, str], ...]


@dataclass(frozen=True, kw_only=True)
class CaseExample:
    """A validation case: prompt, expected and answer."""

    passed: bool | None
    texts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """Details that open on a click."""

    title: str
    inside: tuple[Block, ...]
    shown: bool = False
    """Open by default."""


Block = Figure | Tiles | Words | Grid | Lines | CaseExample | Folded


@dataclass(frozen=True, kw_only=True)
class PageSection:
    name: str
    title: str
    inside: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    subtitle: str
    kind: str
    """The verdict in a word, such as data-bound."""
    verdict: str
    tone: Tone
    reasons: str
    """The text below the verdict."""
    sections: tuple[PageSection, ...]
    footer: str
