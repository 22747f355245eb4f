"""What to change about a run whose answers are not good enough: learning first, speed later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from expert.core.text import loss, percent
from expert.insight.page.environment import statistics_of
from expert.insight.page.facts import RunFacts
from expert.insight.record import listed, mapping
from expert.insight.step.anatomy import finite

FEW_STEPS = 50
FALLING = 0.98
"""A last loss below this share of an earlier one: it was still falling."""


def learning_advice(run: RunFacts, verdict: Mapping[str, Any]) -> list[str]:
    """One sentence each, the most important first; `verdict`: the contents of validation.json."""
    advice = [*_about_length(run), *_about_rows(run), *_about_answers(verdict)]
    return advice or ["more rows like those answered wrongly, or a larger base model"]


def _about_length(run: RunFacts) -> Iterator[str]:
    steps, per_epoch = run.updates or 0.0, finite(run.record.planned("length.steps_per_epoch"))
    if per_epoch and steps < per_epoch:
        seen = f"{percent(steps / per_epoch)} of its rows, {steps:,.0f} of {per_epoch:,.0f} steps"
        yield f"train longer: it saw {seen}  (epochs: 3, no max_steps)"
    elif steps < FEW_STEPS:
        yield f"train longer: {steps:,.0f} steps are few  (more epochs, or a smaller batch_size)"
    if run.learning.fix:
        yield f"{run.learning.sentence} {run.learning.fix}"
    if run.learning.fix or steps < max(per_epoch or 0, FEW_STEPS):
        return
    what, known = "validation loss", [one for _, one in run.eval_points("loss") if one is not None]
    before = known[-2] if len(known) > 1 else None
    if before is None and len(run.smooth_loss) > 1:
        what, known = "training loss", [one for _, one in run.smooth_loss if one is not None]
        before = known[len(known) * 4 // 5 - 1] if known else None
    if before is not None and known[-1] < FALLING * before:
        fell = f"{loss(before)} → {loss(known[-1])}"
        yield f"train longer: the {what} was still falling: {fell}  (more epochs)"


def _about_rows(run: RunFacts) -> Iterator[str]:
    limit = finite(run.record.planned("data.max_seq_length"))
    how = {"cut": "cut", "drop": "left out"}.get(str(run.record.planned("data.overlong")))
    folders = [str(event.get("folder")) for event in run.record.of("data")]
    known = [finite(statistics_of(run.record, each)[1].get("longest")) for each in folders]
    longest = max((value for value in known if value is not None), default=0)
    if limit and how and longest > limit:
        rows = f"rows of up to {longest:,.0f} tokens were {how} at {limit:,.0f}"
        yield f"{rows}  (a larger max_seq_length)"


def _about_answers(verdict: Mapping[str, Any]) -> Iterator[str]:
    cases = [mapping(case) for case in listed(verdict.get("cases"))]
    wrong = [case for case in cases if case.get("passed") is False]
    of = f"of {len(wrong)} wrong answers"
    cut = sum("the answer was cut at" in str(case.get("reason")) for case in wrong)
    parse = sum(case.get("kind") == "parse" for case in wrong)
    for count, what in (
        (cut, "were cut  (a larger decoding.max_new_tokens)"),
        (parse, "do not parse  (expert dataset check shows the rows)"),
    ):
        if 2 * count > len(wrong):
            yield f"{count} {of} {what}"
    if len({case.get("task") for case in cases}) > 1:
        for task, count in Counter(str(case.get("task")) for case in wrong).most_common(1):
            if 2 * count > len(wrong):
                yield f"{count} {of} are of the task {task}  (more training rows of it)"
