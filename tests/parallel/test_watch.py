"""Which rank does not answer, judged by its heartbeats."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from expert.core.errors import ExpertError
from expert.core.world import SINGLE_PROCESS
from expert.parallel.launch import rank_timeout
from expert.parallel.watch import (
    NO_LIMIT,
    SILENT_SHARE,
    SLOW_FACTOR,
    Heartbeat,
    Watch,
    unresponsive_rank,
)
from tests.each import each

LIMIT = 100.0
STEP = "computing step 12"


def computes(seconds: float = 1.0, **more: Any) -> Heartbeat:
    fields: dict[str, Any] = {"doing": STEP, "extra": 0.0, "exchanges": 7, "seconds": seconds}
    return Heartbeat(**{**fields, **more})


def waits(seconds: float, **more: Any) -> Heartbeat:
    return computes(seconds, **{"waits": True, "exchanges": 8, **more})


def found(*signs: Heartbeat, silent: dict[int, float] | None = None, size: int | None = None):
    return unresponsive_rank(
        dict(enumerate(signs)), silent or {}, limit=LIMIT, size=size or len(signs)
    )


def test_a_rank_that_leaves_no_sign_is_named_with_what_it_was_last_doing():
    quiet = LIMIT * SILENT_SHARE
    assert found(waits(30), computes(), silent={1: quiet - 1}) is None
    rank, text = found(waits(30), computes(), silent={1: quiet + 1, 2: 0.0})
    assert rank == 1
    assert text == f"rank {1} does not answer: no sign of life for {21} s; it was last seen {STEP}"


def test_a_rank_that_is_saving_may_leave_no_sign_for_as_long_as_its_bytes_take():
    saves = Heartbeat(doing="saving", extra=50.0)
    assert found(saves, silent={0: LIMIT + 49}) is None
    assert found(saves, silent={0: LIMIT + 51}) is not None


def test_a_rank_that_is_alive_and_stuck_is_named_with_who_waits_for_it():
    assert found(waits(LIMIT - 1), computes(LIMIT + 5)) is None
    rank, text = found(waits(LIMIT + 1), computes(LIMIT + 5))
    assert rank == 1
    assert "rank 1 does not answer" in text
    assert "rank 0 has waited 101 s" in text


def test_a_rank_that_others_wait_for_and_that_leaves_no_sign_is_not_said_to_be_stuck():
    saves = Heartbeat(doing="saving", extra=1.0)
    rank, text = found(saves, waits(LIMIT + 2), silent={0: LIMIT})
    assert (rank, text) == (
        0,
        (
            "rank {rank} does not answer: no sign of life for {seconds} s; it was last seen {doing}"
        ).format(rank=0, seconds=100, doing="saving"),
    )


@pytest.mark.parametrize(
    ("waiting", "slow"),
    [
        (waits(10 * LIMIT), Heartbeat(doing="loading the model", extra=NO_LIMIT)),
        (waits(LIMIT + 40), computes(LIMIT + 40, extra=50.0)),
        (waits(LIMIT + 40, longest=LIMIT), computes(LIMIT + 40)),
    ],
    ids=["loading has no limit", "a save has more", "steps that take long anyway"],
)
def test_a_rank_that_is_only_slow_is_left_alone(waiting, slow):
    assert SLOW_FACTOR > 2
    assert found(waiting, slow) is None


def test_where_all_wait_for_each_other_it_is_the_network_and_only_who_sees_all_ranks_says_so():
    rank, text = found(waits(LIMIT + 1), waits(LIMIT + 1))
    assert (rank, text) == (
        None,
        (
            f"the network between the ranks does not answer: all have waited {101} s for "
            f"each other, {STEP}"
        ),
    )
    assert found(waits(LIMIT + 1), waits(LIMIT + 1), size=3) is None


def test_slow_ranks_are_fine_while_no_rank_waits():
    assert found(computes(10 * LIMIT), computes(10 * LIMIT)) is None


def test_the_limit_is_that_of_the_environment_where_it_is_a_number_of_seconds():
    assert rank_timeout(600.0, {}) == 600.0
    assert rank_timeout(600.0, {"EXPERT_RANK_TIMEOUT": "30"}) == 30.0
    for wrong in ("4", "soon", "-1", "inf", "nan"):
        with pytest.raises(ExpertError) as raised:
            rank_timeout(600.0, {"EXPERT_RANK_TIMEOUT": wrong})
        assert (
            str(raised.value)
            == f"EXPERT_RANK_TIMEOUT={wrong}: expected seconds from 5  (unset it for 600)"
        )


# --- a process alone -----------------------------------------------------------------------------


def alone(doing: str, seconds: float, *, extra: float = 0.0, before: float | None = None) -> bool:
    """Whether a process with a limit of 60 seconds counts as hanging, that has been `doing` that
    for so long; `before`: the longest that it took the last times."""
    watch = Watch(SINGLE_PROCESS, None, limit=60.0)
    watch._awake_since = watch._idle_since = -math.inf  # on a machine just started too
    watch._now = (Heartbeat(doing=doing, extra=extra), time.monotonic() - seconds)
    if before is not None:
        watch._longest[doing.split()[0]] = before
    return watch._find_hang() is not None


@each(
    ("doing", "seconds", "more", "hangs"),
    [
        ("computing step 8", 59.0, {"before": 0.5}, False),
        ("computing step 8", 62.0, {"before": 0.5}, True),
        ("computing step 8", 85.0, {"before": 15.0}, False),
        ("computing step 1", 590.0, {}, False),  # the first time has ten times the limit
        ("computing step 1", 610.0, {}, True),
        ("saving the checkpoint of step 8", 700.0, {"extra": 200.0}, False),
        ("saving the checkpoint of step 8", 900.0, {"extra": 200.0}, True),
        ("loading the model", 1e6, {"extra": NO_LIMIT}, False),
    ],
)
def test_a_process_alone_hangs_where_it_does_the_same_far_longer_than_it_may(
    doing, seconds, more, hangs
):
    assert alone(doing, seconds, **more) is hangs


def test_the_longest_of_a_kind_is_remembered_whatever_its_number():
    watch = Watch(SINGLE_PROCESS, None, limit=60.0)
    watch._awake_since = watch._idle_since = -math.inf  # on a machine just started too
    watch._now = (Heartbeat(doing="computing step 1", extra=0.0), time.monotonic() - 5.0)
    watch.at("waiting for data")
    assert watch._longest["computing"] == pytest.approx(5.0, abs=1.0)
