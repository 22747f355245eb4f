"""Summaries of all runs, from few of their events."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.rundir import RunFolder
from expert.core.text import duration, loss
from expert.insight.page.figures import Point, spans_magnitudes
from expert.insight.step.anatomy import finite
from expert.jobs.board.folders import BoardItem
from expert.jobs.board.reader import EventReader
from expert.run.stored.status import RunStatus, status_by

LINES = 60
"""Log lines kept per run: a sparkline is 120 pixels wide."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in the list; `problem`: why it cannot be read, or ""."""

    found: BoardItem
    status: RunStatus | None
    losses: tuple[Point, ...] = ()
    problem: str = ""

    @property
    def state(self) -> str:
        return self.status.state if self.status is not None else "unreadable"

    @property
    def model(self) -> str:
        status = self.status
        return f"{status.model} on {status.device}" if status and status.model else ""

    @property
    def curve(self) -> str:
        """The losses as points of a drawing of 100 by 100; on a log scale if they span much."""
        known = [(at, value) for at, value in self.losses if value is not None]
        if len(known) < 2:
            return ""
        scale = math.log if spans_magnitudes(known) else float
        values = [scale(value) for _, value in known]
        low, high, first = min(values), max(values), known[0][0]
        wide, tall = known[-1][0] - first or 1.0, high - low or 1.0
        return " ".join(
            f"{100 * (at - first) / wide:.1f},{100 * (high - value) / tall:.1f}"
            for (at, _), value in zip(known, values, strict=True)
        )

    @property
    def progress(self) -> float | None:
        """Share of the steps done."""
        if self.status is None or self.status.step is None or not self.status.total_steps:
            return None
        return min(1.0, self.status.step / self.status.total_steps)

    @property
    def numbers(self) -> dict[str, str]:
        """Numbers to show, by label; "" if unknown. Event files store "nan" as text."""
        status = self.status
        if status is None:
            return {}
        total = f" / {status.total_steps:,}" if status.total_steps else ""
        known: dict[str, tuple[Any, Callable[[Any], str]]] = {
            "step": (status.step, lambda n: f"{n:,}{total}"),
            "loss": (status.loss, loss),
            "validation loss": (status.eval_loss, loss),
            "best validation": (status.best_eval_loss, loss),
            "tokens/s": (status.tokens_per_second, "{:,.0f}".format),
            "GPU": (status.gpu_utilization, "{:.0f} %".format),
            "left": (status.eta_seconds if self.state == "running" else None, duration),
        }
        return {name: write(value) if isinstance(value, int | float) else ""
                for name, (value, write) in known.items()}  # fmt: skip


def newest_first(run: Summary) -> tuple[bool, float, str]:
    """Sort key: running runs first, then by last event."""
    last = run.status.last_event if run.status is not None else None
    return (run.state != "running", -(last or 0.0), run.found.name)


class Summaries:
    """Summaries of runs, for all pages; each reads only what is new in its event file."""

    def __init__(self) -> None:
        self._readers: dict[Path, EventReader] = {}
        self._lock = threading.Lock()

    def of(self, found: BoardItem) -> Summary:
        with self._lock:
            folder = RunFolder(found.path)
            reader = self._readers.setdefault(found.path, EventReader(folder.events, LINES))
            try:
                reader.read_new()
                status = status_by(reader.events, folder, damaged_lines=reader.damaged)
            except (ExpertError, OSError, ValueError) as error:
                return Summary(found=found, status=None, problem=str(error))
            losses = {
                step: finite(event.get("loss"))
                for event in reader.events
                if event["event"] == "step" and (step := finite(event.get("step"))) is not None
            }
            return Summary(found=found, status=status, losses=tuple(sorted(losses.items())))

    def forget(self, kept: set[Path]) -> None:
        """Drop all other runs."""
        with self._lock:
            for path in self._readers.keys() - kept:
                del self._readers[path]
