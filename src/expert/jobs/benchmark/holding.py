"""A rung held against another: both alive and timed in turns, or one after the other.

Two processes share one device. The one that is not timed stands still and computes nothing, but
its memory stays: so both live only where the plan's estimates of their peaks fit together. Where
they do not, the rung is timed alone, and the other once more after it if that leaves a doubt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from expert.insight.ladder.pairs import Paired, in_turns, one_after_the_other
from expert.jobs.benchmark.pairing import rates_of, time_alone, time_for_windows, time_in_turns
from expert.jobs.benchmark.rig import RungLost
from expert.jobs.benchmark.rung_windows import FIRST_UPDATES
from expert.planning.ladder import fit_together

if TYPE_CHECKING:
    from expert.jobs.benchmark.minutes import ClimbTime
    from expert.jobs.benchmark.rig import Rig, Seat, Seen, Tell
    from expert.jobs.benchmark.rungs import Pace, Work
    from expert.planning.run_plan import RunPlan


@dataclass
class Timed:
    """A rung that can be timed, and timed again."""

    name: str
    work: Work
    plan: RunPlan
    seat: Seat | None = None
    """Where it stands ready; None where its process has gone."""
    learnt: int | None = None
    """Updates it has learnt; None before it was loaded once."""
    rates: list[float] = field(default_factory=list)
    """Tokens a second of the windows that were timed last."""

    def sit(self, rig: Rig, tell: Tell, *, beside: bool, stays: bool, again: bool) -> Seat:
        """Have it loaded and standing ready. `again`: only its speed is of interest."""
        self.seat = rig.free_seat()
        try:
            work = replace(self.work, beside=beside, stays=stays, only_rate=again)
            if again and self.learnt is not None:
                work = replace(work, learnt=min(self.learnt, FIRST_UPDATES))
            self.learnt = self.seat.begin(work, tell).updates_learnt
        except RungLost:
            self.seat = None
            raise
        return self.seat

    def leave(self) -> None:
        """End its process, where it has one."""
        seat, self.seat = self.seat, None
        if seat is not None:
            seat.leave()

    @property
    def alive(self) -> bool:
        return self.seat is not None and self.seat.taken


def hold_against(
    there: Timed | None, here: Timed, rig: Rig, *, pace: Pace, time: ClimbTime, tell: Tell
) -> tuple[Seen, Paired | None]:
    """Measure `here`, and how much faster it is than `there`; RungLost where it cannot be."""
    if there is not None and fit_together(there.plan, here.plan):
        try:
            seen, paired = _beside(there, here, rig, pace, time, tell)
        except RungLost:
            if there.alive and here.plan.kernels.device != "cuda":
                raise  # it is this rung that failed, and not for want of the card's memory
        else:
            if not (seen.measured.fallbacks and here.plan.kernels.device == "cuda"):
                return seen, paired
        # The estimate was wrong about the room for both, or one of them was lost: alone, then.
        here.leave()
    if there is not None:
        there.leave()
    return _alone(there, here, rig, pace, time, tell)


def _beside(
    there: Timed, here: Timed, rig: Rig, pace: Pace, time: ClimbTime, tell: Tell
) -> tuple[Seen, Paired]:
    other = there.seat if there.seat is not None and there.seat.taken else None
    if other is None:
        other = there.sit(rig, tell, beside=False, stays=True, again=True)
    stays = fit_together(there.plan, here.plan, here.plan)  # a model that is judged beside them
    seat = here.sit(rig, tell, beside=True, stays=stays, again=False)
    pairs = time_in_turns(other, seat, pace, time, tell)
    rates = rates_of(pairs)
    there.rates, here.rates = [first for first, _ in rates], [second for _, second in rates]
    return _told(here, tell, stays=stays), in_turns(there.name, rates)


def _alone(
    there: Timed | None, here: Timed, rig: Rig, pace: Pace, time: ClimbTime, tell: Tell
) -> tuple[Seen, Paired | None]:
    stays = fit_together(here.plan, here.plan)
    seat = here.sit(rig, tell, beside=False, stays=stays, again=False)
    here.rates = _rates(seat, pace, time_for_windows(time, pace), tell)
    seen = _told(here, tell, stays=stays)
    if there is None or not there.rates:
        return seen, None
    paired = one_after_the_other(there.name, there.rates, here.rates)
    if paired.difference == "faster" or time.is_up:
        return seen, paired
    # Slower than it was minutes ago, or about as fast: that may be the machine's doing.
    here.leave()
    try:
        again = there.sit(rig, tell, beside=False, stays=True, again=True)
        after = _rates(again, pace, time_for_windows(time, pace), tell)
    except RungLost:
        return seen, paired
    there.rates = [*there.rates, *after]
    return seen, one_after_the_other(there.name, there.rates, here.rates)


def _rates(seat: Seat, pace: Pace, seconds: float, tell: Tell) -> list[float]:
    return [window.rate for window in time_alone(seat, pace, seconds, tell)]


def _told(timed: Timed, tell: Tell, *, stays: bool) -> Seen:
    assert timed.seat is not None
    seen = timed.seat.seen(tell, stays=stays)
    if not stays:
        timed.seat = None
    return seen


def time_against_baseline(
    won: Timed, base: Timed, rig: Rig, *, pace: Pace, time: ClimbTime, tell: Tell
) -> Paired:
    """What won and the baseline, measured directly."""
    if fit_together(won.plan, base.plan):
        one = won.seat if won.alive else won.sit(rig, tell, beside=False, stays=True, again=True)
        assert one is not None
        other = base.sit(rig, tell, beside=True, stays=True, again=True)
        pairs = time_in_turns(other, one, pace, time, tell)
        base.leave()
        return in_turns(base.name, rates_of(pairs))
    seat = won.seat if won.alive else won.sit(rig, tell, beside=False, stays=True, again=True)
    assert seat is not None
    half = time_for_windows(time, pace) / 2
    won.rates = _rates(seat, pace, half, tell)
    won.leave()
    seat = base.sit(rig, tell, beside=False, stays=True, again=True)
    base.rates = _rates(seat, pace, time_for_windows(time, pace), tell)
    base.leave()
    return one_after_the_other(base.name, base.rates, won.rates)
