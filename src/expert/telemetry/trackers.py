"""Trackers: readers of events that draw a run's curves elsewhere, and never stop or slow it.

One row of TRACKERS each, a thread each, and for what is not ours or torch's a process of its own
(tracker_process.py). The names a manifest may use are `Tracker` of manifest/schema/kinds.py.
"""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.core.links import refuse_links
from expert.core.process import Child, how_it_ended

CURVES: Mapping[str, Mapping[str, str]] = {
    "step": {
        "loss": "loss/train",
        "rate": "rate",
        "grad_norm": "grad_norm",
        "epoch": "epoch",
        "tokens_per_second": "tokens_per_second",
        "samples_per_second": "samples_per_second",
        "steps_per_second": "steps_per_second",
        "mfu": "mfu",
        "data_wait": "data_wait",
        "gpu_utilization": "gpu/utilization_percent",
        "gpu_memory_bytes": "gpu/memory_bytes",
        "peak_reserved_bytes": "gpu/peak_memory_bytes",
        "cpu_peak_memory_bytes": "cpu/peak_memory_bytes",
        "power_watts": "gpu/power_watts",
    },
    "eval": {
        "loss": "loss/eval",
        "perplexity": "eval/perplexity",
        "token_accuracy": "eval/token_accuracy",
    },
    "test": {
        "loss": "loss/test",
        "perplexity": "test/perplexity",
        "token_accuracy": "test/token_accuracy",
    },
    "epoch": {"loss": "loss/epoch"},
}
"""Which fields of which event become which curve; "test" is an evaluation of the test rows."""

FLUSHED_AFTER = frozenset({"eval", "saved", "stopped", "finished"})
OPENED_BY = frozenset({"started", "resumed"})
OTHERS_READ = OPENED_BY | FLUSHED_AFTER | {"rolled_back", "fell_back", "failed"}
"""Events without curves that a tracker is told of; before one of OPENED_BY nothing is written."""
WAITING_EVENTS = 10_000
"""About 10 MB, kept while a tracker takes nothing."""
CLOSING_SECONDS = 30.0
"""For all trackers of a run together, to write what is left."""


def points(event: Mapping[str, Any]) -> dict[str, float]:
    """The values that an event adds to curves, by the name of each curve."""
    kind = event.get("event", "")
    shown = "test" if kind == "eval" and event.get("split") == "test" else kind
    return {  # events hold "nan" and "inf" as text, which float() understands
        curve: float(event[field])
        for field, curve in CURVES.get(shown, {}).items()
        if event.get(field) is not None
    }


class TrackerUnavailable(ExpertError):
    """A tracker that was asked for cannot be used; training continues without it."""


class TrackerFailed(Exception):
    """What the process of a tracker says about its end."""


class Writer(Protocol):
    """What draws; all of it is called by the thread of its tracker, and may raise."""

    def write(self, event: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


Tell = Callable[[str], None]
MakeWriter = Callable[[Path, Tell], Writer]
"""Makes the writer of a run folder, and says by Tell what is worth to know."""


@dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """What a tracker writes, and with what."""

    title: str
    package: str
    open: MakeWriter


class Tracker:
    """A reader of events that hands them to a thread; after a failure it warns once and is silent.

    Whatever it has to say is said by whoever calls it: the thread never emits an event.
    """

    def __init__(
        self,
        kind: TrackerKind,
        run: Path,
        *,
        warn: Callable[[str], None],
        waiting: int = WAITING_EVENTS,
    ) -> None:
        self._kind, self._run, self._warn = kind, run, warn
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(waiting)
        self._said: deque[str] = deque()
        self._writer: Writer | None = None
        self._begun = self._broken = self._closed = self._dropped = False
        self._thread = threading.Thread(target=self._work, name=kind.title, daemon=True)
        self._thread.start()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Passes on what the event has to show, without waiting."""
        self._speak()
        if self._broken or self._closed:
            return
        kind, has_points = event.get("event"), bool(points(event))
        self._begun = self._begun or has_points or kind in OPENED_BY
        if self._begun and (has_points or kind in OTHERS_READ):
            try:
                self._queue.put_nowait(dict(event))
            except queue.Full:
                if not self._dropped:
                    self._dropped = True
                    self._say("are too slow and miss values")
                    self._speak()

    def end(self) -> bool:
        """Ask the thread to write what is left and close; whether it was told."""
        if not self._closed:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
                self._closed = True
        return self._closed

    def close(self, ends_at: float | None = None) -> None:
        """Writes what is left, at most until that moment; events after this are ignored."""
        until = time.monotonic() + CLOSING_SECONDS if ends_at is None else ends_at
        if not self.end():
            with suppress(queue.Full):
                self._queue.put(None, timeout=max(0.0, until - time.monotonic()))
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._say(f"could not be finished within {CLOSING_SECONDS:g} s")
            self._broken = True
            if isinstance(self._writer, ProcessWriter):
                self._writer.stop()
        self._speak()

    def _work(self) -> None:
        """In a thread: open, write, close."""
        try:
            while (event := self._queue.get()) is not None:
                if self._writer is None:
                    self._writer = self._kind.open(self._run, self._said.append)
                self._writer.write(event)
            if self._writer is not None:
                self._writer.close()
        except Exception as error:  # noqa: BLE001 - curves are no reason to end a run
            own = isinstance(error, TrackerFailed | ExpertError)
            if not self._broken:
                why = str(error) if own else f"{type(error).__name__}: {error}"
                self._say(f"are no longer written: {why}")
            self._broken = True

    def _say(self, what: str) -> None:
        self._said.append(f"{self._kind.title} {what}  (events.jsonl has all values)")

    def _speak(self) -> None:
        while self._said:
            self._warn(self._said.popleft())


class CurveWriter(Protocol):
    """What is used of SummaryWriter."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int, walltime: float | None
    ) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


MakeFiles = Callable[[Path, int | None], CurveWriter]
"""Makes files in a folder; points from the given step on in older files are hidden."""


class TensorBoardWriter:
    """Event files in the run folder."""

    def __init__(self, run: Path, tell: Tell, make: MakeFiles | None = None) -> None:
        self._folder, self._make = run / "tensorboard", make or _summary_writer
        self._files: CurveWriter | None = None

    def write(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event", "")
        undone = kind in ("rolled_back", "resumed")
        if undone:  # the curve continues there; what was undone is hidden
            self.close()
        if self._files is None:
            first = int(event.get("to_step", event["step"])) + 1 if undone else None
            refuse_links(self._folder, below=self._folder.parent)  # each time it is opened
            self._files = self._make(self._folder, first)
        for curve, value in points(event).items():
            self._files.add_scalar(curve, value, int(event["step"]), event.get("time"))
        if kind in FLUSHED_AFTER:
            self._files.flush()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None


_excepthook: list[Callable[[threading.ExceptHookArgs], object]] = [threading.excepthook]


def _thread_ended(about: threading.ExceptHookArgs) -> None:
    """The thread of TensorBoard that writes keeps what it could not do, and the next curve raises
    it: a traceback on standard error would tell it twice."""
    if not type(about.thread).__module__.startswith("tensorboard."):
        _excepthook[0](about)


def _summary_writer(folder: Path, first_step: int | None) -> CurveWriter:
    """Torch's writer of event files."""
    from torch.utils.tensorboard import SummaryWriter

    if threading.excepthook is not _thread_ended:
        _excepthook[:] = [threading.excepthook]
        threading.excepthook = _thread_ended
    writer: CurveWriter = SummaryWriter(str(folder), purge_step=first_step)
    return writer


class ProcessWriter:
    """Hands events to a process that has imported somebody else's package: that may print, wait
    for a network, or crash."""

    def __init__(self, name: str, run: Path, tell: Tell, command: tuple[str, ...] = ()) -> None:
        own = (sys.executable, "-P", "-m", "expert.telemetry.tracker_process", name, str(run))
        self._child, self._tell = Child(command or own), tell

    def write(self, event: Mapping[str, Any]) -> None:
        taken = self._child.ask(event)
        self._hear(0.0 if taken else CLOSING_SECONDS)
        if not taken:
            raise self._ended()

    def close(self) -> None:
        self._child.ask({"event": "close"})
        if not self._hear(2 * CLOSING_SECONDS):  # by then its tracker has given up
            raise self._ended()
        self._child.stop()

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._child.stop()

    def _hear(self, seconds: float) -> bool:
        """Hand on what it says within this time; whether it has ended properly."""
        ends_at = time.monotonic() + seconds
        while said := self._child.next(ends_at):
            if "failed" in said:
                self._child.stop()
                raise TrackerFailed(str(said["failed"]))
            if said.get("closed"):
                return True
            self._tell(str(said.get("said")))
        return False

    def _ended(self) -> TrackerFailed:
        code = self._child.stop()
        words = self._child.last_words()
        return TrackerFailed(f"its process {how_it_ended(code)}" + (f": {words}" if words else ""))


def _in_a_process(name: str) -> MakeWriter:
    return lambda run, tell: ProcessWriter(name, run, tell)


TRACKERS = {
    "tensorboard": TrackerKind(
        title="TensorBoard files", package="tensorboard", open=TensorBoardWriter
    ),
    "wandb": TrackerKind(title="W&B curves", package="wandb", open=_in_a_process("wandb")),
    "mlflow": TrackerKind(title="MLflow curves", package="mlflow", open=_in_a_process("mlflow")),
    "trackio": TrackerKind(
        title="Trackio curves", package="trackio", open=_in_a_process("trackio")
    ),
}


def check_installed(name: str) -> None:
    """Raises TrackerUnavailable where the package of a tracker is missing."""
    try:
        if name == "tensorboard":  # here, and not in a thread beside other imports of torch
            import torch.utils.tensorboard  # noqa: F401
        else:  # a folder of that name, where a run was started, is not the package
            found = importlib.util.find_spec(TRACKERS[name].package)
            if found is None or found.origin is None:
                raise ImportError(f"No module named {TRACKERS[name].package!r}")
    except (ImportError, ValueError) as error:
        raise TrackerUnavailable(
            f"trackers: {name} needs the Python package {TRACKERS[name].package} ({error})  "
            f"({pip_install(name)}, or remove it from trackers)"
        ) from error


def open_trackers(names: Iterable[str], run: Path, warn: Callable[[str], None]) -> list[Tracker]:
    """The trackers of a run that can be opened; a warning for each that cannot."""
    opened = []
    for name in dict.fromkeys(names):
        try:
            check_installed(name)
        except TrackerUnavailable as error:
            warn(str(error))
        else:
            opened.append(Tracker(TRACKERS[name], run, warn=warn))
    return opened


def close_trackers(trackers: Sequence[Tracker]) -> None:
    """Write what is left, all within one limit."""
    ends_at = time.monotonic() + CLOSING_SECONDS
    for tracker in trackers:
        tracker.end()
    for tracker in trackers:
        tracker.close(ends_at)
