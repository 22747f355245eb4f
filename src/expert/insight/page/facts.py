"""The measured numbers of a run; None where one is missing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from expert.core.events import Event
from expert.insight.findings.finding import Finding
from expert.insight.findings.verdict import Verdict
from expert.insight.outcome import Outcome
from expert.insight.page.blocks import Point
from expert.insight.record import RunRecord, listed
from expert.insight.step.anatomy import Anatomy, LogLine, finite, numbers, session_clock

UNKNOWN_SPEED = Verdict(kind="unknown", sentence="")
UNKNOWN_LEARNING = Outcome(kind="unknown", sentence="")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a page shows of one run; `state`: running, finished, stopped, failed or gone."""

    record: RunRecord
    anatomy: Anatomy
    state: str
    because: str = ""
    verdict: Verdict = UNKNOWN_SPEED
    learning: Outcome = UNKNOWN_LEARNING
    findings: tuple[Finding, ...] = ()
    """Worst first."""

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
    def lines(self) -> list[LogLine]:
        """The log lines in order; if a step was taken twice, the second."""
        recorded = {finite(line.event.get("step")) or 0.0: line for line in self.anatomy.lines}
        return [recorded[step] for step in sorted(recorded)]

    @cached_property
    def steps(self) -> list[Event]:
        return [line.event for line in self.lines]

    def column(self, key: str) -> list[float | None]:
        """A value of every log line, in order."""
        return numbers([event.get(key) for event in self.steps])

    def amounts(self, key: str) -> list[float]:
        """A value of every log line, 0 where missing: for running sums."""
        return [value or 0.0 for value in self.column(key)]

    def points(self, key: str) -> list[Point]:
        """A value of the log lines by step; None where a line lacks it."""
        return list(zip(self.amounts("step"), self.column(key), strict=True))

    def average(self, key: str) -> float | None:
        """Over the lines after warm-up, or all if there are no others."""
        found = numbers([line.event.get(key) for line in self.anatomy.steady])
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else None

    @cached_property
    def tokens_per_second(self) -> float | None:
        """Tokens over the time of their steps, after warm-up."""
        settled = [line.event for line in self.anatomy.steady]
        pairs = [numbers([event.get("tokens"), event.get("seconds")]) for event in settled]
        known = [(tokens, seconds) for tokens, seconds in pairs if tokens and seconds]
        total = sum(seconds for _, seconds in known)
        return sum(tokens for tokens, _ in known) / total if total else None

    @cached_property
    def last_loss(self) -> tuple[float, float] | None:
        """Step and loss of the last log line with a loss: the mean since the line before, as in the
        terminal and in `expert watch`."""
        known = [(at, loss) for at, loss in self.points("loss") if loss is not None]
        return known[-1] if known else None

    @cached_property
    def memory_peak(self) -> tuple[float, str] | None:
        """The highest memory use seen, and whose it is."""
        for key, whose in (
            ("peak_reserved_bytes", "reserved by this run"),
            ("gpu_process_memory_bytes", "of this process"),
            ("gpu_memory_bytes", "in use on the card"),
        ):
            found = [value for value in self.column(key) if value is not None]
            if found:
                return max(found), whose
        return None

    # --- other events ----------------------------------------------------------------------------

    @cached_property
    def evals(self) -> list[Event]:
        """Evaluations in order; if a step was evaluated twice, the second."""
        recorded: dict[float, Event] = {}
        for event in self.record.of("eval"):
            step = finite(event.get("step"))
            if step is not None and event.get("split", "validation") == "validation":
                recorded[step] = event
        return [recorded[step] for step in sorted(recorded)]

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
        """Tokens so far: the run's own total, else its epochs plus the log lines after them."""
        recorded = finite(self.finished.get("tokens"))
        if recorded is not None and self.finished.get("step") == self.updates:
            return recorded
        epochs = {event.get("epoch"): event for event in self.record.of("epoch")}.values()
        since = max((finite(event.get("step")) or 0.0 for event in epochs), default=0.0)
        rest = [event for event in self.steps if (finite(event.get("step")) or 0.0) > since]
        return sum(finite(event.get("tokens")) or 0.0 for event in (*epochs, *rest)) or None

    @cached_property
    def skipped_windows(self) -> list[tuple[float, float]]:
        """First and last step of every window that a rollback skipped."""
        recorded = [listed(event.get("skipped")) for event in self.record.of("rolled_back")]
        windows = [numbers(listed(window)) for window in (recorded[-1] if recorded else ())]
        known = [[edge + 1 for edge in window if edge is not None] for window in windows]
        return [(window[0], window[1]) for window in known if len(window) == 2]

    @cached_property
    def clock(self) -> list[float]:
        """Seconds of every event since the start, without pauses before a resume."""
        return session_clock(self.record.events)

    @property
    def seconds(self) -> float | None:
        return self.clock[-1] if self.clock else None
