"""The quality lost by quantising: held-out rows validated before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from expert.answer.decoding import resolve_decoding
from expert.core.text import counted
from expert.jobs.validate.held_out import Run
from expert.jobs.validate.requirements import choose_judge
from expert.jobs.validate.test_sets import TestSet
from expert.jobs.validate.validate import answer_rows, judge_answers
from expert.jobs.validate.validation import CheckpointResult
from expert.run.stored.load import Trained

ROWS = 64
"""Held-out rows judged by default: enough for an accuracy within about 10 points."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results on the rows."""

    loss: float
    token_accuracy: float
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
        for shown, one, other in (
            ("token accuracy", before.token_accuracy, after.token_accuracy),
            ("answers right", before.accuracy, after.accuracy),
        ):
            if one is not None and other is not None:
                change = f"{100 * (other - one):+.2f} points"
                rows.append((shown, f"{one:.2%}", f"{other:.2%}", change))
        if self.cases:
            rows.append(("same answers", "", f"{self.same_answers} of {self.cases}", ""))
        return rows

    def on(self) -> str:
        """What it was judged on, in words."""
        asked = f", {counted(self.cases, 'answer')}" if self.cases else ""
        return f"{counted(self.rows, 'row')}{asked} ({self.test_set})"


def results_of(
    run: Run, trained: Trained, test: TestSet, what: str, tell: Callable[[str], None]
) -> CheckpointResult:
    """Judge a loaded model on held-out rows under a name of its own."""
    told: set[str] = set()

    def stage(doing: str, done: int, of: int) -> None:
        if doing not in told:  # one line per stage, not per row
            told.add(doing)
            tell(doing)

    named = replace(trained, choice=replace(trained.choice, name=what))
    judging, how = choose_judge(run, test, None, {}), resolve_decoding(run.plan, {})[0]
    result, answers = answer_rows(run, named, test, judging, how, tell=stage)
    return replace(result, cases=judge_answers(run, what, answers, judging, tell=stage))


def quality_lost(test: TestSet, before: CheckpointResult, after: CheckpointResult) -> Quality:
    """Compare the results of an expert with those of its quantised weights."""
    results = [
        Result(
            loss=each.rows.loss,
            token_accuracy=each.rows.token_accuracy,
            accuracy=each.score.accuracy,
        )
        for each in (before, after)
    ]
    pairs = zip(before.cases, after.cases, strict=True)
    return Quality(
        test_set=test.name,
        rows=len(test.examples),
        cases=len(before.cases),
        before=results[0],
        after=results[1],
        same_answers=sum(first.answer == second.answer for first, second in pairs),
    )
