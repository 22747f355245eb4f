"""Where the time went: in the whole run, and in an average step after warm-up.

Everything is read from events. A step is the median over the log lines, so that one hiccup does not
dominate; anything a run did not record is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from expert.core.events import Event
from expert.insight.record import RunRecord

PHASES = (
    *("data_wait", "answers", "copy", "forward", "backward", "communication", "optimizer", "other"),
)
PHASE_NAMES = {
    "data_wait": "waiting for data",
    "answers": "answering, judging",
    "copy": "copying",
    "forward": "forward",
    "backward": "backward",
    "communication": "summing over GPUs",
    "optimizer": "optimizer",
    "compute": "computing",
    "other": "between and other",
}
COMMUNICATION = "communication"
NOT_COMPUTING = ("data_wait", "copy", "other", COMMUNICATION)
WARMUP_STEPS = 3
"""Steps that compile and fill caches after a start or a change of plan, as the meter counts
them."""
SESSION_STARTS = ("started", "resumed", "rejected")
"""The first events of a session; the time before them may be a pause."""
MAX_NUMBER = 1e100
"""Larger numbers are damaged or hostile: sums and axes of them overflow."""
WARMUP_STARTS = ("started", "resumed", "fell_back", "rolled_back", "compiled")


@dataclass(frozen=True, kw_only=True)
class StepAnatomy:
    """One average step, in seconds. On a device, phases are device time."""

    phases: Mapping[str, float]
    copies_beside: bool = False
    """Copies overlapped with computing on a separate stream, so they take no time of the step."""
    feed: float | None = None
    """Seconds spent making the batches, whether or not the device waited for them."""
    updates: int = 1
    settled: bool = True
    """False if the run was too short for a steady step, so that this is one of its first."""
    tokens: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    mfu: float | None = None
    padding: float | None = None
    ran_dry: float | None = None
    gpu_utilization: float | None = None
    """0 to 1, from NVML: the share of time in which any kernel ran."""

    def of(self, phase: str) -> float:
        return self.phases.get(phase, 0.0)

    @property
    def compute(self) -> float:
        return sum(s for name, s in self.phases.items() if name not in NOT_COMPUTING)

    @property
    def exposed_copy(self) -> float:
        """Copying that the device waited for."""
        return 0.0 if self.copies_beside else self.of("copy")

    @property
    def wall(self) -> float:
        waited = self.of("data_wait") + self.of(COMMUNICATION)
        return self.compute + waited + self.exposed_copy + self.of("other")

    @property
    def idle_share(self) -> float | None:
        """The part of a step in which the device computed nothing."""
        return 1 - self.compute / self.wall if self.wall > 0 else None

    def share(self, phase: str) -> float:
        seconds = self.exposed_copy if phase == "copy" else self.of(phase)
        return seconds / self.wall if self.wall > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """Seconds of the whole run, added up over sessions; pauses between sessions do not count."""

    loading: float = 0.0
    compiling: float = 0.0
    training: float = 0.0
    evaluating: float = 0.0
    saving: float = 0.0
    total: float = 0.0

    @property
    def start(self) -> float:
        return self.loading + self.compiling

    @property
    def rest(self) -> float:
        known = self.start + self.training + self.evaluating + self.saving
        return max(0.0, self.total - known)


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A log line: how many steps it covers, and whether they came after warm-up."""

    event: Event
    updates: int
    settled: bool


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Both views; `step` is None if no step finished."""

    run: RunTimes = RunTimes()
    step: StepAnatomy | None = None
    lines: Sequence[LogLine] = field(default=(), repr=False)

    @cached_property
    def steady(self) -> list[LogLine]:
        """The lines that medians are taken over: those after warm-up, or all if there are none."""
        return [line for line in self.lines if line.settled] or list(self.lines)


def dissect(run: RunRecord) -> Anatomy:
    """Where the time of a run and of its steps went."""
    lines = list(log_lines(run.events))
    step = average_step(Anatomy(lines=lines).steady, on_gpu=run.on_gpu)
    usual = step.wall if step is not None and step.settled else 0.0
    return Anatomy(run=run_times(run.events, usual), step=step, lines=lines)


# --- an average step ---------------------------------------------------------------------------


def log_lines(events: Sequence[Event]) -> Iterator[LogLine]:
    """Every step event with the number of steps it covers, from the event or the step numbers."""
    before, unsettled_until = 0, WARMUP_STEPS
    for event in events:
        step = number(event, "step")
        if event.get("event") in WARMUP_STARTS:
            here = int(step or 0) - (event["event"] == "compiled")  # written after that step
            unsettled_until = max(0, here) + WARMUP_STEPS
            before = min(before, max(0, here))  # a rollback repeats steps
        elif event.get("event") == "step" and step is not None:
            recorded = number(event, "updates")
            count = int(recorded) if recorded else max(1, int(step) - before)
            yield LogLine(event=event, updates=count, settled=int(step) - count >= unsettled_until)
            before = int(step)


def average_step(chosen: Sequence[LogLine], *, on_gpu: bool) -> StepAnatomy | None:
    """The median step; None if no line has its time."""

    def usual(name: str) -> float | None:
        # A sum of each line, divided by its steps.
        known = [(number(line.event, name), line.updates) for line in chosen]
        found = [value / updates for value, updates in known if value is not None]
        return statistics.median(found) if found else None

    wall = usual("seconds")
    if wall is None:
        return None
    known = {name: usual(f"time_{name}") for name in PHASES}
    times = {name: seconds for name, seconds in known.items() if seconds is not None}
    # Packed batches are copied to a card on a separate stream.
    together = sum(s for name, s in times.items() if not (on_gpu and name == "copy"))
    if wall > together:  # time between steps: logging, Python, a waiting device
        times["other"] = times.get("other", 0.0) + wall - together
    use = median(chosen, "gpu_utilization")
    return StepAnatomy(
        phases=times,
        copies_beside=on_gpu,
        feed=usual("time_feed"),
        updates=sum(line.updates for line in chosen),
        settled=any(line.settled for line in chosen),
        tokens=usual("tokens"),
        # As the run itself reported it, once its steps had settled.
        tokens_per_second=number(chosen[-1].event, "median_tokens_per_second")
        or median(chosen, "tokens_per_second"),
        samples_per_second=median(chosen, "samples_per_second"),
        mfu=median(chosen, "mfu"),
        padding=median(chosen, "padding"),
        ran_dry=median(chosen, "ran_dry"),
        gpu_utilization=use / 100 if use is not None else None,
    )


def median(lines: Sequence[LogLine], name: str) -> float | None:
    values = [number(line.event, name) for line in lines]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def number(event: Mapping[str, Any], name: str) -> float | None:
    """A finite number of an event; None for text such as "nan" and anything else."""
    return finite(event.get(name))


def finite(value: object) -> float | None:
    """A number below MAX_NUMBER; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MAX_NUMBER < value < MAX_NUMBER else None


def numbers(values: Iterable[object]) -> list[float | None]:
    """Every value as a finite number or None."""
    return [finite(value) for value in values]


# --- the whole run -------------------------------------------------------------------------------


_PARTS = {
    "loaded": "loading",
    "compiled": "compiling",
    "step": "training",
    "eval": "evaluating",
    "saved": "saving",
}
"""What the seconds of an event were spent on."""


def run_times(events: Sequence[Event], usual_update: float = 0.0) -> RunTimes:
    """Seconds by purpose. `usual_update` is subtracted from steps that also compiled."""
    sums = dict.fromkeys(_PARTS.values(), 0.0)
    for event in events:
        kind = event.get("event")
        if kind in _PARTS:
            seconds = number(event, "seconds") or 0.0
            sums[_PARTS[kind]] += max(0.0, seconds - usual_update * (kind == "compiled"))
    ended = [e for e in events if e.get("event") == "finished"]
    whole = number(ended[-1], "seconds") if ended else None
    training = max(sums["training"], whole or 0.0)  # `whole` includes steps after the last log line
    sums["training"] = max(0.0, training - sums["compiling"])
    total = session_clock(events)[-1] if events else 0.0
    return RunTimes(**sums, total=max(total, sum(sums.values())))


def session_clock(events: Sequence[Event]) -> list[float]:
    """Seconds since the start for every event, without pauses before a resume."""
    result: list[float] = []
    last = offset = None
    for event in events:
        now = number(event, "time")
        if now is not None:
            if last is None or offset is None:
                offset = now
            elif event.get("event") in SESSION_STARTS:
                offset += now - last
            last = now
        result.append(max(0.0, (last or 0.0) - (offset or 0.0)))
    return result
