"""Climbs as tests ask for them: for real, or on rates that are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from expert.insight.ladder.ladder import Ladder, Measured, RungResult
from expert.jobs.benchmark import rungs
from expert.jobs.benchmark.benchmark import Asked, Watcher
from expert.jobs.benchmark.climbing import Climb
from expert.jobs.benchmark.rig import Begun, RungLost, Seen
from expert.jobs.benchmark.rung_windows import Window
from expert.manifest.reader import read_manifest


def asked(path: Path, *overrides: str, **more: Any) -> Asked:
    return Asked(
        read=lambda further: read_manifest(path, overrides=(*overrides, *further)),
        command="expert benchmark",
        quick=True,
        **more,
    )


class Heard(Watcher):
    """Keeps what was told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []
        self.doing: set[str] = set()
        self.forgotten = ""
        self.warned: list[str] = []

    def begins(self, rung: Any, number: int, of: int, left: float) -> None:
        self.begun.append(rung.name)

    def crowded(self, words: str) -> None:
        self.warned.append(words)

    def goes_on(self, doing: str, done: int, of: int) -> None:
        self.doing.add(doing)

    def ends(self, result: RungResult) -> None:
        self.done.append(result.name)

    def not_remembered(self, because: str) -> None:
        self.forgotten = because


Answer = Callable[[str, dict[str, Any]], Measured | str]
"""What is measured of a rung, or why nothing is."""


class PlayedSeat:
    """Answers with what a function of the plan says, at once."""

    environment: dict[str, Any] = {}

    def __init__(self, rig: PlayedRig) -> None:
        self.rig = rig
        self.name = ""
        self.measured: Measured | None = None
        self.begun = Begun(seconds_per_update=0.1, updates_learnt=10, cores=2, threads=2)

    @property
    def taken(self) -> bool:
        return self.measured is not None

    def begin(self, work: rungs.Work, tell: Any) -> Begun:
        assert not self.taken
        self.rig.begun.append((work.name, work.only_rate, work.threads))
        if not work.only_rate:
            self.rig.plans[work.name] = work.plan
            self.rig.answers[work.name] = self.rig.answer(work.name, work.plan)
        found = self.rig.answers[work.name]
        if isinstance(found, str):
            raise RungLost(found)
        if work.own_way and found.own_loss is None:
            found = found.model_copy(update={"own_loss": found.loss})
        self.name, self.measured = work.name, found
        return self.begun

    def window(self, updates: int, skip: int, tell: Any) -> Window:
        assert self.measured is not None
        self.rig.windows.append(self.name)
        return Window(
            first=10,
            updates=1,
            tokens=round(1000 * self.measured.tokens_per_second),
            examples=1,
            seconds=1000.0 * self.rig.speed(self.name),
            others=0.0,
        )

    def seen(self, tell: Any, *, stays: bool) -> Seen:
        assert self.measured is not None
        measured, self.measured = self.measured, self.measured if stays else None
        return Seen(measured=measured)

    def leave(self) -> None:
        self.measured = None


class PlayedRig:
    """Two played seats, and what they were asked for."""

    environment: dict[str, Any] = {}

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.answers: dict[str, Measured | str] = {}
        self.plans: dict[str, dict[str, Any]] = {}
        self.begun: list[tuple[str, bool, int | None]] = []
        self.windows: list[str] = []
        self.seats = (PlayedSeat(self), PlayedSeat(self))
        self.speed: Callable[[str], float] = lambda name: 1.0
        """Times as long as it should take."""

    def free_seat(self) -> PlayedSeat:
        return next(seat for seat in self.seats if not seat.taken)


def climbed(
    path: Path,
    place: Path,
    answer: Answer,
    *,
    speed: Callable[[str], float] | None = None,
    watcher: Watcher | None = None,
    **more: Any,
) -> tuple[Ladder, PlayedRig, Climb]:
    climb = Climb(asked(path, **more), watcher or Watcher())
    rig = PlayedRig(answer)
    rig.speed = speed or rig.speed
    place.mkdir(parents=True)
    found = climb.run(rig, place)  # type: ignore[arg-type]
    assert not any(seat.taken for seat in rig.seats)
    return found, rig, climb


def rising() -> Callable[[str], float]:
    """100, 200, 300, … for one rung after the other."""
    seen: list[str] = []

    def rate(name: str) -> float:
        seen.append(name)
        return 100.0 * len(seen)

    return rate
