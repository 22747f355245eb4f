"""Windows of two rungs timed in turns, or of one alone: how many, how long, and until when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expert.insight.ladder.pairs import in_turns

if TYPE_CHECKING:
    from expert.jobs.benchmark.minutes import ClimbTime
    from expert.jobs.benchmark.rig import Seat, Tell
    from expert.jobs.benchmark.rung_windows import Window
    from expert.jobs.benchmark.rungs import Pace

LEAST_WINDOWS = 2
"""However slow the updates are: one window alone has no spread."""
SLOW_UPDATE_SECONDS = 0.3
"""Updates that take longer need no others before them that are not timed: a device that stood still
is at work again long before they end."""
WORTH = 0.5
"""Of the time it took to get a rung ready, for timing it: a rung of 17 s was timed for a fifth of a
second on an H200, because its share of the climb was used up by then."""
SETTLING_UPDATES = 2
"""Of a rung that stood still: the host is not yet ahead of its device, and batches lie ready that
were made in the meantime."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How windows of a rung are made up."""

    updates: int
    skip: int
    seconds: float
    """One of them, as far as it is known before."""


def lengths_of(seat: Seat, window_seconds: float) -> Lengths:
    """So many updates that a window lasts so long, one at least."""
    each = seat.begun.seconds_per_update
    updates = max(1, math.ceil(window_seconds / each))
    skip = 0 if each > SLOW_UPDATE_SECONDS else SETTLING_UPDATES
    return Lengths(updates=updates, skip=skip, seconds=(updates + skip) * each)


def time_for_windows(time: ClimbTime, pace: Pace) -> float:
    """Seconds for timing the rung that stands ready; enough for two pairs of windows at least."""
    least = 2 * LEAST_WINDOWS * pace.window_seconds
    return max(time.rung_left, WORTH * time.rung_took, least)


def time_alone(seat: Seat, pace: Pace, left: float, tell: Tell) -> list[Window]:
    """Windows of one rung, as many as there is time for."""
    length = lengths_of(seat, min(pace.window_seconds, _part(left, pace.least_pairs)))
    wanted = max(LEAST_WINDOWS, min(pace.least_pairs, int(left / length.seconds)))
    found = []
    for number in range(wanted):
        tell("timing", number, wanted)
        found.append(seat.window(length.updates, length.skip, tell))
    return found


def time_in_turns(
    there: Seat,
    here: Seat,
    pace: Pace,
    time: ClimbTime,
    tell: Tell,
) -> list[tuple[Window, Window]]:
    """Pairs of windows of two rungs, the first one's first. The order within a pair changes from
    one to the next, so that a machine that grows slower favours neither.

    A rung is thrown out only after so many pairs that chance is not likely, as what it is worth
    would be lost to all later plans: one that looks slower may take its time twice.
    """
    ends = time.rung_took + time_for_windows(time, pace)
    half = _part(ends - time.rung_took, 2 * pace.least_pairs)
    one, other = (lengths_of(seat, min(pace.window_seconds, half)) for seat in (there, here))
    pairs: list[tuple[Window, Window]] = []
    lasts = one.seconds + other.seconds
    while len(pairs) < pace.most_pairs:
        before = time.rung_took
        tell("timing in turns", len(pairs), pace.most_pairs)
        waking = 0 if pairs else 1  # one of them stood still while the other was made ready
        if len(pairs) % 2 == 0:
            first = there.window(one.updates, max(waking, one.skip), tell)
            second = here.window(other.updates, max(waking, other.skip), tell)
        else:
            second = here.window(other.updates, other.skip, tell)
            first = there.window(one.updates, one.skip, tell)
        pairs.append((first, second))
        if len(pairs) > 1:
            lasts = max(lasts, time.rung_took - before)
        found = in_turns("", rates_of(pairs))
        if len(pairs) >= pace.least_pairs and found.difference != "none":
            break
        more = time.rung_share if found.looks_slower else 0.0
        if len(pairs) >= LEAST_WINDOWS and time.rung_took + lasts > ends + more:
            break
    return pairs


def rates_of(pairs: list[tuple[Window, Window]]) -> list[tuple[float, float]]:
    """Tokens a second of both halves of every pair."""
    return [(first.rate, second.rate) for first, second in pairs]


def _part(left: float, windows: int) -> float:
    """Seconds of one of so many windows, where they share what is left; nothing less than none."""
    return max(0.0, left) / windows
