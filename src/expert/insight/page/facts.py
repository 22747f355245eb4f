"""The measured numbers of a run; None where one is missing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from expert.core.events import Event
from expert.insight.findings.finding import Finding
from expert.insight.findings.verdict import Verdict
from expert.insight.outcome import Outcome
from expert.insight.page.figures import Point, has_values
from expert.insight.record import RunRecord
from expert.insight.step.anatomy import Anatomy, finite, numbers, session_clock


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a page shows of one run; `state`: running, finished, stopped, failed or gone."""

    record: RunRecord
    anatomy: Anatomy
    state: str
    because: str
    """How the run ended, in words; empty while it runs."""
    verdict: Verdict
    learning: Outcome
    """Whether it learned, as far as its losses show."""
    findings: tuple[Finding, ...]
    """Worst first."""
    resume_command: str = ""
    """The command that resumes it as it was started, if it ended early."""

    def as_dict(self) -> dict[str, Any]:
        step, spent = self.anatomy.step, self.anatomy.run
        update = None
        if step is not None:
            update = {**asdict(step), "wall": step.wall, "idle_share": step.idle_share}
        return {
            "run": str(self.record.folder),
            "state": self.state,
            "expert": self.started.get("expert"),
            "step": None if self.updates is None else int(self.updates),
            "verdict": asdict(self.verdict),
            "learning": asdict(self.learning),
            "seconds": {**asdict(spent), "rest": spent.rest},
            "update": update,
            "findings": [asdict(finding) for finding in self.findings],
        }

    @cached_property
    def name(self) -> str:
        return self.record.folder.resolve().name

    @cached_property
    def started(self) -> Event:
        return next(iter(self.record.of("started")), {})

    @cached_property
    def finished(self) -> Event:
        return next(iter(reversed(self.record.of("finished"))), {})

    @cached_property
    def on_gpu(self) -> bool:
        return self.record.on_gpu or any("gpu_utilization" in event for event in self.steps[-5:])

    # --- log lines -------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> list[Event]:
        """The log lines in order; if a step was taken twice, the second."""
        events = [line.event for line in self.anatomy.lines]
        recorded = {finite(event.get("step")) or 0.0: event for event in events}
        return [recorded[step] for step in sorted(recorded)]

    def column(self, key: str) -> list[float | None]:
        """A value of every log line, in order."""
        return numbers([event.get(key) for event in self.steps])

    def amounts(self, key: str) -> list[float]:
        """A value of every log line, 0 where missing: for running sums."""
        return [value or 0.0 for value in self.column(key)]

    def points(self, key: str) -> list[Point]:
        """A value of the log lines by step; None where a line lacks it."""
        return list(zip(self.amounts("step"), self.column(key), strict=True))

    @cached_property
    def smooth_loss(self) -> list[Point]:
        """The smoothed loss of every log line, as in the terminal and in `expert watch`; the logged
        one of a run that has no other."""
        recorded = self.points("smoothed_loss")
        return recorded if has_values(recorded) else self.points("loss")

    @cached_property
    def last_loss(self) -> tuple[float, float] | None:
        """Step and smoothed loss of the last log line."""
        known = [(at, loss) for at, loss in self.smooth_loss if loss is not None]
        return known[-1] if known else None

    @cached_property
    def memory_peak(self) -> float | None:
        """The peak of what the run reserved on its card, or on a CPU of its RAM."""
        sizes = self.column("peak_reserved_bytes" if self.on_gpu else "cpu_peak_memory_bytes")
        return max((size for size in sizes if size is not None), default=None)

    # --- other events ----------------------------------------------------------------------------

    @property
    def evals(self) -> list[Event]:
        return self.record.evals

    def eval_points(self, key: str) -> list[Point]:
        return [(float(event["step"]), finite(event.get(key))) for event in self.evals]

    @cached_property
    def best_eval(self) -> Event | None:
        known = [event for event in self.evals if finite(event.get("loss")) is not None]
        return min(known, key=lambda event: float(event["loss"]), default=None)

    @cached_property
    def total_steps(self) -> float | None:
        """Planned steps; a resumed run may have been extended."""
        recorded = numbers([event.get("total_steps") for event in self.record.of("started")])
        return recorded[-1] if recorded else None

    @cached_property
    def updates(self) -> float | None:
        """Steps so far; the last log line may be earlier."""
        ends = ("finished", "stopped", "saved", "epoch", "step")
        recorded = [event for event in self.record.events if event.get("event") in ends]
        known = [step for step in numbers([e.get("step") for e in recorded]) if step is not None]
        return known[-1] if known else None

    @cached_property
    def tokens(self) -> float | None:
        """Tokens so far: the run's own total, else those of the log lines."""
        recorded = finite(self.finished.get("tokens"))
        if recorded is not None and self.finished.get("step") == self.updates:
            return recorded
        return sum(self.amounts("tokens")) or None

    @cached_property
    def clock(self) -> list[float]:
        """Seconds of every event since the start, without pauses before a resume."""
        return session_clock(self.record.events)

    @property
    def seconds(self) -> float | None:
        return self.clock[-1] if self.clock else None
