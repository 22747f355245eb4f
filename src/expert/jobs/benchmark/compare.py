"""Times two settings against each other: in turns if both fit on the device, else one after the
other.

Two processes share one device. The one that is not timed waits and computes nothing but keeps its
memory, so both are alive only if the plan's estimates of their peaks fit together. Otherwise one is
timed after the other, and the first again if that leaves a doubt.

Sequential runs alone (one process per setting, drift corrected by the baseline's first and last
rate) were tried instead of windows in turns: docs/LOG.md has the numbers, and why turns stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from expert.insight.ladder.pairs import Paired, in_turns, one_after_the_other
from expert.jobs.benchmark.pace import LEAST_WINDOWS, BenchmarkPace, Clock, window_steps
from expert.jobs.benchmark.processes import Job, MeasurementFailed, Progress, SettingProcess
from expert.planning.benchmark_settings import fit_together

if TYPE_CHECKING:
    from expert.planning.run_plan import RunPlan

FEW_STEPS = 3
"""Trained before a setting is timed again: enough to compile and to fill caches."""

Start = Callable[[Job], SettingProcess]


@dataclass
class Timed:
    """A setting that can be timed repeatedly."""

    job: Job
    process: SettingProcess | None = None
    keeps_running: bool = True
    """Whether its process remains after its loss was evaluated."""
    steps: int | None = None
    """Trained before its loss was evaluated; None before its first process."""
    rates: list[float] = field(default_factory=list)
    """Tokens per second of the most recent windows."""
    found: dict[str, Any] | None = None
    """The results; None before it was timed for the first time."""

    @property
    def plan(self) -> RunPlan:
        return self.job.plan

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    def open(self, start: Start, *, beside: Timed) -> SettingProcess:
        """Its process, started if needed; a setting measured before is only timed again."""
        if self.process is not None and self.process.alive:
            return self.process
        others = [beside.plan] if beside.alive else []
        job = replace(self.job, beside=bool(others))
        if self.found is None:
            self.keeps_running = fit_together(
                *others, self.plan, self.plan
            )  # and the evaluated model
            job = replace(job, keeps_running=self.keeps_running)
        else:
            job = replace(job, speed_only=True, steps=min(self.steps or FEW_STEPS, FEW_STEPS))
        self.process = start(job)
        self.steps = self.steps or self.process.ready.steps
        return self.process

    def finish(self) -> None:
        """Fetch the results after it was timed for the first time."""
        if self.found is not None or self.process is None:
            return
        ready = self.process.ready
        machine = {"threads": ready.threads, "cores": ready.cores, "lowered": ready.lowered}
        self.found = self.process.measured() | machine
        if not self.keeps_running:
            self.close()

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.stop()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How settings are timed: processes, time limits and progress."""

    start: Start
    pace: BenchmarkPace
    clock: Clock
    progress: Progress

    def compare(
        self, reference: Timed | None, candidate: Timed, *, again: bool = False
    ) -> Paired | None:
        """How much faster `candidate` is than `reference`; raises if that cannot be measured.

        `again`: earlier rates of `reference` are not enough.
        """
        on_card, fresh = candidate.plan.kernels.device == "cuda", candidate.found is None
        if reference is None:
            candidate.rates = self._alone(candidate)
            candidate.finish()
            return None
        if fit_together(reference.plan, candidate.plan):
            try:
                paired = self._in_turns(reference, candidate)
            except MeasurementFailed:
                if reference.alive and not on_card:
                    raise  # this setting failed, and not for lack of GPU memory
            else:
                shrunk = (
                    fresh
                    and on_card
                    and candidate.found is not None
                    and candidate.found["fallbacks"]
                )
                if not shrunk:
                    return paired
                candidate.found = None
            # The estimate for both was wrong, or one of them was lost: time it alone.
            candidate.close()
        reference.close()
        return self._one_after_the_other(reference, candidate, again=again)

    def _in_turns(self, reference: Timed, candidate: Timed) -> Paired:
        reference.open(self.start, beside=candidate)
        candidate.open(self.start, beside=reference)
        pairs = self._pairs(reference, candidate)
        reference.rates, candidate.rates = (list(rates) for rates in zip(*pairs, strict=True))
        candidate.finish()
        return in_turns(reference.job.name, pairs)

    def _pairs(self, reference: Timed, candidate: Timed) -> list[tuple[float, float]]:
        """Rates of pairs of windows. The order alternates, so that a machine that slows down
        favours neither.

        A setting is rejected only after enough pairs to rule out chance, as later plans would lose
        its gain: one that looks slower may take twice its time.
        """
        clock, pace = self.clock, self.pace
        ends = clock.spent + clock.timing_seconds(pace)
        seconds = min(pace.window_seconds, (ends - clock.spent) / (2 * pace.least_pairs))
        pairs: list[tuple[float, float]] = []
        lasts = 0.0
        while len(pairs) < pace.most_pairs:
            before, number = clock.spent, len(pairs)
            self.progress("timing in turns", number, pace.most_pairs)
            if number % 2 == 0:
                rate = _window(reference, seconds, first=number == 0)
                pairs.append((rate, _window(candidate, seconds, first=number == 0)))
            else:
                rate = _window(candidate, seconds)
                pairs.append((_window(reference, seconds), rate))
            lasts = max(lasts if number > 1 else 0.0, clock.spent - before)
            found = in_turns("", pairs)
            if len(pairs) >= pace.least_pairs and found.difference != "none":
                break
            more = clock.share if found.looks_slower else 0.0
            if len(pairs) >= LEAST_WINDOWS and clock.spent + lasts > ends + more:
                break
        return pairs

    def _one_after_the_other(self, reference: Timed, candidate: Timed, *, again: bool) -> Paired:
        name = reference.job.name
        candidate.rates = self._alone(candidate)
        candidate.finish()
        paired = one_after_the_other(name, reference.rates, candidate.rates)
        if not again and (paired.difference == "faster" or self.clock.is_used_up()):
            return paired
        # Slower than minutes ago, or about as fast: the machine may be the cause.
        candidate.close()
        try:
            reference.rates = [*reference.rates, *self._alone(reference)]
        except MeasurementFailed:
            return paired
        finally:
            reference.close()
        return one_after_the_other(name, reference.rates, candidate.rates)

    def _alone(self, one: Timed) -> list[float]:
        """Rates of as many windows of one setting as time allows."""
        process = one.open(self.start, beside=one)
        left = self.clock.timing_seconds(self.pace)
        seconds = min(self.pace.window_seconds, left / self.pace.least_pairs)
        steps, skip = window_steps(process.ready.step_seconds, seconds)
        lasts = (steps + skip) * process.ready.step_seconds
        rates: list[float] = []
        wanted = max(LEAST_WINDOWS, min(self.pace.least_pairs, int(left / lasts)))
        while len(rates) < wanted:
            self.progress("timing", len(rates), wanted)
            rates.append(process.window(steps, skip).rate)
        return rates


def _window(one: Timed, seconds: float, *, first: bool = False) -> float:
    """The rate of one window; before the first, it waited while the other setting was prepared."""
    assert one.process is not None
    steps, skip = window_steps(one.process.ready.step_seconds, seconds)
    return one.process.window(steps, max(skip, int(first))).rate
