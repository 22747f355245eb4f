"""Trackers: readers of events that draw a run's curves elsewhere, and never stop it.

One row of TRACKERS each. The names a manifest may use are `Tracker` of manifest/schema/config.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.core.links import refuse_links

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


class TrackerUnavailable(ExpertError):
    """A tracker that was asked for cannot be used; training continues without it."""


class CurveWriter(Protocol):
    """What is used of SummaryWriter."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int, walltime: float | None
    ) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


MakeWriter = Callable[[Path, int | None], CurveWriter]
"""Makes a writer for a folder; points from the given step on in older files are hidden."""


@dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """What a tracker writes, and with what."""

    title: str
    folder: str
    """Its place in the run folder."""
    open: MakeWriter
    """Raises TrackerUnavailable where its package is missing."""


class Tracker:
    """A reader of events that draws curves; after a failure it warns once and is silent."""

    def __init__(self, kind: TrackerKind, run: Path, *, warn: Callable[[str], None]) -> None:
        self._kind, self._folder, self._warn = kind, run / kind.folder, warn
        self._writer: CurveWriter | None = None
        self._guarded(lambda: self._open(None))

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Writes what the event has to show."""
        if self._writer is not None:
            self._guarded(lambda: self._write(event))

    def close(self) -> None:
        """Writes what is left; events after this are ignored."""
        if self._writer is not None:
            self._guarded(self._writer.close)
            self._writer = None

    def _open(self, first_step: int | None) -> None:
        refuse_links(self._folder, below=self._folder.parent)  # also where it is opened once more
        self._writer = self._kind.open(self._folder, first_step)

    def _write(self, event: Mapping[str, Any]) -> None:
        assert self._writer is not None
        kind = event.get("event", "")
        if kind in ("rolled_back", "resumed"):
            self._writer.close()  # the curve continues there; what was undone is hidden
            self._open(int(event.get("to_step", event["step"])) + 1)
            return
        shown = "test" if kind == "eval" and event.get("split") == "test" else kind
        for field, tag in CURVES.get(shown, {}).items():
            value = event.get(field)
            if value is not None:  # events hold "nan" and "inf" as text, which float() understands
                self._writer.add_scalar(tag, float(value), int(event["step"]), event.get("time"))
        if kind in FLUSHED_AFTER:
            self._writer.flush()

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except TrackerUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - curves are no reason to end a run
            self._writer = None
            self._warn(
                f"{self._folder}: {self._kind.title} are no longer written: "
                f"{type(error).__name__}: {error}  (events.jsonl has all values)"
            )


_excepthook: list[Callable[[threading.ExceptHookArgs], object]] = [threading.excepthook]


def _thread_ended(about: threading.ExceptHookArgs) -> None:
    """The thread of TensorBoard that writes keeps what it could not do, and the next curve raises
    it: a traceback on standard error would tell it twice."""
    if not type(about.thread).__module__.startswith("tensorboard."):
        _excepthook[0](about)


def _tensorboard(folder: Path, first_step: int | None) -> CurveWriter:
    """Torch's writer of event files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrackerUnavailable(
            f"trackers: tensorboard needs the Python package tensorboard ({error})  "
            f"({pip_install('tensorboard')}, or set trackers to [])"
        ) from error
    if threading.excepthook is not _thread_ended:
        _excepthook[:] = [threading.excepthook]
        threading.excepthook = _thread_ended
    writer: CurveWriter = SummaryWriter(str(folder), purge_step=first_step)
    return writer


TRACKERS = {
    "tensorboard": TrackerKind(title="TensorBoard files", folder="tensorboard", open=_tensorboard),
}


def open_trackers(names: Iterable[str], run: Path, warn: Callable[[str], None]) -> list[Tracker]:
    """The trackers of a run that can be opened; a warning for each that cannot."""
    opened = []
    for name in names:
        try:
            opened.append(Tracker(TRACKERS[name], run, warn=warn))
        except TrackerUnavailable as error:
            warn(str(error))
    return opened
