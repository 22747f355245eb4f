"""Trackers draw a run's curves elsewhere, from its events, and never stop or slow it.

Each is one row of TRACKERS and one thread; third-party packages also run in their own process
(tracker_process.py). The names for manifests are `Tracker` in manifest/schema/kinds.py.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.core.links import refuse_links
from expert.core.process import Child, describe_exit

CURVES: Mapping[str, Mapping[str, str]] = {
    "step": {
        "loss": "loss/train",
        "rate": "learning_rate",
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
"""The curve for each field of each event; "test" is an evaluation of the test rows."""

FLUSHED_AFTER = frozenset({"eval", "saved", "stopped", "finished"})
OPENING_EVENTS = frozenset({"started", "resumed"})
OTHERS_READ = OPENING_EVENTS | FLUSHED_AFTER | {"rolled_back", "fell_back", "failed"}
"""Events without curves that trackers need; nothing is written before one of OPENING_EVENTS."""
WAITING_EVENTS = 10_000
"""About 10 MB, kept while a tracker is not reading."""
CLOSING_SECONDS = 30.0
"""For all trackers of a run together, to write the rest."""


def curve_values(event: Mapping[str, Any]) -> dict[str, float]:
    """The values that an event adds to curves, by curve."""
    kind = event.get("event", "")
    shown = "test" if kind == "eval" and event.get("split") == "test" else kind
    place = "" if kind == "step" else f"{shown}/"
    of_objective = {key: f"{place}{key}" for key in event if key.startswith(("rewards/", "logps/"))}
    return {  # events contain "nan" and "inf" as text, which float() understands
        curve: float(event[field])
        for field, curve in {**CURVES.get(shown, {}), **of_objective}.items()
        if event.get(field) is not None
    }


Notify = Callable[[str], None]


class TrackerKind(NamedTuple):
    """A tracker's title, and what creates its writer for a run folder. A writer has `write(event)`
    and `close()`, is called only by its tracker's thread, and may raise."""

    title: str
    open: Callable[[Path, Notify], Any]


class Tracker:
    """Passes events to a thread; after a failure it warns once and does nothing more.

    Warnings are emitted by the calling thread; the tracker's thread never emits an event.
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
        self._messages: deque[str] = deque()
        self._writer: Any = None
        self._begun = self._broken = self._closed = self._dropped = False
        self._thread = threading.Thread(target=self._work, name=kind.title, daemon=True)
        self._thread.start()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Queue the event if it matters for curves, without waiting."""
        self._send_warnings()
        if self._broken or self._closed:
            return
        kind, has_points = event.get("event"), bool(curve_values(event))
        self._begun = self._begun or has_points or kind in OPENING_EVENTS
        if self._begun and (has_points or kind in OTHERS_READ):
            try:
                self._queue.put_nowait(dict(event))
            except queue.Full:
                if not self._dropped:
                    self._dropped = True
                    self._add_warning("are too slow and miss values")
                    self._send_warnings()

    def end(self) -> bool:
        """Ask the thread to write the rest and close; False if its queue is full."""
        if not self._closed:
            with suppress(queue.Full):
                self._queue.put_nowait(None)
                self._closed = True
        return self._closed

    def close(self, ends_at: float | None = None) -> None:
        """Write the rest, until `ends_at` at most; later events are ignored."""
        until = time.monotonic() + CLOSING_SECONDS if ends_at is None else ends_at
        if not self.end():
            with suppress(queue.Full):
                self._queue.put(None, timeout=max(0.0, until - time.monotonic()))
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._add_warning(f"could not be finished within {CLOSING_SECONDS:g} s")
            self._broken = True
            if isinstance(self._writer, ProcessWriter):
                self._writer.child.stop()
        self._send_warnings()

    def _work(self) -> None:
        """The thread: open, write, close."""
        try:
            while (event := self._queue.get()) is not None:
                if self._writer is None:
                    self._writer = self._kind.open(self._run, self._messages.append)
                self._writer.write(event)
            if self._writer is not None:
                self._writer.close()
        except Exception as error:  # noqa: BLE001 - curves must not end a run
            if not self._broken:
                own = isinstance(error, ExpertError)
                why = str(error) if own else f"{type(error).__name__}: {error}"
                self._add_warning(f"are no longer written: {why}")
            self._broken = True

    def _add_warning(self, what: str) -> None:
        self._messages.append(f"{self._kind.title} {what}  (events.jsonl has all values)")

    def _send_warnings(self) -> None:
        while self._messages:
            self._warn(self._messages.popleft())


class TensorBoardWriter:
    """Event files in the run folder."""

    def __init__(self, run: Path, tell: Notify) -> None:
        self._folder = run / "tensorboard"
        self._files: Any = None

    def write(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event", "")
        undone = kind in ("rolled_back", "resumed")
        if undone:  # the curve continues from there; later values are hidden
            self.close()
        if self._files is None:
            first = int(event.get("to_step", event["step"])) + 1 if undone else None
            refuse_links(self._folder, below=self._folder.parent)  # every time it is opened
            self._files = _summary_writer(self._folder, first)
        for curve, value in curve_values(event).items():
            self._files.add_scalar(curve, value, int(event["step"]), event.get("time"))
        if kind in FLUSHED_AFTER:
            self._files.flush()

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None


def _summary_writer(folder: Path, first_step: int | None) -> Any:
    """Files in a folder; values from this step on in older files are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    outer = threading.excepthook

    def hook(about: threading.ExceptHookArgs) -> None:
        """Ignore TensorBoard's writer thread: it keeps its error, and the next curve raises it, so
        a traceback on standard error would be a second report."""
        if not type(about.thread).__module__.startswith("tensorboard."):
            outer(about)

    threading.excepthook = hook
    return SummaryWriter(str(folder), purge_step=first_step)


class ProcessWriter:
    """Passes events to a process that imports a third-party package, which may print, wait for a
    network, or crash."""

    def __init__(self, name: str, run: Path, tell: Notify, command: tuple[str, ...] = ()) -> None:
        own = (sys.executable, "-P", "-m", "expert.telemetry.tracker_process", name, str(run))
        self.child, self._tell = Child(command or own), tell

    def write(self, event: Mapping[str, Any]) -> None:
        taken = self.child.ask(event)
        self._forward_messages(0.0 if taken else CLOSING_SECONDS)
        if not taken:
            raise self._ended()

    def close(self) -> None:
        self.child.ask({"event": "close"})
        if not self._forward_messages(2 * CLOSING_SECONDS):  # by then the tracker has given up
            raise self._ended()
        self.child.stop()

    def _forward_messages(self, seconds: float) -> bool:
        """Forward its messages for this long; returns whether it has closed properly."""
        ends_at = time.monotonic() + seconds
        while message := self.child.next(ends_at):
            if "failed" in message:
                self.child.stop()
                raise ExpertError(str(message["failed"]))
            if message.get("closed"):
                return True
            self._tell(str(message.get("said")))
        return False

    def _ended(self) -> ExpertError:
        code = self.child.stop()
        words = self.child.stderr_tail()
        return ExpertError(f"its process {describe_exit(code)}" + (f": {words}" if words else ""))


TRACKERS = {
    "tensorboard": TrackerKind("TensorBoard files", TensorBoardWriter),
    "wandb": TrackerKind("W&B curves", partial(ProcessWriter, "wandb")),
    "mlflow": TrackerKind("MLflow curves", partial(ProcessWriter, "mlflow")),
    "trackio": TrackerKind("Trackio curves", partial(ProcessWriter, "trackio")),
}
"""By the name of the Python package."""


def open_trackers(names: Iterable[str], run: Path, warn: Callable[[str], None]) -> list[Tracker]:
    """The trackers of a run that can be opened; warns about each whose package is missing."""
    opened = []
    for name in dict.fromkeys(names):
        try:
            if name == "tensorboard":  # here, not in a thread while torch imports other modules
                import torch.utils.tensorboard  # noqa: F401
            else:  # a folder of that name in the working directory is not the package
                spec = importlib.util.find_spec(name)
                if spec is None or spec.origin is None:
                    raise ImportError(f"No module named {name!r}")
        except (ImportError, ValueError) as error:
            warn(
                f"trackers: {name} needs the Python package {name} ({error})  "
                f"({pip_install(name)}, or remove it from trackers)"
            )
        else:
            opened.append(Tracker(TRACKERS[name], run, warn=warn))
    return opened


def close_trackers(trackers: Sequence[Tracker]) -> None:
    """Write the rest, all within one time limit."""
    ends_at = time.monotonic() + CLOSING_SECONDS
    for tracker in trackers:
        tracker.end()
    for tracker in trackers:
        tracker.close(ends_at)
