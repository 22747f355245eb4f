"""The status of a run from its events, and its events as they are written."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from expert.core.events import Event, follow, read_events
from expert.core.publish import is_alive
from expert.core.rundir import RunFolder, holder_of

State = Literal["running", "finished", "stopped", "failed", "gone"]
ENDINGS: dict[str, State] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
RESUMABLE: tuple[State, ...] = ("gone", "stopped", "failed")
"""States of a run that can be resumed."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run from its events; None for what they do not record."""

    folder: Path
    state: State
    because: str
    """How it ended, in words; empty while it runs."""
    expert: str | None
    model: str | None
    device: str | None
    step: int | None
    total_steps: int | None
    epoch: float | None
    epochs: float | None
    loss: float | None
    """Smoothed over the last log lines, as in the terminal and in the report."""
    rate: float | None
    tokens_per_second: float | None
    """The median of the log lines at normal pace."""
    steps_per_second: float | None
    gpu_utilization: float | None
    """Percent of the time the card was busy, over the last step event; None on a CPU."""
    gpu_peak_memory_bytes: int | None
    """Peak GPU memory of the run; None on a CPU."""
    cpu_peak_memory_bytes: int | None
    """Peak host memory of a CPU run; None on a card."""
    eta_seconds: float | None
    eval_loss: float | None
    """On the validation rows, at the last evaluation."""
    best_eval_loss: float | None
    """The lowest on the validation rows."""
    best_eval_step: int | None
    test_loss: float | None
    """On the test rows, once finished."""
    last_checkpoint: str | None
    fallbacks: tuple[str, ...]
    last_event: float | None
    """Time of the last event, in seconds since 1970."""
    final: str | None
    damaged_lines: int


def run_status(folder: RunFolder) -> RunStatus:
    """The status of a run from its event file; an incomplete last line is ignored."""
    events = read_events(folder.events)
    return replace(status_by(events, folder), damaged_lines=events.damaged)


def status_by(events: Iterable[Event], folder: RunFolder, *, damaged_lines: int = 0) -> RunStatus:
    """The status of a run from events already read: reading those of a long run takes seconds."""
    seen: dict[str, Any] = dict.fromkeys(_FACTS)
    loss_at = epoch_at = None  # the steps that `loss` and `epoch` are about
    ending: Event | None = None
    fallbacks: list[str] = []
    last: Event = {}
    evals: dict[Any, Any] = {}  # losses by step, newest last
    for event in events:
        last, kind, step = event, event["event"], event.get("step")
        if kind in ENDINGS:
            ending = event
        elif kind in ("started", "resumed"):
            ending = None
        if kind == "started":
            seen |= {name: event.get(name) for name in _STARTED}
        elif kind == "step":
            seen |= {name: event.get(name) for name in _STEP} | _summary(event)
            loss_at = epoch_at = step
            for name, field in _PEAKS.items():  # torch resets its own when the plan changes
                if isinstance(peak := event.get(field), int):
                    seen[name] = max(seen[name] or 0, peak)
        elif kind == "epoch":
            seen["epoch"], epoch_at = event.get("epoch"), step
        elif kind == "eval" and event.get("split") == "test":
            seen["test_loss"] = event.get("loss")
            continue
        elif kind == "eval" and event.get("split", "validation") == "validation":
            evals.pop(step, None)
            evals[step] = event.get("loss")
        elif kind in ("resumed", "rolled_back"):
            back = event.get("to_step", step)
            if isinstance(back, int):  # what came after is undone
                evals = {at: was for at, was in evals.items() if isinstance(at, int) and at <= back}
            if kind == "resumed":
                seen["test_loss"] = None  # it belonged to the earlier weights
        elif kind == "saved":
            seen["last_checkpoint"] = with_moved_paths(event, folder).get("path")
        elif kind == "fell_back":
            fallbacks.append(f"{event.get('failure')}: {event.get('reason')}")
        if kind in _REACHED and step is not None:
            seen["step"] = step
    if evals:
        seen["eval_loss"] = list(evals.values())[-1]
    known = {at: value for at, value in evals.items() if isinstance(value, int | float)}
    if known:  # "nan" is stored as text
        best = min(known, key=lambda at: known[at])
        seen |= {"best_eval_loss": known[best], "best_eval_step": best}
    state, because = state_of(folder, ending)
    if state == "finished" and ending is not None:
        seen["eta_seconds"] = None
        best = ending.get("eval_loss")
        if best is not None and best != seen["best_eval_loss"]:
            seen |= {"best_eval_loss": best, "best_eval_step": None}
        of_all = {"eval_loss": "last_eval_loss", "steps_per_second": "steps_per_second"}
        of_all |= {"tokens_per_second": "tokens_per_second"}
        seen |= {name: ending[key] for name, key in of_all.items() if ending.get(key) is not None}
        seen |= _summary(ending)
        # Step events are written at intervals: an earlier one does not describe the end.
        if loss_at != ending.get("step"):
            seen["rate"] = None
            seen["loss"] = seen["loss"] if "smoothed_loss" in ending else None
        if epoch_at != ending.get("step"):
            seen["epoch"] = None
    return RunStatus(
        folder=folder.path,
        state=state,
        because=because,
        **seen,
        fallbacks=tuple(fallbacks),
        last_event=last.get("time"),
        final=str(folder.final) if state == "finished" else None,
        damaged_lines=damaged_lines,
    )


_STARTED = ("expert", "model", "device", "total_steps", "epochs")
_STEP = (
    *("step", "epoch", "loss", "rate", "tokens_per_second", "steps_per_second"),
    *("gpu_utilization", "eta_seconds"),
)
_PEAKS = {
    "gpu_peak_memory_bytes": "peak_reserved_bytes",
    "cpu_peak_memory_bytes": "cpu_peak_memory_bytes",
}
"""Peaks of the run and the fields of its step events."""
_REACHED = ("eval", "saved", "finished", "stopped", "rolled_back", "resumed")
"""Events that give the last step reached; step events are only written at intervals."""
_FACTS = (
    *(*_STARTED, *_STEP, *_PEAKS, "eval_loss", "best_eval_loss", "best_eval_step", "test_loss"),
    "last_checkpoint",
)


def _summary(event: Event) -> dict[str, Any]:
    """The numbers that describe the run up to an event."""
    fields = {"loss": "smoothed_loss", "tokens_per_second": "median_tokens_per_second"}
    return {name: event[field] for name, field in fields.items() if event.get(field) is not None}


def state_of(folder: RunFolder, ending: Event | None) -> tuple[State, str]:
    """The state of a run, given the event that ended it if any, and why, in words."""
    if ending is not None:
        because = str(ending.get("reason") or ending.get("error") or "")
        return ENDINGS[ending["event"]], because
    if trainer_is_alive(folder):
        return "running", ""
    return "gone", "the trainer ended without a final event: killed, or the machine went down"


def trainer_is_alive(folder: RunFolder) -> bool:
    """Whether a process holds the run's lock; one on another machine is assumed to be alive."""
    holder = holder_of(folder.lock_file)
    if holder is None:
        return False
    return holder.host != socket.gethostname() or is_alive(holder.pid)


def follow_run(
    folder: RunFolder, *, poll: float = 0.5, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Event]:
    """The events of a run from the first, until it ends or its trainer is gone."""
    ended = False

    def over() -> bool:
        return ended or not trainer_is_alive(folder)

    for event in follow(folder.events, over, poll, sleep=sleep):
        kind = str(event["event"])
        if kind in ENDINGS:
            ended = True
        elif kind in ("started", "resumed"):
            ended = False  # it was resumed
        yield with_moved_paths(event, folder)


def with_moved_paths(event: Event, folder: RunFolder) -> Event:
    """An event with its paths updated to the current place of the run, which may have been
    moved."""
    kind = event["event"]
    if kind == "started" and event.get("run"):
        return {**event, "run": str(folder.path)}
    if kind == "finished" and event.get("final"):
        return {**event, "final": str(folder.final)}
    if kind in ("saved", "resumed", "rejected") and event.get("path"):
        return {**event, "path": str(folder.checkpoints / Path(str(event["path"])).name)}
    return event
