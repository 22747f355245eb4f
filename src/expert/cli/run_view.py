"""How a run is shown while it lasts and from its file: the progress view, and what surrounds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from expert.cli.display import Sheet
from expert.cli.event_lines import Line
from expert.cli.event_words import bytes_in_words, three_digits, worded
from expert.cli.progress import ProgressView
from expert.cli.words import count, counted, duration, loss

if TYPE_CHECKING:
    from rich.console import Console

    from expert.data.line import Tell
    from expert.run.follow import RunStatus

SECONDS_BETWEEN_LINES = 5.0
"""Where nobody watches, preparing says so often how far it is."""


class RunView:
    """A reader of events that shows all of a run; in a terminal a spinner stands for waiting."""

    def __init__(self, console: Console, *, live: bool = False) -> None:
        self._console = console
        self._live = live
        self._view = ProgressView(console)
        self._waiting = ExitStack()

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.close()
        self._view.close()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Shows one event."""
        self._waiting.close()
        self._view(event)
        for text, style in more_lines(event, live=self._live):
            say(self._console, text, style)
        if self._live and event.get("event") == "kernels":
            self.wait("loading the model")

    def progress(self, step: int) -> None:
        """Shows that an update was launched; no event is needed for it."""
        self._view.progress(step)

    def evaluating(self, split: str, rows: int, total: int) -> None:
        """Shows how far an evaluation is."""
        self._view.evaluating(split, rows, total)

    def wait(self, what: str) -> None:
        """Says what is being waited for until the next event."""
        self._waiting.enter_context(waiting(self._console, what))


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """A spinner in a terminal, a line elsewhere."""
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.out(f"{what} …", highlight=False)
        yield


def say(console: Console, text: str, style: str = "") -> None:
    """A line; brackets in it are not markup, and what it quotes of rows does not act on a
    terminal."""
    from rich.text import Text

    from expert.core.visible import visible

    text = visible(text, keep="\n\t")
    if console.is_terminal:
        console.print(Text(text, style=style))
    else:
        console.out(text, highlight=False)


class PreparingView:
    """How far preparing is: bars in a terminal, a line now and then elsewhere; until the first of
    them it says that it has begun."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._shown = ExitStack()
        self._bars: Tell | None = None
        self._said = clock()

    def __enter__(self) -> PreparingView:
        self._shown.enter_context(waiting(self._console, "reading the data"))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def __call__(self, name: str, rows: int, tokens: int) -> None:
        """Rows and tokens of a source that are done."""
        from expert.cli.prepare_view import progress

        if self._console.is_terminal:
            if self._bars is None:
                self._shown.close()
                self._bars = self._shown.enter_context(progress(self._console))
            self._bars(name, rows, tokens)
        elif self._clock() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = self._clock()
            say(self._console, f"preparing {name}: {counted(rows, 'row')}, {count(tokens)} tokens")


def more_lines(event: Mapping[str, Any], *, live: bool) -> list[Line]:
    """Events around resuming and failing; a failure is told by the error itself while it lives."""
    kind = event.get("event")
    if kind == "rejected":
        return [(f"rejected {event.get('path')}: {event.get('reason')}", "yellow")]
    if kind == "resumed":
        lines = [(f"resumed at step {event.get('step')} from {event.get('path')}", "bold")]
        changed = event.get("changed") or ()
        return lines + [(f"  changed: {change}", "yellow") for change in changed]
    if kind == "took_best":
        return [(f"took the best checkpoint: step {event.get('step')}", "")]
    if kind == "failed" and not live:
        return [(f"failed: {event.get('error')}", "bold red")]
    return []


def status_sheet(status: RunStatus) -> Sheet:
    """How a run stands, one fact a row; what is not known has no row."""
    total = f" of {status.total_steps:,}" if status.total_steps else ""
    rows = {
        "state": status.state + (f": {status.because}" if status.because else ""),
        "model": status.model and f"{status.model} on {status.device}",
        "step": None if status.step is None else f"{status.step:,}{total}",
        "epoch": None if status.epoch is None else _epoch(status),
        "loss": _loss(status.loss),
        "mean loss": _loss(status.mean_loss),
        "validation loss, last": _loss(status.eval_loss),
        "validation loss, best": _best(status),
        "test loss": _loss(status.test_loss),
        "learning rate": _number(status.rate, "{:.3g}"),
        "tokens/s": _number(status.tokens_per_second, "{:,.0f}"),
        "steps/s": _in_words(status.steps_per_second, three_digits),
        "GPU use": _number(status.gpu_utilization, "{:.0f} %"),
        "peak memory": worded(status.gpu_peak_memory_bytes, "{} of the GPU", bytes_in_words)
        or worded(status.cpu_peak_memory_bytes, "{} RAM", bytes_in_words),
        "time left": _time_left(status),
        "last checkpoint": status.last_checkpoint or "none yet",
        "fallbacks": "\n".join(status.fallbacks) or "none",
        "last event": status.last_event and _ago(time.time() - status.last_event),
        "finished expert": status.final,
        "damaged lines": str(status.damaged_lines) if status.damaged_lines else None,
    }
    known = [(name, value) for name, value in rows.items() if value]
    return Sheet(("fact", "value"), [known], title=f"{status.expert or 'run'}: {status.folder}")


def _epoch(status: RunStatus) -> str:
    return f"{status.epoch:.2f}" + (f" of {status.epochs:g}" if status.epochs else "")


def _loss(value: object) -> str | None:
    return _in_words(value, loss)


def _in_words(value: object, say: Callable[[float], str]) -> str | None:
    return say(value) if isinstance(value, int | float) else _number(value, "{}")


def _best(status: RunStatus) -> str | None:
    best, step = _loss(status.best_eval_loss), status.best_eval_step
    return f"{best} at step {step:,}" if best and step is not None else best


def _number(value: object, form: str) -> str | None:
    """The file holds "nan" as text."""
    if value is None:
        return None
    return form.format(value) if isinstance(value, int | float) else str(value)


def _time_left(status: RunStatus) -> str | None:
    left = status.eta_seconds
    return duration(left) if status.state == "running" and isinstance(left, int | float) else None


def _ago(seconds: float) -> str:
    return f"{duration(max(0.0, seconds))} ago"
