"""A run as a person sees it: a bar in a terminal, plain lines anywhere else.

The view reads events as plain dictionaries, one at a time, from a run that goes on or from a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from expert.cli.evaluation_pace import EvaluationPace
from expert.cli.event_lines import GAP, Event, lines_of, step_parts
from expert.cli.event_words import number, time_in_words, whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

SECONDS_BETWEEN_FRAMES = 0.1
"""The bar is drawn at most this often: a frame costs about 1 ms of the thread that trains."""

SECONDS_BETWEEN_SIGNS = 20.0
"""Where nobody watches, a run that logs rarely says so often how far it is."""

WIDE = 130
BAR_CELLS, BAR_CELLS_WIDE = 8, 24
"""With 8 cells everything but the wait for data fits into 100 columns."""

# What goes first where a terminal is too narrow for everything.
DISPENSABLE = ("data_wait", "epoch", "rate", "memory", "steps", "gpu", "speed", "eta", "loss")

ONLY_IN_THE_BAR = ("epoch",)
"""A log is read as a column of numbers, and has a line for the end of every epoch."""


class ProgressView:
    """A reader of events that shows them; used as a context manager, so that the bar is closed."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started: dict[str, Any] = {}
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._drawn = -SECONDS_BETWEEN_FRAMES
        self._undrawn: int | None = None
        self._parts: dict[str, str] = {}
        self._said: float | None = None
        self._gone = False
        self._first: tuple[int, float] | None = None
        """The first update that was told of, and when: what comes after it tells the pace."""
        self._evaluation: EvaluationPace | None = None
        self._evaluation_task: TaskID | None = None

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Shows one event; when nobody is there to see it any more, nothing happens."""
        if self._gone:
            return
        try:
            self._show(event)
        except OSError:  # a closed pipe or terminal: training goes on unseen
            self._gone = True

    def progress(self, step: int) -> None:
        """An update was launched: the bar moves, plain output has a sign of life now and then.

        Called after every update by the thread that trains, so it mostly only looks at the clock.
        """
        now = self._clock()
        if self._gone:
            return
        self._first = self._first or (step, now)
        too_soon = now - self._drawn < SECONDS_BETWEEN_FRAMES
        if self._console.is_terminal and too_soon and step != self._started.get("total_steps"):
            self._undrawn = step
            return
        try:
            self._moved(step, now)
        except OSError:  # as above
            self._gone = True

    def evaluating(self, split: str, rows: int, total: int) -> None:
        """So many of the rows that a run is judged by were launched: one that takes long has a bar
        of its own, or a line now and then. Called after every batch, as `progress` is."""
        now = self._clock()
        if self._gone:
            return
        pace = self._evaluation
        if pace is None or rows == 0:
            pace = self._evaluation = EvaluationPace(split, total, began=now)
        pace.moved(rows, now)
        if not pace.is_long(now):
            return
        try:
            self._show_evaluation(pace, rows, now)
        except OSError:  # as above
            self._gone = True

    def _show_evaluation(self, pace: EvaluationPace, rows: int, now: float) -> None:
        if not self._console.is_terminal:
            since = pace.began if self._said is None else self._said
            if now - since >= SECONDS_BETWEEN_SIGNS:
                self._console.out(GAP.join(pace.parts(rows, now).values()), highlight=False)
                self._said = now
            return
        if now - self._drawn < SECONDS_BETWEEN_FRAMES:
            return
        cells = self._cells()
        if self._bar is None:
            self._open_bar(whole(self._started, "total_steps"), cells)
        assert self._bar is not None
        if self._evaluation_task is None:
            self._evaluation_task = self._bar.add_task("", total=pace.total, facts="")
        facts = fitting(pace.parts(rows, now), self._console.width - cells - 1)
        self._bar.update(self._evaluation_task, completed=rows, facts=facts)
        self._bar.refresh()
        self._drawn = now

    def _evaluation_over(self) -> None:
        task, self._evaluation, self._evaluation_task = self._evaluation_task, None, None
        if self._bar is not None and task is not None:
            self._bar.remove_task(task)

    def _moved(self, step: int, now: float) -> None:
        total = whole(self._started, "total_steps")
        parts = {**self._parts, "step": f"{step}/{total}" if total is not None else f"{step}"}
        if not self._parts:
            parts |= self._time_left(step, total, now)
        if step == total:  # what the last step line expected is over
            parts.pop("eta", None)
        if self._console.is_terminal:
            self._draw(step, total, parts)
            return
        if self._said is not None and now - self._said < SECONDS_BETWEEN_SIGNS:
            return
        # The first update has a line of its own where each has one.
        if self._said is not None or whole(self._started, "logging_steps") != 1:
            self._console.out(f"step {parts['step']}", highlight=False)
        self._said = now

    def _time_left(self, step: int, total: int | None, now: float) -> dict[str, str]:
        """By the pace of the updates so far, until the first step line tells it: that may be ten
        updates away. The first one, which loads and compiles, is left out."""
        first, began = self._first or (step, now)
        if total is None or step <= first or now <= began:
            return {}
        evaluations = number(self._started, "evaluation_updates") or 0.0
        left = (now - began) / (step - first) * (total - step + evaluations)
        return {"eta": f"ETA {time_in_words(left)}"}

    def close(self) -> None:
        """Leaves the bar where the run stands."""
        with suppress(OSError):  # as above
            if self._bar is not None and self._undrawn is not None:
                self._moved(self._undrawn, self._clock())
        self._evaluation_over()
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):  # as above
                bar.stop()

    def _show(self, event: Event) -> None:
        kind = event.get("event")
        self._evaluation_over()
        if kind == "started":
            self.close()
            self._started = dict(event)
            self._parts, self._said, self._first = {}, None, None
        if kind == "step":
            self._step(event)
            return
        if kind in ("finished", "stopped"):
            self.close()
        known = {"epochs": self._started.get("epochs")}  # an epoch event has its own number only
        for text, style in lines_of({**known, **event}):
            self._print(text, style)

    def _print(self, text: str, style: str) -> None:
        if not self._console.is_terminal:
            self._console.out(text, highlight=False)
            return
        from rich.text import Text

        self._console.print(Text(text, style=style))

    def _step(self, event: Event) -> None:
        total = whole(self._started, "total_steps")
        parts = step_parts(event, total=total, epochs=number(self._started, "epochs"))
        if not self._console.is_terminal:
            shown = [text for name, text in parts.items() if name not in ONLY_IN_THE_BAR]
            self._console.out(GAP.join(["step " + shown[0], *shown[1:]]), highlight=False)
            self._said = self._clock()
            return
        step = whole(event, "step") or 0
        self._parts = parts
        if step == total:  # nothing more is launched: the evaluations of the end are what is left
            self._parts = {name: text for name, text in parts.items() if name != "eta"}
            left = number(event, "eta_seconds")
            parts = parts if left else self._parts
        self._draw(step, total, parts)

    def _cells(self) -> int:
        return BAR_CELLS if self._console.width < WIDE else BAR_CELLS_WIDE

    def _draw(self, step: int, total: int | None, parts: Mapping[str, str]) -> None:
        """Move the bar, and show it where the last frame is long enough ago."""
        self._undrawn = None
        bar_cells = self._cells()
        facts = fitting(parts, self._console.width - bar_cells - 1)
        if self._bar is None:
            self._open_bar(total, bar_cells)
        assert self._bar is not None
        assert self._task is not None
        self._bar.update(self._task, completed=step, facts=facts)
        if self._clock() - self._drawn >= SECONDS_BETWEEN_FRAMES or step == total:
            self._bar.refresh()
            self._drawn = self._clock()

    def _open_bar(self, total: int | None, cells: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        # Drawn when an event comes: a drawing thread would take Python's lock from training.
        self._bar = Progress(
            BarColumn(bar_width=cells),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self._console,
            auto_refresh=False,
            get_time=self._clock,
        )
        self._task = self._bar.add_task("", total=total, facts="")
        self._bar.start()


def fitting(parts: Mapping[str, str], room: int) -> str:
    """As many parts as the room allows, the dispensable ones left out first."""
    left = dict(parts)
    for name in DISPENSABLE:
        if len(GAP.join(left.values())) <= room:
            break
        left.pop(name, None)
    return GAP.join(left.values())
