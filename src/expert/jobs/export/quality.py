"""What rounding costs: the expert on held-out rows before and after, by the means of `validate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.text import counted

if TYPE_CHECKING:
    from expert.jobs.validate.held_out import Run
    from expert.jobs.validate.test_sets import TestSet
    from expert.jobs.validate.validation import Reached
    from expert.run.stored.load import Trained

ROWS = 64
"""Held-out rows that are judged where nobody says how many: an accuracy to about 10 points."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one form of an expert reaches on the rows."""

    loss: float
    token_accuracy: float
    accuracy: float | None
    """None: no answer could be judged right or wrong."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """An expert before and after it was rounded."""

    test_set: str = ""
    rows: int = 0
    cases: int = 0
    """Questions that were answered."""
    before: Result | None = None
    after: Result | None = None
    same_answers: int = 0
    """Answers that are the same, letter by letter."""
    unknown: str = ""
    """Why nothing was judged; "" where it was."""

    def table(self) -> list[tuple[str, str, str, str]]:
        """Measure, before, after, change."""
        one, other = self.before, self.after
        if one is None or other is None:
            return []
        rows = [
            ("loss", f"{one.loss:.4f}", f"{other.loss:.4f}", f"{other.loss - one.loss:+.4f}"),
            _shares("token accuracy", one.token_accuracy, other.token_accuracy),
        ]
        if one.accuracy is not None and other.accuracy is not None:
            rows.append(_shares("answers right", one.accuracy, other.accuracy))
        if self.cases:
            same = f"{self.same_answers} of {self.cases}"
            rows.append(("same answers", "", same, ""))
        return rows

    def on(self) -> str:
        """On what it was judged, in words."""
        asked = f", {counted(self.cases, 'answer')}" if self.cases else ""
        return f"{counted(self.rows, 'row')}{asked} ({self.test_set})"


def _shares(name: str, one: float, other: float) -> tuple[str, str, str, str]:
    return name, f"{one:.2%}", f"{other:.2%}", f"{100 * (other - one):+.2f} points"


class QualityCheck:
    """The rows, and the expert's answers before it is rounded."""

    def __init__(self, run: Run, trained: Trained, most: int, tell: Callable[[str], None]) -> None:
        from expert.jobs.validate.test_sets import find_test_set

        self._run, self._tell = run, tell
        self._test: TestSet | None = None
        self.unknown = "" if most else "--judged-rows 0"
        if not most:
            return
        try:
            self._test = find_test_set(run, named=None).limited(most)
            self._before = self._reached(trained, "the expert")
        except (ExpertError, OSError, ValueError) as error:
            self._test = None
            self.unknown = str(error).strip().partition("\n")[0]

    def after(self, trained: Trained, what: str) -> Quality:
        """The same for what was written, which lies in the same model now."""
        if self._test is None:
            return Quality(unknown=self.unknown)
        one, other = self._before, self._reached(trained, what)
        pairs = zip(one.cases, other.cases, strict=True)
        return Quality(
            test_set=self._test.name,
            rows=len(self._test.examples),
            cases=len(one.cases),
            before=_result(one),
            after=_result(other),
            same_answers=sum(first.answer == second.answer for first, second in pairs),
        )

    def _reached(self, trained: Trained, what: str) -> Reached:
        from expert.jobs.validate.models import ModelHere
        from expert.jobs.validate.validate import reach

        assert self._test is not None
        named = replace(trained, choice=replace(trained.choice, name=what))

        told: set[str] = set()

        def tell(doing: str, done: int, of: int) -> None:
            if doing not in told:  # a line for each stage, not for each row
                told.add(doing)
                self._tell(doing)

        return reach(self._run, ModelHere(named), self._test, device=trained.device, tell=tell)


def _result(reached: Reached) -> Result:
    rows: Any = reached.rows
    return Result(
        loss=rows.loss, token_accuracy=rows.token_accuracy, accuracy=reached.score.accuracy
    )
