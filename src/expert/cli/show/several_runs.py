"""Several concurrent runs: a line each while they last, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from expert.cli.show.display import Sheet, show, show_sheet, write_json
from expert.cli.show.progress import SECONDS_BETWEEN_STEPS
from expert.core.errors import EXIT_OK
from expert.core.text import duration, loss, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from expert.jobs.launch.each_gpu import QueuedRun


class RunsView:
    """Lines that change in a terminal; elsewhere a line now and then when a run makes progress."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._printed: dict[str, tuple[str, str, float]] = {}

    def __enter__(self) -> RunsView:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, runs: Sequence[QueuedRun]) -> None:
        if self._live is not None:
            from rich.text import Text

            width = self._console.width
            lines = [visible(_line(run), keep="")[:width] for run in runs]
            self._live.update(Text("\n".join(lines)), refresh=True)
            return
        for run in runs:
            self._print(run)

    def _print(self, run: QueuedRun) -> None:
        state, text, when = self._printed.get(run.name, ("waiting", "", 0.0))
        now = time.monotonic()
        moved = run.state != state or (run.text != text and now - when >= SECONDS_BETWEEN_STEPS)
        if moved:
            show(self._console, _line(run))
            self._printed[run.name] = (run.state, run.text, now)


def show_runs(runs: Sequence[QueuedRun], console: Console, *, as_json: bool) -> None:
    """How each run ended, and what is wrong with those that failed."""
    if as_json:
        write_json([_as_json(run) for run in runs], needed=False)
        return
    rows = [_row(run) for run in runs]
    columns = ("manifest", "card", "ended", "steps", "loss", "eval loss", "time", "run")
    show_sheet(Sheet(columns, [rows]), console)
    for run in runs:
        if run.code not in (EXIT_OK, None):
            show(console, f"{run.manifest}: {run.text}", "red")
            show(console, f"  its log: {run.log}", "dim")


def _line(run: QueuedRun) -> str:
    where = "" if run.place is None else f" on {run.place}"
    return f"{run.name}{where}: {run.text or run.state}"


def _row(run: QueuedRun) -> list[str]:
    found = run.result or {}

    def number(name: str) -> str:
        value = found.get(name)
        return loss(value) if isinstance(value, int | float) else ""

    ended = run.state if run.code is None else ("✓" if run.code == EXIT_OK else f"{run.code}")
    place = "" if run.place is None else str(run.place)
    spent = duration(run.seconds) if run.place is not None else ""
    steps, folder = str(found.get("steps", "")), str(found.get("folder", ""))
    return [run.name, place, ended, steps, number("loss"), number("eval_loss"), spent, folder]


def _as_json(run: QueuedRun) -> dict[str, Any]:
    return {
        "manifest": str(run.manifest),
        "place": run.place,
        "state": run.state,
        "exit_code": run.code,
        "seconds": run.seconds,
        "text": run.text,
        "log": str(run.log) if run.code not in (EXIT_OK, None) else None,
        "result": run.result,
    }
