"""A benchmark as a person sees it: how the climb goes, and the ladder at its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from expert.cli.display import Sheet, show_bars, show_sheet, write_line
from expert.cli.run_view import PreparingView, say
from expert.cli.words import duration
from expert.insight.ladder.ladder import (
    MARKS,
    STAND,
    Ladder,
    RungResult,
    compare,
    doubts_about,
    outcome,
)
from expert.insight.ladder.table import COLUMNS, gain_words, headline, how_measured, table_rows
from expert.jobs.benchmark.benchmark import Watcher

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from expert.planning.ladder import Rung

# In a terminal what cannot be known for any rung takes no column.
ALWAYS = ("rung", "tokens/s", "gain", "in all", "loss", "")
FIRST_TO_GO = ("±", "rows/s", "epoch", "MFU", "off by", "GPU", "memory", "loss")
"""Columns that a narrow terminal has no room for, in this order."""
BETWEEN = 3
"""Columns of a ruled table are so far apart."""
WORDS = 24
"""Letters of the last column, which is wrapped."""


class ClimbView(Watcher):
    """A bar with the rung, what it does and the time that is left; plain lines elsewhere."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._ends_at = clock()
        self._number, self._of, self._name = 0, 1, ""
        self._open = ExitStack()
        self._tell: Callable[[str, int, int], None] | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self.measured: Ladder | None = None
        """What an end that was asked for has left."""

    def __enter__(self) -> ClimbView:
        self._tell = self._open.enter_context(PreparingView(self._console))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def preparing(self, name: str, rows: int, tokens: int) -> None:
        """Hands on to the view of preparing."""
        if self._tell is not None:
            self._tell(name, rows, tokens)

    def begins(self, rung: Rung, number: int, of: int, left: float) -> None:
        """Shows which rung it is."""
        self._open_climb()
        self._number, self._of, self._name = number, of, rung.name
        self._ends_at = self._clock() + left
        if self._bar is None:
            say(self._console, f"[{number}/{of}] {rung.name}: {rung.adds}{self._left()}")
        self.goes_on("", 0, 0)

    def compares(self, name: str, left: float) -> None:
        """Shows that the end is near."""
        self._number, self._name = self._of + 1, f"{name} against the baseline"
        self._ends_at = self._clock() + left
        if self._bar is None:
            say(self._console, f"'{name}' against the baseline, in turns{self._left()}")
        self.goes_on("", 0, 0)

    def crowded(self, words: str) -> None:
        """Warns while something can still be done about it."""
        fix = "end them, or measure again when the machine is free"
        say(self._out, f"! {words}: rates and gains are uncertain  ({fix})", "yellow")

    def goes_on(self, doing: str, done: int, of: int) -> None:
        """Moves the bar; no line of its own elsewhere."""
        if self._bar is None or self._task is None:
            return
        share = done / of if of else 0.0
        words = f"{doing} {done}/{of}" if of else doing
        facts = f"[{self._number}/{self._of}] {self._name}  {words}{self._left()}"
        self._bar.update(self._task, completed=self._number - 1 + min(1.0, share), facts=facts)
        self._bar.refresh()

    def ends(self, result: RungResult) -> None:
        """Prints what came of the rung."""
        style = {"kept": "green", "no difference": "green", "not here": "dim"}
        say(self._out, line_of(result), style.get(result.status, "yellow"))

    def cut_off(self, ladder: Ladder) -> None:
        """Keeps what was measured for whoever writes it down."""
        self.measured = ladder

    def remembered(self, file: Path) -> None:
        """Says what becomes of it."""
        say(
            self._console,
            "later plans use what won where the manifest says auto: expert plan --all\n"
            f"it is kept in {file}, and forgotten with: expert benchmark --forget",
        )

    def not_remembered(self, because: str) -> None:
        """Says why plans stay as they are."""
        say(self._console, f"! later plans will not know what won: {because}", "yellow")

    @property
    def _out(self) -> Console:
        return self._bar.console if self._bar else self._console

    def _left(self) -> str:
        """Time that is left, as the climb has shared it out."""
        return f"  (about {duration(max(1.0, self._ends_at - self._clock()))} left)"

    def _open_climb(self) -> None:
        if self._tell is not None:
            self._open.close()
            self._tell = None
            self._open_bar()

    def _open_bar(self) -> None:
        if not self._console.is_terminal:
            return
        from rich.progress import BarColumn, Progress, TextColumn

        # Drawn when something is told: a drawing thread would take a core from what is measured.
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._open.enter_context(self._bar)
        self._task = self._bar.add_task("", total=self._of, facts="")


def line_of(result: RungResult) -> str:
    """One rung in a line."""
    seen = result.measured
    if seen is None:
        word = MARKS[result.status][1] or result.status
        return f"  {result.name}: {word}: {result.because}"
    parts = [f"{seen.tokens_per_second:,.0f} tokens/s"]
    if result.gain is not None:
        parts.append(gain_words(result))
    if result.cumulative is not None and result.gain is not None:
        parts.append(f"in all {result.cumulative:.2f}x")
    if seen.loss is not None:
        parts.append(f"loss {seen.loss:.4f}")
    if result.because:
        parts.append(outcome(result))
    return f"  {result.name}: {', '.join(parts)}"


def show_ladder(ladder: Ladder, console: Console) -> None:
    """The sentence, the bars, the table, and how it was measured."""
    say(console, f"\n{headline(ladder)}\n", "bold")
    if console.is_terminal:
        bars = [_bar(rung, ladder) for rung in ladder.rungs if rung.status in STAND]
        show_bars(bars, max((amount for _, amount, _ in bars), default=0.0), console)
    rows = table_rows(ladder)
    room = console.width if console.is_terminal else None
    kept = [COLUMNS.index(column) for column in _columns(rows, room)]
    columns = tuple(COLUMNS[place] for place in kept)
    show_sheet(Sheet(columns, [[[row[p] for p in kept] for row in rows]]), console)
    for line in how_measured(ladder):
        say(console, line, "dim")


def _columns(rows: list[tuple[str, ...]], room: int | None) -> list[str]:
    """Those that say something, and of them as many as there is room for: a number that is broken
    over two lines is none. All of them stand in the Markdown and on the page."""
    cells = {column: [row[place] for row in rows] for place, column in enumerate(COLUMNS)}
    kept = [c for c in COLUMNS if c in ALWAYS or any(cell != "–" for cell in cells[c])]
    widths = {c: max(len(c), *map(len, cells[c]), 0) + BETWEEN for c in kept}
    widths[""] = min(widths[""], WORDS)
    for column in FIRST_TO_GO:
        if room is not None and sum(widths[c] for c in kept) > room and column in kept:
            kept.remove(column)
    return kept


def _bar(rung: RungResult, ladder: Ladder) -> tuple[str, float, str]:
    """How fast against the baseline, or tokens a second where that is not known."""
    assert rung.measured is not None
    if ladder.is_held_against_baseline and rung.cumulative is not None:
        return rung.name, rung.cumulative, f"{rung.cumulative:.2f}x"
    rate = rung.measured.tokens_per_second
    return rung.name, rate, f"{rate:,.0f}"


def show_compared(first: Path, second: Path, console: Console, *, as_json: bool) -> None:
    """Two results or two runs, with their ratio."""
    found = compare(first, second)
    for doubt in doubts_about(first, second):  # beside JSON: on standard error
        say(console, f"! {doubt}", "yellow")
    if as_json:
        keys = ("what", "first", "second", "ratio")
        rows = [dict(zip(keys, row, strict=True)) for row in found]
        write_line(json.dumps(rows, indent=2))
        return
    lines = [[name, _number(one), _number(two), _times(ratio)] for name, one, two, ratio in found]
    show_sheet(Sheet(("", str(first), str(second), "ratio"), [lines]), console)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3f}x"
