"""How fast a run goes and what it learns: sums and token counts, divided once.

Only the clock is read here. Losses and device times come late, when the device has them, so they
are added apart from the counts of their update.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

from expert.telemetry.timeline import StepTimes

KEPT_UPDATES = 1000
"""Rates and the time left look at this many updates at most."""

SETTLING_UPDATES = 3
"""Updates after a start that compile and fill caches: not what the rest will take."""

EVALUATION_SHARE = 1 / 3
"""An evaluation of as many places as an update: it goes forward only, and backward is twice that.
Used until one was measured."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The counts of one update over all of its micro-batches."""

    step: int
    real_tokens: int
    places: int
    """Places of the batches, padding included."""
    examples: int
    targets: int
    flops: float | None = None
    """Arithmetic of the update; None where nobody has counted it."""
    loss_sum: float | None = None
    """Where it is known at once; otherwise `Meter.add_loss` takes it later."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """FLOP/s the card can reach at most in this precision; None comes with the reason."""

    flops: float | None
    because: str


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed over some updates; None is what cannot be known, `mfu_because` says why for MFU."""

    updates: int
    seconds: float
    tokens: int
    targets: int
    examples: int
    tokens_per_second: float | None
    samples_per_second: float | None
    steps_per_second: float | None
    padding: float | None
    """Share of the places that are padding."""
    data_wait: float | None
    """Share of the time in which the device waited for a batch."""
    mfu: float | None
    mfu_because: str


@dataclass
class Pause:
    """A stretch in which the clock stood still."""

    seconds: float = 0.0


@dataclass(frozen=True)
class _Timed:
    update: Update
    seconds: float
    settled: bool


@dataclass
class _Sums:
    """Running sums; a mean is one division at the end."""

    updates: int = 0
    seconds: float = 0.0
    tokens: int = 0
    examples: int = 0
    loss_sum: float = 0.0
    loss_targets: int = 0
    settled_seconds: float = 0.0
    settled_tokens: int = 0
    settled_examples: int = 0
    settled_updates: int | None = 0
    """None where the sums are of a version that did not count them."""

    def add(self, update: Update, seconds: float, *, settled: bool) -> None:
        self.updates += 1
        self.seconds += seconds
        self.tokens += update.real_tokens
        self.examples += update.examples
        if settled:
            self.settled_seconds += seconds
            self.settled_tokens += update.real_tokens
            self.settled_examples += update.examples
            if self.settled_updates is not None:
                self.settled_updates += 1

    def add_loss(self, loss_sum: float, targets: int) -> None:
        self.loss_sum += loss_sum
        self.loss_targets += targets

    def loss(self) -> float | None:
        return _ratio(self.loss_sum, self.loss_targets)

    def facts(self) -> dict[str, Any]:
        """Rates are those of settled updates, where there are any: compiling is no training."""
        tokens, examples, updates = self.settled_tokens, self.settled_examples, self.settled_updates
        seconds = self.settled_seconds
        if not seconds:
            tokens, examples, updates = self.tokens, self.examples, self.updates
            seconds = self.seconds
        return {
            "loss": self.loss(),
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": _ratio(tokens, seconds),
            "samples_per_second": _ratio(examples, seconds),
            "steps_per_second": None if updates is None else _ratio(updates, seconds),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """The sums that `state` holds; an empty one holds none."""
        return cls(**({"settled_updates": None, **state} if state else {}))


@dataclass
class Ahead:
    """The evaluations of a run. What one costs is told in updates, so that their pace tells how
    long it will take; from the first that was measured on, that one tells it."""

    total_steps: int
    every: int = 0
    """Updates between evaluations of the validation rows; 0: none in between."""
    at_end: bool = False
    """Whether the validation rows are evaluated after the last update."""
    validation: float = 0.0
    test: float = 0.0
    """The test rows are evaluated once, when everything else is done."""
    _seconds_for_one: float | None = None
    _evaluated: int = -1

    def measured(self, seconds: float, *, cost: float, done: int | None = None) -> None:
        """An evaluation took so long; `done`: after how many updates, for validation rows."""
        if cost > 0:
            self._seconds_for_one = seconds / cost
        if done is not None:
            self._evaluated = done

    def evaluations(self, done: int) -> int:
        """Of the validation rows, from after `done` updates to the end."""
        left = max(0, self.total_steps - done)
        count = (done + left) // self.every - done // self.every if self.every else 0
        if self.at_end and left and not (self.every and self.total_steps % self.every == 0):
            count += 1
        return count + self._waits_now(done)

    def cost(self, done: int = 0) -> float:
        """All evaluations still to come, in updates."""
        return self.evaluations(done) * self.validation + self.test

    def seconds(self, done: int, update_seconds: float) -> float:
        """How long they will take, at so many seconds an update."""
        for_one = self._seconds_for_one
        return self.cost(done) * (update_seconds if for_one is None else for_one)

    def _waits_now(self, done: int) -> bool:
        """The update is made, and its evaluation is not: that of the last one may take longest."""
        due = bool(self.every) and done > 0 and done % self.every == 0
        last = self.at_end and done >= self.total_steps
        return (due or last) and self._evaluated != done


class Meter:
    """Gathers updates as they are made; the clock stands still between `pause` and `resume`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        peak: Peak,
        total_steps: int | None = None,
        ahead: Ahead | None = None,
        settling: int = SETTLING_UPDATES,
    ) -> None:
        self.ahead = ahead
        """The evaluations that are still to come."""
        self._clock = clock
        self._peak = peak
        self._total_steps = total_steps
        self._settling = settling
        self._unsettled = settling
        self._updates: deque[_Timed] = deque(maxlen=KEPT_UPDATES)
        self._unlined: deque[_Timed] = deque(maxlen=KEPT_UPDATES)
        self._times: deque[StepTimes] = deque(maxlen=KEPT_UPDATES)
        self._line, self._epoch, self._run = _Sums(), _Sums(), _Sums()
        self._pauses = 0
        self._paused_at = 0.0
        self._marked = clock()
        self.paused_seconds = 0.0
        self.settled_at: float | None = None
        """When updates began to take what the rest will take, the last time that they did."""

    # --- gathering -----------------------------------------------------------------------------

    def start(self) -> None:
        """The clock counts from now: for the moment before the first update."""
        self._marked = self._clock()

    def resettle(self) -> None:
        """The next updates compile again (after a fallback), so the time left skips them."""
        self._unsettled = self._settling

    @property
    def fresh(self) -> bool:
        """True before the first update after a start or a change: the one that compiles."""
        return 0 < self._settling == self._unsettled

    @property
    def settled(self) -> bool:
        """True once updates take what the rest will take."""
        return self._unsettled == 0

    def state(self) -> dict[str, Any]:
        """What was summed up since the last line, over this epoch and over the run, for a
        checkpoint."""
        sums = {"line": self._line, "epoch": self._epoch, "run": self._run}
        return {name: asdict(each) for name, each in sums.items()}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from what `state` gave: for a run that is resumed."""
        names = ("line", "epoch", "run")
        self._line, self._epoch, self._run = (_Sums.of(state.get(name, {})) for name in names)

    def restore_losses(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Forget the losses of updates that were undone; the time they took was spent."""
        for name, sums in (("line", self._line), ("epoch", self._epoch), ("run", self._run)):
            before = _Sums.of(state.get(name, {}))
            sums.loss_sum, sums.loss_targets = before.loss_sum, before.loss_targets

    def pause(self) -> None:
        """Stops the clock for an evaluation or a save; pauses may lie inside each other."""
        if self._pauses == 0:
            self._paused_at = self._clock()
        self._pauses += 1

    def resume(self) -> None:
        """Lets the clock go on once every pause has ended."""
        assert self._pauses > 0, "resume() without pause()"
        self._pauses -= 1
        if self._pauses == 0:
            stood_still = self._clock() - self._paused_at
            self.paused_seconds += stood_still
            self._marked += stood_still

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """The clock stands still inside; afterwards `seconds` tells for how long."""
        pause, began = Pause(), self._clock()
        self.pause()
        try:
            yield pause
        finally:
            pause.seconds = self._clock() - began
            self.resume()

    def add(self, update: Update) -> float:
        """The seconds of this update: from the one before, pauses left out."""
        assert self._pauses == 0, "an update inside a pause"
        now = self._clock()
        seconds = now - self._marked
        self._marked = now
        settled = self._unsettled == 0
        timed = _Timed(update, seconds, settled=settled)
        self._updates.append(timed)
        self._unlined.append(timed)
        self._unsettled = max(0, self._unsettled - 1)
        if not settled and self._unsettled == 0:
            self.settled_at = now
        for sums in (self._epoch, self._run):
            sums.add(update, seconds, settled=settled)
        if update.loss_sum is not None:
            self.add_loss(update.loss_sum, update.targets)
        return seconds

    def add_loss(self, loss_sum: float, targets: int) -> None:
        """Adds a loss summed over `targets` tokens, of any number of updates."""
        for sums in (self._line, self._epoch, self._run):
            sums.add_loss(loss_sum, targets)

    def add_times(self, times: StepTimes) -> None:
        """Adds what the timeline measured of one update."""
        self._times.append(times)

    # --- asking --------------------------------------------------------------------------------

    def rates(self, window: int | None = None, *, settled_only: bool = False) -> Rates:
        """Speed of the last `window` updates, or of all that are kept."""
        chosen = list(self._updates)
        if window is not None:
            chosen = chosen[-window:] if window > 0 else []
        return self._rates_of(chosen, settled_only=settled_only)

    def _rates_of(self, chosen: list[_Timed], *, settled_only: bool = False) -> Rates:
        if settled_only:
            chosen = [timed for timed in chosen if timed.settled]
        updates = [timed.update for timed in chosen]
        seconds = sum(timed.seconds for timed in chosen)
        tokens = sum(update.real_tokens for update in updates)
        examples = sum(update.examples for update in updates)
        places = sum(update.places for update in updates)
        mfu, because = self._mfu(updates, seconds)
        return Rates(
            updates=len(updates),
            seconds=seconds,
            tokens=tokens,
            targets=sum(update.targets for update in updates),
            examples=examples,
            tokens_per_second=_ratio(tokens, seconds),
            samples_per_second=_ratio(examples, seconds),
            steps_per_second=_ratio(len(updates), seconds),
            padding=_ratio(places - tokens, places),
            data_wait=self._data_wait({update.step for update in updates}),
            mfu=mfu,
            mfu_because=because,
        )

    def eta_seconds(self) -> float | None:
        """Seconds left at the pace of settled updates; None before there is one.

        Evaluations that are still to come are in it, saves are not.
        """
        settled = [timed.seconds for timed in self._updates if timed.settled]
        if not settled or self._total_steps is None:
            return None
        done, each = self._updates[-1].update.step + 1, sum(settled) / len(settled)
        evaluating = self.ahead.seconds(done, each) if self.ahead is not None else 0.0
        return max(0, self._total_steps - done) * each + evaluating

    def step_line(self, step: int | None = None) -> dict[str, Any]:
        """Fields of a "step" event: everything since the last such line, up to this update. The
        loss is the mean over all tokens of these updates, and `targets` says how many they are.

        A line is written when the numbers of its update have arrived; by then the next one may
        have been added.
        """
        line, self._line = self._line, _Sums()
        chosen = self._since_last_line(step)
        rates = self._rates_of(chosen)
        settled = self._rates_of(chosen, settled_only=True)
        speed = settled if settled.updates else rates
        return {
            "loss": line.loss(),
            "updates": rates.updates,
            "tokens": rates.tokens,
            "targets": line.loss_targets or rates.targets,
            "examples": rates.examples,
            "tokens_per_second": speed.tokens_per_second,
            "samples_per_second": speed.samples_per_second,
            "steps_per_second": speed.steps_per_second,
            "mfu": speed.mfu,
            "data_wait": rates.data_wait,
            "padding": rates.padding,
            "seconds": rates.seconds,
            "eta_seconds": self.eta_seconds(),
        }

    def epoch_line(self, epoch: int, eval_loss: float | None = None) -> dict[str, Any]:
        """Fields of an "epoch" event, and the next epoch begins.

        Losses still on their way belong to the epoch that ends: add them first.
        """
        facts = {"epoch": epoch, **self._epoch.facts(), "eval_loss": eval_loss}
        self._epoch = _Sums()
        return facts

    def run_line(self) -> dict[str, Any]:
        """The same facts of all updates since the start, for the end of a run."""
        return self._run.facts()

    # --- inside --------------------------------------------------------------------------------

    def _since_last_line(self, step: int | None) -> list[_Timed]:
        """Updates that no line has told of, up to this one. After a rollback numbers come again:
        the last update of that number is meant."""
        known = self._unlined
        ends = [place for place, timed in enumerate(known, 1) if timed.update.step == step]
        return [known.popleft() for _ in range(ends[-1] if ends else len(known))]

    def _data_wait(self, steps: set[int]) -> float | None:
        measured = [times for times in self._times if times.step in steps]
        waited = sum(times.phases["data_wait"] for times in measured)
        return _ratio(waited, sum(times.wall for times in measured))

    def _mfu(self, updates: list[Update], seconds: float) -> tuple[float | None, str]:
        flops = [update.flops for update in updates]
        known = [each for each in flops if each is not None]
        if self._peak.flops is None:
            return None, self._peak.because
        if len(known) < len(flops):
            return None, "the arithmetic of this model has not been counted"
        if not known or seconds <= 0:
            return None, "no time has been measured yet"
        return sum(known) / (seconds * self._peak.flops), self._peak.because


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom > 0 else None
