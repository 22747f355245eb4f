"""What a benchmark is asked for, and who follows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError
from expert.jobs.benchmark.rows import ReadWith
from expert.planning.ladder import BASELINE, SETTINGS, Setting, find_setting

if TYPE_CHECKING:
    from expert.insight.ladder.ladder import Ladder, SettingResult


class CannotBenchmark(ExpertError):
    """A benchmark that cannot start."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkRequest:
    """What is to be measured, and how."""

    read: ReadWith
    command: str
    model: str | None = None
    vram: str | None = None
    quick: bool = False
    minutes: float | None = None
    """About as long as it may take; None: two with `quick`, else ten."""
    only: tuple[str, ...] = ()
    """Names of settings; the others are applied without being measured. Empty: all are measured."""
    remember: bool = True
    allow_remote_code: bool = False


class Watcher:
    """Follows a benchmark; this one shows nothing."""

    def preparing(self, name: str, rows: int, tokens: int) -> None:
        """Rows are being tokenised."""

    def begins(self, setting: Setting, number: int, of: int, left: float) -> None:
        """A setting starts, `number` of `of`; about `left` seconds remain for all."""

    def compares(self, name: str, left: float) -> None:
        """The best setting is compared with the baseline directly."""

    def crowded(self, words: str) -> None:
        """Other processes use the cores while settings are timed."""

    def goes_on(self, doing: str, done: int, of: int) -> None:
        """What the setting is doing, and how far it is."""

    def ends(self, result: SettingResult) -> None:
        """A setting was measured, or skipped."""

    def cut_off(self, ladder: Ladder) -> None:
        """Interrupted; this is what was measured by then."""

    def remembered(self, file: Path) -> None:
        """The best setting is remembered for later plans."""

    def not_remembered(self, because: str) -> None:
        """The best setting could not be remembered."""


def wanted_settings(names: tuple[str, ...]) -> list[str]:
    """The full names of these settings; an error lists the known ones."""
    found = []
    for name in names:
        setting = find_setting(name)
        if setting is None:
            known = ", ".join(setting.name for setting in (BASELINE, *SETTINGS))
            raise CannotBenchmark(f"--only {name}: no such setting  (settings: {known})")
        found.append(setting.name)
    return found
