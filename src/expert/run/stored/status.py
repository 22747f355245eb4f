"""The status of a run from its events, and its events as they are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from expert.core.events import Event, follow, read_events
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
    """The mean of the steps since the previous step event; for a finished run only if the last
    event was at its last step."""
    mean_loss: float | None
    """Over the whole run, once finished."""
    rate: float | None
    tokens_per_second: float | None
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
    status = status_by(events, folder)
    return replace(status, damaged_lines=events.damaged)


def status_by(events: Iterable[Event], folder: RunFolder, *, damaged_lines: int = 0) -> RunStatus:
    """The status of a run from events already read: reading those of a long run takes seconds."""
    seen: dict[str, Any] = {}
    ending: Event | None = None
    fallbacks: list[str] = []
    last: Event = {}
    evals: dict[Any, Any] = {}
    for event in events:
        kind = str(event["event"])
        last = event
        if kind in ENDINGS:
            ending = event
        elif kind in ("started", "resumed"):
            ending = None
        elif kind == "fell_back":
            fallbacks.append(": ".join(str(event.get(k)) for k in ("failure", "reason")))
        evals = _evals(evals, event)
        seen.update(_facts(with_moved_paths(event, folder)))
        seen.update(_peaks(seen, event))
    seen |= _of_evals(evals)
    state, because = state_of(folder, ending)
    if state == "finished" and ending is not None:
        seen |= _final_values(seen, ending)
    known = {name: seen.get(name) for name in _KEPT}
    return RunStatus(
        folder=folder.path,
        state=state,
        because=because,
        **known,
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
_EVALS = ("eval_loss", "best_eval_loss", "best_eval_step")
_KEPT = (*_STARTED, *_STEP, *_PEAKS, "mean_loss", *_EVALS, "test_loss", "last_checkpoint")


def _facts(event: Event) -> dict[str, Any]:
    kind = event["event"]
    if kind == "started":
        return {name: event.get(name) for name in _STARTED}
    if kind == "step":
        facts = {name: event.get(name) for name in _STEP}
        return {**facts, "loss_at": event.get("step"), "epoch_at": event.get("step")}
    if kind == "epoch":
        return {"epoch": event.get("epoch"), "epoch_at": event.get("step")}
    if kind == "eval" and event.get("split") == "test":
        return {"test_loss": event.get("loss")}
    reached = {"step": event["step"]} if kind in _REACHED and "step" in event else {}
    if kind == "resumed":
        return {**reached, "test_loss": None}  # it belonged to the earlier weights
    if kind == "saved":
        return {**reached, "last_checkpoint": event.get("path")}
    return reached


def _peaks(seen: dict[str, Any], event: Event) -> dict[str, Any]:
    """The highest peaks so far: torch resets its own when the plan changes."""
    known = {
        name: [value for value in (seen.get(name), event.get(field)) if isinstance(value, int)]
        for name, field in _PEAKS.items()
    }
    return {name: max(values) for name, values in known.items() if values}


def _evals(known: dict[Any, Any], event: Event) -> dict[Any, Any]:
    """The validation losses by step, after this event; undone steps are removed."""
    kind, step = event["event"], event.get("step")
    if kind == "eval" and event.get("split", "validation") == "validation":
        known.pop(step, None)  # newest last; in place, as a run has thousands
        known[step] = event.get("loss")
        return known
    if kind in ("resumed", "rolled_back"):
        step = event.get("to_step", step)
        if isinstance(step, int):
            return {at: loss for at, loss in known.items() if isinstance(at, int) and at <= step}
    return known


def _of_evals(evals: dict[Any, Any]) -> dict[str, Any]:
    if not evals:
        return {}
    facts: dict[str, Any] = {"eval_loss": list(evals.values())[-1]}
    known = {at: loss for at, loss in evals.items() if isinstance(loss, int | float)}
    if known:  # "nan" is stored as text
        best = min(known, key=lambda at: known[at])
        facts |= {"best_eval_loss": known[best], "best_eval_step": best}
    return facts


def _final_values(seen: dict[str, Any], finished: Event) -> dict[str, Any]:
    """Values of a finished run as a whole. Step events are written at intervals: values of an
    earlier step do not describe the end and are dropped."""
    last = finished.get("step")
    facts = {"mean_loss": finished.get("loss"), "eta_seconds": None}
    best = finished.get("eval_loss")
    if best is not None and best != seen.get("best_eval_loss"):
        facts |= {"best_eval_loss": best, "best_eval_step": None}
    rates = (("tokens_per_second",) * 2, ("steps_per_second",) * 2)
    for name, field in (("eval_loss", "last_eval_loss"), *rates):
        if finished.get(field) is not None:
            facts[name] = finished[field]
    if seen.get("loss_at") != last:
        facts |= {"loss": None, "rate": None}
    if seen.get("epoch_at") != last:
        facts["epoch"] = None
    return facts


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
    return holder is not None and holder.may_live


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
