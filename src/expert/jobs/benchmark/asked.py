"""What a climb is asked for, and who is told how it goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError
from expert.jobs.benchmark.footing import ReadWith
from expert.planning.ladder import BASELINE, RUNGS, Rung, find_rung

if TYPE_CHECKING:
    from expert.insight.ladder.ladder import Ladder, RungResult


class CannotClimb(ExpertError):
    """A ladder that cannot be begun."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be measured, and how."""

    read: ReadWith
    command: str
    model: str | None = None
    vram: str | None = None
    quick: bool = False
    minutes: float | None = None
    """About as long as the climb may take; None: two where it is quick, else ten."""
    only: tuple[str, ...] = ()
    """Names of rungs; the others are taken as they are. None: all are measured."""
    remember: bool = True
    allow_remote_code: bool = False


class Watcher:
    """Told how a climb goes; this one says nothing."""

    def preparing(self, name: str, rows: int, tokens: int) -> None:
        """Rows are being tokenised."""

    def begins(self, rung: Rung, number: int, of: int, left: float) -> None:
        """A rung begins, one of so many; about so many seconds are left for them all."""

    def compares(self, name: str, left: float) -> None:
        """The rung that won is held against the baseline once more."""

    def crowded(self, words: str) -> None:
        """Others use the cores while rungs are timed."""

    def goes_on(self, doing: str, done: int, of: int) -> None:
        """What the rung is doing, and how far it is."""

    def ends(self, result: RungResult) -> None:
        """A rung has ended, or was passed over."""

    def cut_off(self, ladder: Ladder) -> None:
        """An end was asked for; this is what was measured by then."""

    def remembered(self, file: Path) -> None:
        """What won is kept for later plans."""

    def not_remembered(self, because: str) -> None:
        """What won could not be kept."""


def wanted_rungs(names: tuple[str, ...]) -> list[Rung]:
    """The rungs of these names; an error names those that there are."""
    found = []
    for name in names:
        rung = find_rung(name)
        if rung is None:
            known = ", ".join(rung.name for rung in (BASELINE, *RUNGS))
            raise CannotClimb(f"--only {name}: there is no such rung  (rungs: {known})")
        found.append(rung)
    return found
