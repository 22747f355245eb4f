"""Measures throughput and loss: sums and token counts, divided once.

Only the clock is read here. Losses and device times arrive later, so they are added separately from
the counts of their step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from expert.telemetry.timeline import StepTimes

KEPT_STEPS = 1000
"""Rates and the remaining time use at most this many steps."""

SMOOTH_SHARE = 1 / 50
"""Share of the log lines that the smoothed loss averages over, besides the last; until there are
MIN_SMOOTHED lines it is the loss of the last."""
MIN_SMOOTHED, MOST_SMOOTHED = 20, 100

SETTLING_STEPS = 3
"""First steps, which compile and fill caches: not representative of the rest."""


@dataclass(kw_only=True)
class StepCounts:
    """Counts of one step over all of its micro-batches."""

    step: int
    real_tokens: int
    places: int
    """Positions in the batches, including padding."""
    examples: int
    targets: int
    flops: float | None = None
    """FLOPs of the step; None if unknown."""
    seconds: float = 0.0
    """Set by the meter, like the following."""
    settled: bool = False
    times: StepTimes | None = None
    """Of the device; they arrive later."""


@dataclass
class Pause:
    """An interval in which the clock was stopped."""

    seconds: float = 0.0


class _Sums(dict[str, Any]):
    """Running sums, also of settled steps alone; a mean is one division at the end. `device_lag`:
    how much longer than the host the device took for settled steps, if its times are known."""

    def add(self, counts: StepCounts) -> None:
        new = {"updates": 1, "tokens": counts.real_tokens, "examples": counts.examples}
        for name, value in {**new, "seconds": counts.seconds}.items():
            self[name] += value
            if counts.settled:
                self[f"settled_{name}"] += value

    def add_lag(self, counts: StepCounts) -> None:
        if counts.settled and counts.times is not None:
            self["device_lag"] += counts.times.wall - counts.seconds

    def __missing__(self, name: str) -> int:
        return 0

    def paced_seconds(self) -> float:
        """Seconds of settled steps. The host launches captured steps far ahead of the device: its
        clock alone once gave the first line of a run 2.3 million tokens/s instead of 102,000."""
        lag: float = max(0.0, self["device_lag"])
        return lag + float(self["settled_seconds"])

    def loss(self) -> float | None:
        return _ratio(self["loss_sum"], self["loss_targets"])

    def facts(self) -> dict[str, Any]:
        """Rates are those of settled steps, if there are any: compiling is not training."""
        paced = self.paced_seconds()
        of, seconds = ("settled_", paced) if paced else ("", self["seconds"])
        return {
            "loss": self.loss(),
            "seconds": self["seconds"] + paced - self["settled_seconds"],
            "tokens": self["tokens"],
            "tokens_per_second": _ratio(self[f"{of}tokens"], seconds),
            "samples_per_second": _ratio(self[f"{of}examples"], seconds),
            "steps_per_second": _ratio(self[f"{of}updates"], seconds),
        }


class Meter:
    """Collects steps as they are made; the clock is stopped while it is `paused`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        peak_flops: float | None = None,
        total_steps: int | None = None,
        settling: int = SETTLING_STEPS,
    ) -> None:
        """`peak_flops`: peak FLOP/s of the GPU in this precision, if known."""
        self._clock = clock
        self._peak_flops = peak_flops
        self._total_steps = total_steps
        self._settling = settling
        self._unsettled = settling
        self._unlined: deque[StepCounts] = deque(maxlen=KEPT_STEPS)
        self._settled: deque[StepCounts] = deque(maxlen=KEPT_STEPS)
        self._losses: deque[tuple[float, int]] = deque(maxlen=1 + MOST_SMOOTHED)
        """Loss sum and tokens of the last log lines."""
        self._lines = 0
        self._rates: deque[float] = deque(maxlen=KEPT_STEPS)
        """Of log lines since steps settled."""
        self._done = 0
        self._sums = {name: _Sums() for name in ("line", "epoch", "run")}
        self._pauses = 0
        self._paused_seconds = 0.0
        self._marked = clock()
        self.steady_since: float | None = None
        """Since when steps run at their normal pace without a pause; None before they do."""
        self.earlier_seconds = 0.0
        """Of training before this run was resumed."""

    # --- gathering -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the clock, before the first step."""
        self._marked = self._clock()

    def resettle(self) -> None:
        """The next steps compile again (after a fallback), so the remaining time ignores them."""
        self._unsettled = self._settling
        self.steady_since = None
        self._rates.clear()

    @property
    def fresh(self) -> bool:
        """True before the first step after a start or a change: the one that compiles."""
        return 0 < self._settling == self._unsettled

    @property
    def settled(self) -> bool:
        """True once steps run at their normal pace."""
        return self._unsettled == 0

    def state(self) -> dict[str, Any]:
        """Sums since the last line, over this epoch and over the run, and the losses of the last
        lines, for a checkpoint."""
        sums = {name: dict(values) for name, values in self._sums.items()}
        return {**sums, "smoothed": {"lines": self._lines, "losses": list(self._losses)}}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from `state` in a resumed run."""
        self._sums = {name: _Sums(state.get(name, {})) for name in self._sums}
        self.earlier_seconds = self._sums["run"]["seconds"]
        self._restore_lines(state)

    def _restore_lines(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        recent = state.get("smoothed", {})
        self._losses.clear()
        self._losses.extend((total, targets) for total, targets in recent.get("losses", ()))
        self._lines = recent.get("lines", 0)

    def restore_losses(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Drop the losses of steps that were rolled back; their time stays counted."""
        for name, sums in self._sums.items():
            before = state.get(name, {})
            for key in ("loss_sum", "loss_targets"):
                sums[key] = before.get(key, 0)
        self._restore_lines(state)

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """Stop the clock for an evaluation or a save; afterwards `seconds` is for how long. Pauses
        may be nested."""
        pause, began = Pause(), self._clock()
        self._pauses += 1
        try:
            yield pause
        finally:
            pause.seconds = self._clock() - began
            self._pauses -= 1
            if self._pauses == 0:
                self._marked += pause.seconds
                self._paused_seconds += pause.seconds
                if self.steady_since is not None:
                    self.steady_since = self._clock()

    def add(self, counts: StepCounts) -> float:
        """Add a step; returns its seconds since the previous one, without pauses."""
        assert self._pauses == 0, "a step inside a pause"
        now = self._clock()
        counts.seconds, counts.settled = now - self._marked, self.settled
        self._marked = now
        self._done = counts.step + 1
        self._unlined.append(counts)
        if counts.settled:
            self._settled.append(counts)
        self._unsettled = max(0, self._unsettled - 1)
        if not counts.settled and self.settled:
            self.steady_since = now
        for name in ("epoch", "run"):
            self._sums[name].add(counts)
        return counts.seconds

    def add_loss(self, loss_sum: float, targets: int) -> None:
        """Add a loss summed over `targets` tokens, of any number of steps."""
        for sums in self._sums.values():
            sums["loss_sum"] += loss_sum
            sums["loss_targets"] += targets

    def add_times(self, times: StepTimes) -> None:
        """Device times of a step that was added; after a rollback, of the last with its number."""
        counts = next((each for each in reversed(self._unlined) if each.step == times.step), None)
        if counts is not None:
            counts.times = times
            for name in ("epoch", "run"):
                self._sums[name].add_lag(counts)

    # --- asking --------------------------------------------------------------------------------

    def eta_seconds(self) -> float | None:
        """Seconds left at the pace of settled steps, None before there is one; with as many
        evaluations and saves to a step as so far."""
        settled = self._settled
        if not settled or self._total_steps is None:
            return None
        walls = [timed.times.wall for timed in settled if timed.times is not None]
        step_seconds = sum(timed.seconds for timed in settled) / len(settled)
        step_seconds = max(step_seconds, sum(walls) / max(1, len(walls)))
        trained = self._sums["run"]["seconds"] - self.earlier_seconds
        pauses = self._paused_seconds / trained if trained > 0 else 0.0
        return max(0, self._total_steps - self._done) * step_seconds * (1 + pauses)

    def step_line(self, step: int | None = None) -> dict[str, Any]:
        """Fields of a "step" event: everything since the last line, up to this step. The loss is
        the mean over all tokens of these steps, and `targets` their number.

        A line is written when the numbers of its step have arrived; by then the next step may have
        been added.
        """
        line, self._sums["line"] = self._sums["line"], _Sums()
        known = self._unlined
        # After a rollback, step numbers repeat: the last step with that number is meant.
        ends = [place for place, timed in enumerate(known, 1) if timed.step == step]
        steps = [known.popleft() for _ in range(ends[-1] if ends else len(known))]
        for timed in steps:
            line.add(timed)
            line.add_lag(timed)
        known_loss = math.isfinite(line["loss_sum"])
        self._losses.append((line["loss_sum"], line["loss_targets"]) if known_loss else (0.0, 0))
        self._lines += 1
        facts, settled = line.facts(), [timed for timed in steps if timed.settled] or steps
        if all(timed.settled for timed in steps) and (rate := facts["tokens_per_second"]):
            self._rates.append(rate)
        places = sum(timed.places for timed in steps)
        measured = [timed.times for timed in steps if timed.times is not None]
        waited = sum(times.phases["data_wait"] for times in measured)
        return {
            **facts,
            **self._summary(facts),
            "updates": len(steps),
            "targets": line["loss_targets"] or sum(timed.targets for timed in steps),
            "examples": line["examples"],
            "mfu": self._mfu(settled, line),
            "data_wait": _ratio(waited, sum(times.wall for times in measured)),
            "padding": _ratio(places - line["tokens"], places),
            "eta_seconds": self.eta_seconds(),
        }

    def epoch_line(self, epoch: int, eval_loss: float | None = None) -> dict[str, Any]:
        """Fields of an "epoch" event; starts the next epoch.

        Outstanding losses belong to the epoch that ends: add them first.
        """
        facts = {"epoch": epoch, **self._sums["epoch"].facts(), "eval_loss": eval_loss}
        self._sums["epoch"] = _Sums()
        return facts

    def run_line(self) -> dict[str, Any]:
        """The same fields over all steps, for the end of a run."""
        facts = self._sums["run"].facts()
        return {**facts, **self._summary(facts)}

    # --- inside --------------------------------------------------------------------------------

    def _summary(self, facts: Mapping[str, Any]) -> dict[str, float | None]:
        """The loss and the rate that describe the run, wherever it is shown: the loss averaged over
        the last log lines, and the median rate of lines at normal pace. `facts`: used until there
        is such a line."""
        half = min(MOST_SMOOTHED, max(1, round(self._lines * SMOOTH_SHARE)))
        recent = list(self._losses)[-1 - (half if self._lines >= MIN_SMOOTHED else 0) :]
        smoothed = _ratio(sum(total for total, _ in recent), sum(targets for _, targets in recent))
        return {
            "smoothed_loss": facts["loss"] if smoothed is None else smoothed,
            "median_tokens_per_second": statistics.median(self._rates)
            if self._rates
            else facts["tokens_per_second"],
        }

    def _mfu(self, steps: list[StepCounts], line: _Sums) -> float | None:
        """Model FLOPs utilization; None if the GPU's peak or the FLOPs are unknown."""
        flops = [timed.flops for timed in steps if timed.flops is not None]
        seconds = line.paced_seconds() or line["seconds"]
        if self._peak_flops is None or not flops or len(flops) < len(steps) or seconds <= 0:
            return None
        return sum(flops) / (seconds * self._peak_flops)


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom > 0 else None
