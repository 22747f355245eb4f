"""How a run stands by its events, and its events as they are written."""

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
ENDED_BEFORE: tuple[State, ...] = ("gone", "stopped", "failed")
"""A run that can be resumed."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run stands, by its events; None is what they do not tell."""

    folder: Path
    state: State
    because: str
    """How it ended, in words; empty while it continues."""
    expert: str | None
    model: str | None
    device: str | None
    step: int | None
    total_steps: int | None
    epoch: float | None
    epochs: float | None
    loss: float | None
    """Of the last line: the mean of the steps since the line before; of a finished run only where
    that line was of its last step."""
    mean_loss: float | None
    """Of the whole run, once it has finished."""
    rate: float | None
    tokens_per_second: float | None
    steps_per_second: float | None
    gpu_utilization: float | None
    """Percent of the time in which the card was at work, over the last line; None on a CPU."""
    gpu_peak_memory_bytes: int | None
    """The most that the run had of the card; None on a CPU."""
    cpu_peak_memory_bytes: int | None
    """The most that the process had of the host, where it trains on that; None on a card."""
    eta_seconds: float | None
    eval_loss: float | None
    """On the validation rows, the last time that they were looked at."""
    best_eval_loss: float | None
    """The lowest that was seen there."""
    best_eval_step: int | None
    test_loss: float | None
    """On the test rows, once the run has finished."""
    last_checkpoint: str | None
    fallbacks: tuple[str, ...]
    last_event: float | None
    """When the last event was written, in seconds since 1970."""
    final: str | None
    damaged_lines: int


def run_status(folder: RunFolder) -> RunStatus:
    """What the events of a run say by now; a torn last line is left out."""
    events = read_events(folder.events)
    status = status_by(events, folder)
    return replace(status, damaged_lines=events.damaged)


def status_by(events: Iterable[Event], folder: RunFolder, *, damaged_lines: int = 0) -> RunStatus:
    """What events that were read say of a run; those of a long run are read in seconds, so whoever
    has them need not have them read again."""
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
        seen.update(_facts(placed(event, folder)))
        seen.update(_peaks(seen, event))
    seen |= _of_evals(evals)
    state, because = state_of(folder, ending)
    if state == "finished" and ending is not None:
        seen |= _at_the_end(seen, ending)
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
"""What is kept of a run, and the field of its step events."""
_REACHED = ("saved", "finished", "stopped", "rolled_back", "resumed")
"""Events that say which step was the last one; those of steps come only now and then."""
_EVALS = ("eval_loss", "best_eval_loss", "best_eval_step")
_KEPT = (*_STARTED, *_STEP, *_PEAKS, "mean_loss", *_EVALS, "test_loss", "last_checkpoint")


def _facts(event: Event) -> dict[str, Any]:
    """What an event tells about where the run stands."""
    kind = event["event"]
    if kind == "started":
        return {name: event.get(name) for name in _STARTED}
    if kind == "step":
        told = {name: event.get(name) for name in _STEP}
        return {**told, "told_at": event.get("step"), "epoch_at": event.get("step")}
    if kind == "epoch":
        return {"epoch": event.get("epoch"), "epoch_at": event.get("step")}
    if kind == "eval" and event.get("split") == "test":
        return {"test_loss": event.get("loss")}
    reached = {"step": event["step"]} if kind in _REACHED and "step" in event else {}
    if kind == "resumed":
        return {**reached, "test_loss": None}  # that was of the weights before
    if kind == "saved":
        return {**reached, "last_checkpoint": event.get("path")}
    return reached


def _peaks(seen: dict[str, Any], event: Event) -> dict[str, Any]:
    """The highest peaks after this event: torch's own is set back where a plan is changed."""
    known = {
        name: [value for value in (seen.get(name), event.get(field)) if isinstance(value, int)]
        for name, field in _PEAKS.items()
    }
    return {name: max(values) for name, values in known.items() if values}


def _evals(known: dict[Any, Any], event: Event) -> dict[Any, Any]:
    """The losses on the validation rows by step, after this event; what was undone is gone."""
    kind, step = event["event"], event.get("step")
    if kind == "eval" and event.get("split", "validation") == "validation":
        known.pop(step, None)  # the newest last; in place: a run has thousands
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
    found: dict[str, Any] = {"eval_loss": list(evals.values())[-1]}
    known = {at: loss for at, loss in evals.items() if isinstance(loss, int | float)}
    if known:  # the file holds "nan" as text
        best = min(known, key=lambda at: known[at])
        found |= {"best_eval_loss": known[best], "best_eval_step": best}
    return found


def _at_the_end(seen: dict[str, Any], finished: Event) -> dict[str, Any]:
    """What holds of a finished run as a whole. Steps are told of now and then: what was said of an
    earlier one is not how the run ended, and is left out."""
    last = finished.get("step")
    facts = {"mean_loss": finished.get("loss"), "eta_seconds": None}
    best = finished.get("eval_loss")
    if best is not None and best != seen.get("best_eval_loss"):
        facts |= {"best_eval_loss": best, "best_eval_step": None}
    rates = (("tokens_per_second",) * 2, ("steps_per_second",) * 2)
    for name, told in (("eval_loss", "last_eval_loss"), *rates):
        if finished.get(told) is not None:
            facts[name] = finished[told]
    if seen.get("told_at") != last:
        facts |= {"loss": None, "rate": None}
    if seen.get("epoch_at") != last:
        facts["epoch"] = None
    return facts


def state_of(folder: RunFolder, ending: Event | None) -> tuple[State, str]:
    """How a run stands by the event that ended it, if one did, and why, in words."""
    if ending is not None:
        because = str(ending.get("reason") or ending.get("error") or "")
        return ENDINGS[ending["event"]], because
    if trainer_lives(folder):
        return "running", ""
    return "gone", "the trainer ended without a final event: killed, or the machine went down"


def trainer_lives(folder: RunFolder) -> bool:
    """Whether somebody holds the run; of a process on another machine nothing else is known."""
    holder = holder_of(folder.lock_file)
    if holder is None:
        return False
    return holder.host != socket.gethostname() or is_alive(holder.pid)


def follow_run(
    folder: RunFolder, *, poll: float = 0.5, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Event]:
    """The events of a run from the first on, until it has ended or its trainer is gone."""
    ended = False

    def over() -> bool:
        return ended or not trainer_lives(folder)

    for event in follow(folder.events, over, poll, sleep=sleep):
        kind = str(event["event"])
        if kind in ENDINGS:
            ended = True
        elif kind in ("started", "resumed"):
            ended = False  # it was resumed after that end
        yield placed(event, folder)


def placed(event: Event, folder: RunFolder) -> Event:
    """An event whose paths lead to its run from here: they were written where it was started, and
    the run may have been moved since."""
    kind = event["event"]
    if kind == "started" and event.get("run"):
        return {**event, "run": str(folder.path)}
    if kind == "finished" and event.get("final"):
        return {**event, "final": str(folder.final)}
    if kind in ("saved", "resumed", "rejected") and event.get("path"):
        return {**event, "path": str(folder.checkpoints / Path(str(event["path"])).name)}
    return event
