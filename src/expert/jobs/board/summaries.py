"""Summaries of all runs, from few of their events."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.events import MAX_LINE_BYTES, Event, check_event_file_size, parse_event
from expert.core.links import open_plain
from expert.core.rundir import RunFolder, outdated
from expert.core.stored_json import read_object_or_empty
from expert.core.text import duration, loss
from expert.insight.page.validation import Validated
from expert.insight.step.anatomy import finite, session_clock
from expert.jobs.board.folders import BoardItem
from expert.run.stored.changes import leaves, option_name
from expert.run.stored.status import RunStatus, status_by

CHUNK = 8 * 2**20
_STEP = b'{"event": "step"'


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in the list; `problem`: why it cannot be read, or ""."""

    found: BoardItem
    status: RunStatus | None
    began: float | None = None
    """Time of the first event, in seconds since 1970."""
    seconds: float | None = None
    """From the start to the last event, without pauses before a resume."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What was asked for, by keys as in --set."""
    accuracy: float | None = None
    gate: bool | None = None
    problem: str = ""

    @property
    def state(self) -> str:
        return self.status.state if self.status is not None else "unreadable"

    @property
    def model(self) -> str:
        status = self.status
        return f"{status.model} on {status.device}" if status and status.model else ""

    @property
    def progress(self) -> float | None:
        """Share of the steps done."""
        if self.status is None or self.status.step is None or not self.status.total_steps:
            return None
        return min(1.0, self.status.step / self.status.total_steps)

    @property
    def numbers(self) -> dict[str, str]:
        """Numbers of the run's page, by label; "" if unknown. Event files store "nan" as text."""
        status = self.status
        if status is None:
            return {}
        total = f" / {status.total_steps:,}" if status.total_steps else ""
        known: dict[str, tuple[Any, Callable[[Any], str]]] = {
            "step": (status.step, lambda n: f"{n:,}{total}"),
            "loss": (status.loss, loss),
            "validation loss": (status.eval_loss, loss),
            "tokens/s": (status.tokens_per_second, "{:,.0f}".format),
            "GPU": (status.gpu_utilization, "{:.0f} %".format),
            "left": (status.eta_seconds if self.state == "running" else None, duration),
        }
        return {name: write(value) if isinstance(value, int | float) else ""
                for name, (value, write) in known.items()}  # fmt: skip

    @property
    def cells(self) -> list[tuple[Any, str]]:
        """The columns of numbers of the list: each value to sort by, and as text."""
        status = self.status
        gate = {True: " ✓", False: " ✗", None: ""}[self.gate]
        known: list[tuple[Any, Callable[[Any], str]]] = [
            (self.began, lambda at: f"{duration(max(0.0, time.time() - at) // 60 * 60)}"),
            (self.seconds, duration),
            (self.accuracy, lambda share: f"{share:.1%}{gate}"),
            (status and status.best_eval_loss, loss),
            (status and status.tokens_per_second, "{:,.0f}".format),
        ]
        return [(value, write(value)) if isinstance(value, int | float) else ("", "")
                for value, write in known]  # fmt: skip


def changed(runs: Sequence[Summary]) -> dict[str, str]:
    """For every run, by its id, the settings in which the runs of its folder differ."""
    values: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        where = run.found.where
        for path, value in run.settings.items():
            values.setdefault((where, path), set()).add(str(value))
    return {
        run.found.id: ", ".join(
            f"{option_name(path)}={value}"
            for where in [run.found.where]
            for path, value in run.settings.items()
            if len(values[where, path]) > 1
        )
        for run in runs
    }


def newest_first(run: Summary) -> tuple[bool, float, str]:
    """Sort key: running runs first, then by last event."""
    last = run.status.last_event if run.status is not None else None
    return (run.state != "running", -(last or 0.0), run.found.name)


class EventReader:
    """Reads the events of a run incrementally: all but the log lines that another one follows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reset()

    def reset(self) -> None:
        self.events: list[Event] = []
        self.damaged = 0
        self._position, self._file = 0, (0, 0)

    def read_new(self) -> None:
        try:
            stream = open(open_plain(self.path, os.O_RDONLY), "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return
        with stream:
            status = os.fstat(stream.fileno())
            file = (status.st_dev, status.st_ino)
            if file != self._file or status.st_size < self._position:
                self.reset()  # replaced or truncated
                self._file = file
            check_event_file_size(self.path)
            while True:
                stream.seek(self._position)
                raw = stream.read(min(CHUNK, status.st_size - self._position))
                end = raw.rfind(b"\n") + 1
                if end:
                    lines = raw[:end].splitlines()
                    for line, following in zip(lines, [*lines[1:], b""], strict=True):
                        if not (line.startswith(_STEP) and following.startswith(_STEP)):
                            self._add(line)
                elif len(raw) > MAX_LINE_BYTES:
                    end = len(raw)  # no event is that long
                    self.damaged += 1
                else:
                    return  # an incomplete line is read next time
                self._position += end

    def _add(self, line: bytes) -> None:
        event = parse_event(line)
        if event is None:
            self.damaged += bool(line.strip())
            return
        if event["event"] == "step" and self.events and self.events[-1]["event"] == "step":
            self.events.pop()
        self.events.append(event)


class Summaries:
    """Summaries of runs, for all pages; each reads only what is new in its event file."""

    def __init__(self) -> None:
        self._readers: dict[Path, EventReader] = {}
        self._files: dict[Path, tuple[int, dict[str, Any]]] = {}
        """Objects in the run folders, with the time of their last change."""
        self._lock = threading.Lock()

    def of(self, found: BoardItem) -> Summary:
        with self._lock:
            folder = RunFolder(found.path)
            reader = self._readers.setdefault(found.path, EventReader(folder.events))
            try:
                reader.read_new()
                status = status_by(reader.events, folder, damaged_lines=reader.damaged)
            except (ExpertError, OSError, ValueError) as error:
                return Summary(found=found, status=None, problem=str(error))
            clock = session_clock(reader.events)
            began = finite(reader.events[0].get("time")) if reader.events else None
            judged = self._stored(folder.validation)
            valid = Validated({} if outdated(judged, folder) else judged)
            settings = {
                path: value
                for path, value in leaves(self._stored(folder.manifest))
                if path.startswith(("training.", "base_models")) and not path.endswith("output_dir")
            }
            return Summary(found=found, status=status, began=began,
                           seconds=clock[-1] if clock else None,
                           settings=settings,
                           accuracy=valid.accuracy, gate=valid.gate)  # fmt: skip

    def _stored(self, file: Path) -> dict[str, Any]:
        """The object in a file, read again only if it changed."""
        try:
            changed = file.lstat().st_mtime_ns
        except OSError:
            return {}
        if self._files.get(file, (0, {}))[0] != changed:
            self._files[file] = changed, read_object_or_empty(file)
        return self._files[file][1]

    def forget(self, kept: set[Path]) -> None:
        """Drop all other runs."""
        with self._lock:
            for path in self._readers.keys() - kept:
                del self._readers[path]
            self._files = {file: one for file, one in self._files.items() if file.parent in kept}
