"""The quality lost by quantising: held-out rows validated before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.jobs.validate.held_out import Run
from expert.jobs.validate.test_sets import TestSet, find_test_set
from expert.jobs.validate.validate import evaluate_model
from expert.jobs.validate.validation import CheckpointResult
from expert.run.stored.load import Trained

ROWS = 64
"""Held-out rows judged by default: enough for an accuracy within about 10 points."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results on the rows."""

    loss: float
    token_accuracy: float | None
    accuracy: float | None
    """None if no answer could be judged right or wrong."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """An expert before and after quantising."""

    test_set: str = ""
    rows: int = 0
    cases: int = 0
    """Questions answered."""
    before: Result | None = None
    after: Result | None = None
    same_answers: int = 0
    """Identical answers."""
    unknown: str = ""
    """Why nothing was judged, or ""."""

    def table(self) -> list[tuple[str, str, str, str]]:
        """Measure, before, after, change."""
        before, after = self.before, self.after
        if before is None or after is None:
            return []
        change = f"{round(after.loss - before.loss, 4) + 0.0:+.4f}"  # never -0.0000
        rows = [("loss", f"{before.loss:.4f}", f"{after.loss:.4f}", change)]
        for name in ("token_accuracy", "accuracy"):
            one, other = getattr(before, name), getattr(after, name)
            if one is not None and other is not None:
                shown = "answers right" if name == "accuracy" else "token accuracy"
                change = f"{100 * (other - one):+.2f} points"
                rows.append((shown, f"{one:.2%}", f"{other:.2%}", change))
        if self.cases:
            rows.append(("same answers", "", f"{self.same_answers} of {self.cases}", ""))
        return rows

    def on(self) -> str:
        """What it was judged on, in words."""
        asked = f", {counted(self.cases, 'answer')}" if self.cases else ""
        return f"{counted(self.rows, 'row')}{asked} ({self.test_set})"


class QualityCheck:
    """Held-out rows, and the expert's results on them before quantising."""

    def __init__(self, run: Run, trained: Trained, most: int, tell: Callable[[str], None]) -> None:
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
        """Compare with the results of `trained`, which now has the quantised weights."""
        if self._test is None:
            return Quality(unknown=self.unknown)
        before, after = self._before, self._reached(trained, what)
        pairs = zip(before.cases, after.cases, strict=True)
        return Quality(
            test_set=self._test.name,
            rows=len(self._test.examples),
            cases=len(before.cases),
            before=_result(before),
            after=_result(after),
            same_answers=sum(first.answer == second.answer for first, second in pairs),
        )

    def _reached(self, trained: Trained, what: str) -> CheckpointResult:
        assert self._test is not None
        named = replace(trained, choice=replace(trained.choice, name=what))
        told: set[str] = set()

        def tell(doing: str, done: int, of: int) -> None:
            if doing not in told:  # one line per stage, not per row
                told.add(doing)
                self._tell(doing)

        return evaluate_model(self._run, named, self._test, tell=tell)


def _result(result: CheckpointResult) -> Result:
    rows, accuracy = result.rows, result.score.accuracy
    return Result(loss=rows.loss, token_accuracy=rows.token_accuracy, accuracy=accuracy)
