"""What a page is made of, independent of HTML: text, numbers, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from expert.insight.findings.finding import Finding

Unit = Literal["number", "count", "percent", "bytes", "seconds", "ms", "watts", "si"]
Tone = Literal["error", "warning", "note", "good", "plain"]
Point = tuple[float, float | None]
"""Position and value; None if nothing finite was measured, which breaks the line."""


class _Kind:
    @property
    def kind(self) -> str:
        """The name by which the template tells blocks and charts apart."""
        return type(self).__name__


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int
    look: Literal["line", "faint", "dots"] = "line"


@dataclass(frozen=True, kw_only=True)
class LineChart(_Kind):
    series: tuple[Series, ...]
    x_name: str = "step"
    x_unit: Unit = "count"
    unit: Unit = "number"
    from_zero: bool = False
    log: bool = False
    stacked: bool = False
    """Shares of the sum at every position, one on top of the other."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    amount: float | None
    words: str
    note: str = ""
    colour: int = 1
    """7 is grey: left out, failed or slower."""


@dataclass(frozen=True, kw_only=True)
class Bars(_Kind):
    bars: tuple[Bar, ...]

    @property
    def longest(self) -> float:
        return max((bar.amount or 0.0 for bar in self.bars), default=0.0) or 1.0


@dataclass(frozen=True, kw_only=True)
class WideBar(_Kind):
    """One bar of several parts, such as an average step."""

    bars: tuple[Bar, ...]

    @property
    def whole(self) -> float:
        return sum(bar.amount or 0.0 for bar in self.bars) or 1.0


@dataclass(frozen=True, kw_only=True)
class Mark:
    at: float
    words: str
    tone: Tone = "plain"


@dataclass(frozen=True, kw_only=True)
class EventTimeline(_Kind):
    """A lane for every kind of event: its name, its number of events, and those that are drawn."""

    lanes: tuple[tuple[str, int, tuple[Mark, ...]], ...]
    end: float
    """Seconds since the run started, without pauses."""


@dataclass(frozen=True, kw_only=True)
class Figure(_Kind):
    name: str
    """Stable, for links and tests."""
    title: str
    chart: LineChart | Bars | WideBar | EventTimeline
    note: str = ""
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Tile:
    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Tiles(_Kind):
    cards: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True)
class Words(_Kind):
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, kw_only=True)
class Grid(_Kind):
    """A table. Columns in `numbers` are right-aligned; a tone colours a row's first cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    tones: tuple[Tone, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lines(_Kind):
    """Short lines, each with a mark."""

    lines: tuple[tuple[Tone, str], ...]


@dataclass(frozen=True, kw_only=True)
class FindingCard(_Kind):
    """A finding, and its fix as lines of a manifest ("" if it is none)."""

    finding: Finding
    change: str


@dataclass(frozen=True, kw_only=True)
class CaseExample(_Kind):
    """A validation case: prompt, expected and answer."""

    passed: bool | None
    texts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Folded(_Kind):
    """Details that open on a click."""

    title: str
    inside: tuple[Block, ...]
    shown: bool = False
    """Open by default."""


Block = Figure | Tiles | Words | Grid | Lines | FindingCard | CaseExample | Folded


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
