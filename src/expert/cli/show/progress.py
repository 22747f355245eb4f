"""Progress of a command: bars in a terminal, plain lines anywhere else.

`RunProgress` reads events as plain dictionaries, one at a time, from a live run or from a file. If
the terminal or the reader of a pipe is gone, the console of `make_console` discards what is shown.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from expert.cli.show.display import GAP, Waiting, show, show_lines
from expert.core.text import count
from expert.insight.event_text import Event, lines_of, number, step_parts, time_in_words, whole

SECONDS_BETWEEN_FRAMES = 0.1
"""The bar is drawn at most this often: a frame costs about 1 ms of the training thread."""
SECONDS_BETWEEN_STEPS = 20.0
"""Outside a terminal, a run that logs rarely prints its step this often."""
SECONDS_BETWEEN_LINES = 5.0
"""Outside a terminal, preparing and validating print their progress this often."""
MIN_EVALUATION_SECONDS = 2.0
"""Shorter evaluations show no progress."""
BAR_CELLS = 8
"""With 8 cells everything but the data wait fits into 100 columns."""
# Dropped in this order if a terminal is too narrow.
PARTS_TO_DROP = ("data_wait", "epoch", "rate", "memory", "steps", "gpu", "speed", "eta", "loss")
SPINNER_ENDS_AT = ("step", "finished", "stopped", "failed")
"""Other events before the first step are lines above the spinner, which stays."""
ORDINARY = (
    *("made from the same data and settings", "first use of this data"),
    "it was not prepared before",
)
"""Reasons to reuse tokens, or to make them, that nobody wonders about."""
ONLY_IN_THE_BAR = ("epoch",)
"""A log is read as a column of numbers, and has a line at the end of every epoch."""


@dataclass
class Pace:
    """The rate of something since it was first seen: earlier progress was made before, or includes
    loading and compiling."""

    first: tuple[int, float] | None = None

    def rate(self, done: int, now: float) -> float | None:
        """Items per second; None if there is no progress yet."""
        before, since = self.first = self.first or (done, now)
        return (done - before) / (now - since) if done > before and now > since else None


class RunProgress:
    """Shows the events of a run, with a spinner until the first step of a `live` one; a context
    manager, so that the bar is closed. The failure of a live run is shown by the error itself."""

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        live: bool = False,
    ) -> None:
        self._console, self._clock = console, clock
        self._live, self._waiting = live, Waiting(console)
        self._started: dict[str, Any] = {}
        self._bar: Progress | None = None
        self._step = 0
        self._parts: dict[str, str] = {}
        """Of the last step line."""
        self._shown: float | None = None
        """When the last frame was drawn, or the last line of a step printed."""
        self._pace = Pace()
        self._evaluation: tuple[float, Pace] | None = None
        """When the current evaluation began, and how fast it is."""

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        kind = event.get("event")
        if self._live and kind in SPINNER_ENDS_AT:
            self._waiting()
        is_ordinary = kind == "data" and event.get("because") in ORDINARY
        if self._live and (kind == "failed" or is_ordinary):
            return
        self._evaluation = None
        if kind == "started":
            self.close()
            self._started = dict(event)
            self._parts, self._shown, self._pace = {}, None, Pace()
        if kind in ("finished", "stopped"):
            self.close()
        if kind == "step":
            self._show_step(event)
        else:
            known = {"epochs": self._started.get("epochs")}  # an epoch event has only its number
            show_lines(self._console, lines_of({**known, **event}))
        if self._live and kind == "kernels":
            self._waiting("loading the model")
        elif self._live and kind == "loaded" and self._bar is None and self._console.is_terminal:
            self._waiting("computing the first step")

    def progress(self, step: int) -> None:
        """A step was launched: move the bar, or print a line now and then.

        The training thread calls it after every step, so mostly it only reads the clock.
        """
        now, total = self._clock(), self._total
        rate = self._pace.rate(step, now)
        self._step = step
        is_last = step == total and self._console.is_terminal
        if not (is_last or self._is_due(now)):
            return
        parts = self._parts_at_step()
        if not self._console.is_terminal:
            # With logging_steps 1 the first step has its own line.
            if self._shown is not None or whole(self._started, "logging_steps") != 1:
                show(self._console, f"step {parts['step']}")
            self._shown = now
            return
        if not self._parts and rate is not None and total is not None and step != total:
            # Until the first step line, which may be ten steps away.
            parts["eta"] = f"ETA {time_in_words((total - step) / rate)}"
        self._draw(parts)

    def evaluating(self, split: str, rows: int, total: int) -> None:
        """`rows` rows of an evaluation were launched; a long one is shown in the bar, or in a line
        now and then. Called after every batch, like `progress`."""
        now = self._clock()
        if self._evaluation is None or rows == 0:
            self._evaluation = now, Pace()
        began, pace = self._evaluation
        rate = pace.rate(rows, now) if rows else None
        if now - began < MIN_EVALUATION_SECONDS or not self._is_due(now, since=began):
            return
        parts = {"step": f"evaluating {split}: {rows:,}/{total:,} rows"}
        if rate is not None and rows < total:
            fast = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
            left = time_in_words((total - rows) / rate)
            parts |= {"speed": f"{fast} rows/s", "eta": f"ETA {left}"}
        if self._console.is_terminal:
            self._draw(parts)
        else:
            self._print(parts)

    def close(self) -> None:
        """Leave the bar at the last step."""
        self._waiting()
        bar, self._bar = self._bar, None
        if bar is not None:
            self._update(bar, self._parts_at_step())
            bar.stop()

    @property
    def _total(self) -> int | None:
        return whole(self._started, "total_steps")

    def _is_due(self, now: float, since: float = -math.inf) -> bool:
        """Whether the last frame or line is old enough for another; `since`: if there is none."""
        last = since if self._shown is None else self._shown
        often = SECONDS_BETWEEN_FRAMES if self._console.is_terminal else SECONDS_BETWEEN_STEPS
        return now - last >= often

    def _parts_at_step(self) -> dict[str, str]:
        """The last step line with the present step; at the end its ETA is outdated."""
        total = self._total
        step = f"{self._step}/{total}" if total is not None else f"{self._step}"
        parts = {**self._parts, "step": step}
        if self._step == total:
            parts.pop("eta", None)
        return parts

    def _print(self, parts: Mapping[str, str]) -> None:
        show(self._console, GAP.join(parts.values()))
        self._shown = self._clock()

    def _show_step(self, event: Event) -> None:
        parts = step_parts(event, total=self._total, epochs=number(self._started, "epochs"))
        self._step = whole(event, "step") or 0
        if self._console.is_terminal:
            self._parts = parts
            self._draw(parts)
        else:
            shown = {name: text for name, text in parts.items() if name not in ONLY_IN_THE_BAR}
            self._print({**shown, "step": f"step {parts['step']}"})

    def _draw(self, parts: Mapping[str, str]) -> None:
        """Move the bar, and draw it if the last frame is old enough."""
        if self._bar is None:
            self._waiting()
            facts = TextColumn("{task.fields[facts]}", markup=False)
            # Drawn on request: a drawing thread would take Python's lock from training.
            how: dict[str, Any] = {"console": self._console, "auto_refresh": False}
            self._bar = Progress(BarColumn(BAR_CELLS), facts, get_time=self._clock, **how)
            self._bar.add_task("", total=self._total, facts="")
            self._bar.start()
        self._update(self._bar, parts)
        now = self._clock()
        if self._is_due(now) or self._step == self._total:
            self._bar.refresh()
            self._shown = now

    def _update(self, bar: Progress, parts: Mapping[str, str]) -> None:
        """As many parts as fit beside the bar, without dispensable ones first."""
        left = dict(parts)
        for name in PARTS_TO_DROP:
            if len(GAP.join(left.values())) <= self._console.width - BAR_CELLS - 1:
                break
            left.pop(name, None)
        bar.update(bar.task_ids[0], completed=self._step, facts=GAP.join(left.values()))


class PreparingView:
    """Progress of preparing data: a spinner with numbers in a terminal, a line now and then
    elsewhere, after one that says what is read unless `brief`. `verb`: what is done to the rows."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        *,
        brief: bool = False,
        verb: str = "preparing",
    ) -> None:
        self._console, self._clock, self._brief, self._verb = console, clock, brief, verb
        self._waiting = Waiting(console)
        self._totals: dict[str, int] = {}
        self._paces: defaultdict[str, tuple[Pace, Pace]] = defaultdict(lambda: (Pace(), Pace()))
        self._printed = clock()

    def __enter__(self) -> PreparingView:
        if self._console.is_terminal or not self._brief:
            self._waiting("reading the data")
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting()

    def waits(self, sentence: str) -> None:
        """Show which process this one waits for."""
        show(self._console, sentence, "dim")

    def expect(self, name: str, rows: int) -> None:
        self._totals[name] = rows

    def __call__(self, name: str, rows: int, tokens: int) -> None:
        """Report the rows and tokens of a source that are done, with rate and time left as far as
        known."""
        now = self._clock()
        by_rows, by_tokens = self._paces[name]
        rate, pace = by_tokens.rate(tokens, now), by_rows.rate(rows, now)
        left = max(0, self._totals.get(name, 0) - rows)
        words = f"{rows:,} of {self._totals[name]:,} rows" if left else f"{rows:,} rows"
        words += f", {count(tokens)} tokens" if tokens else ""
        words += f", {rate:,.0f} tokens/s" if rate is not None else ""
        words += f", ETA {time_in_words(left / pace)}" if pace is not None and left else ""
        if self._console.is_terminal:
            self._waiting(f"{self._verb} {name}: {words}")
        elif now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            show(self._console, f"{self._verb} {name}: {words}")
