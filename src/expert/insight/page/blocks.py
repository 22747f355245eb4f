"""What a page is made of, without how it looks: text, numbers, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["number", "count", "percent", "bytes", "seconds", "ms", "watts", "si"]
Tone = Literal["error", "warning", "note", "good", "plain"]
Point = tuple[float, float | None]
"""Where and how much; None where nothing finite was measured, which breaks the line."""

MADE_BY = "Made by expert "
"""How the footer of every page begins, by which a page is known again."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    colour: int
    look: Literal["line", "faint", "dots"] = "line"


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
    """Shares of a whole along the run: `columns` holds the amount of every part."""

    parts: tuple[str, ...]
    colours: tuple[int, ...]
    at: tuple[float, ...]
    columns: tuple[tuple[float, ...], ...]
    x_name: str = "step"


@dataclass(frozen=True, kw_only=True)
class Segment:
    name: str
    amount: float
    words: str
    colour: int


@dataclass(frozen=True, kw_only=True)
class WideBar:
    """One bar made of parts, such as an average step."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    amount: float | None
    words: str
    note: str = ""
    marked: bool = False
    """It stands back: left out, failed or slower."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars, one below the other."""

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
class Marks:
    """What happened when: a lane for every kind of event."""

    lanes: tuple[str, ...]
    counts: tuple[int, ...]
    """Events of every lane, also those that are not drawn."""
    marks: tuple[Mark, ...]
    end: float
    """Seconds since the run began, without the pauses between its parts."""


Chart = LineChart | StackChart | WideBar | Bars | Histogram | Marks


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    """Stable, for links and tests."""
    title: str
    chart: Chart
    note: str = ""
    look: str = ""
    """What its colours and lines mean; only for pages that draw it."""
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Card:
    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Cards:
    cards: tuple[Card, ...]


@dataclass(frozen=True, kw_only=True)
class Words:
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table. Columns in `numbers` are aligned to the right; a tone colours a row's first cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    tones: tuple[Tone, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Short lines with a sign of how each is."""

    lines: tuple[tuple[Tone, str], ...]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A case of the validation: what was asked, wanted and answered."""

    passed: bool | None
    texts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """What is there for those who look for it."""

    title: str
    inside: tuple[Block, ...]
    shown: bool = False
    """It lies open from the start."""


Block = Figure | Cards | Words | Grid | Lines | Example | Folded


@dataclass(frozen=True, kw_only=True)
class Section:
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
    """What stands under the verdict."""
    sections: tuple[Section, ...]
    footer: str
