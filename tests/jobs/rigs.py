"""Two processes that measure rungs, for all tests of a worker: importing torch takes seconds."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from expert.jobs.benchmark import rig, rungs
from tests.jobs.trained_runs import place

# As short as can be: what is measured here is whether it works, not how fast it is.
BRISK = rungs.Pace(
    total_seconds=100_000.0,
    learn_seconds=0.1,
    most_learnt=6,
    window_seconds=0.01,
    least_pairs=2,
    most_pairs=2,
    held_out=8,
    limit_seconds=300.0,
)


class LastingRig(rig.Rig):
    """Every rung is a fork of its own, so that nothing of one test is left for the next."""

    def __exit__(self, *_: object) -> None:
        """Its processes are ended with the tests, what a climb has left in them now."""
        for seat in self.seats:
            seat.leave()


@cache
def lasting_rig() -> LastingRig:
    made = LastingRig(log=place() / "rig.txt")
    atexit.register(made.stop)
    return made


def be_brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as shortly as can be, in the two processes."""

    def shared(log: Path, **_: Any) -> rig.Rig:
        return lasting_rig()

    monkeypatch.setattr(rungs, "QUICK", BRISK)
    monkeypatch.setattr(rig, "Rig", shared)
