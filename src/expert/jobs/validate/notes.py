"""What a reader of a validation must know besides its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from expert.core.install import pip_install
from expert.core.text import counted
from expert.jobs.validate.standing_verdict import ENOUGH_CASES

if TYPE_CHECKING:
    from expert.judging.cases import Case
    from expert.judging.score import Score


def notes_on(cases: Sequence[Case], domain: str, *, left_out: int = 0) -> list[str]:
    """What the cases do not have, what is not installed, and what that leaves out; `left_out` rows
    are none of the set."""
    from expert.judging.oracles.oracle import missing_packages
    from expert.judging.oracles.typecheck import find_tsc

    told = []
    if left_out:
        told.append(
            f"{counted(left_out, 'row')} more held out and not asked: nothing that is learnt comes "
            "before max_seq_length"
        )
    if not cases:
        return [
            *told,
            "the rows are plain text: there is a loss, and no answer to judge, so that no accuracy "
            "is asked for",
        ]
    notes = told
    if len({case.row for case in cases}) < len(cases):
        notes.append(
            "every answer of a conversation is a case, and those of one go together: intervals and "
            "p count each row once"
        )
    domains = {case.domain or domain for case in cases}
    for each in sorted(domains):
        missing = missing_packages(each)
        if missing:
            names = ", ".join(name.replace("_", "-") for name in missing)
            how = pip_install("validate")
            notes.append(f"{each}: {names} not installed: cases have no oracle  ({how})")
    typed = [case for case in cases if case.check.get("equals") is False]
    if "typescript" in domains and typed and find_tsc() is None:
        notes.append(
            f"typescript: tsc is not installed: the types of {counted(len(typed), 'case')} are not "
            "checked  (npm install --global typescript)"
        )
    return notes


def few_cases(score: Score) -> str:
    """How little an accuracy of few cases tells; "" where there are enough of them, or none."""
    rows = score.judged if score.rows is None else score.rows
    if score.interval is None or rows >= ENOUGH_CASES:
        return ""
    low, high = score.interval
    of = f" of {counted(rows, 'row')}" if rows != score.judged else ""
    tell = "tells" if score.judged == 1 else "tell"
    return (
        f"{counted(score.judged, 'case')}{of} {tell} little: the accuracy lies between {low:.1%} "
        f"and {high:.1%}; {ENOUGH_CASES}{' rows' if of else ''} or more are better"
    )
