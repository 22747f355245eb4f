"""What is advised if the answers are not good enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expert.insight.advice import learning_advice
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.verdict import judge
from expert.insight.outcome import judge_learning
from expert.insight.page.contents import make_page
from expert.insight.page.facts import RunFacts
from expert.insight.record import RunRecord
from expert.insight.step.anatomy import dissect
from tests.each import each
from tests.insight.records import finished_events, planned, step_events


def facts_of(*others: Any, steps: int = 60, plan: Any = None, verdict: Any = None) -> RunFacts:
    """A run of so many steps in ten log lines, whose training loss stays."""
    lines = step_events(10, every=steps / 10, loss=1.0)
    events = tuple(finished_events(lines, *others))
    record = RunRecord(
        folder=Path("here"), plan=plan or planned(), events=events, validation=verdict
    )
    anatomy = dissect(record)
    found = Evidence(run=record, anatomy=anatomy)
    return RunFacts(
        record=record,
        anatomy=anatomy,
        state="finished",
        because="",
        verdict=judge(found, ()),
        learning=judge_learning(found),
        findings=(),
    )


def evals(*losses: float) -> list[Any]:
    return [
        {"event": "eval", "time": 100.0 + n, "step": 10 * n, "loss": value}
        for n, value in enumerate(losses, 1)
    ]


def wrong(*changes: dict[str, Any]) -> dict[str, Any]:
    return {"cases": [{"id": str(n), "passed": False, **each} for n, each in enumerate(changes)]}


EPOCH = planned(length__steps_per_epoch=500)


@each(
    ("run", "verdict", "advice"),
    [
        (facts_of(plan=EPOCH), {}, "train longer: it saw 12 % of its rows, 60 of 500 steps"),
        (facts_of(*evals(3, 2), steps=20), {}, "train longer: 20 steps are few"),
        (facts_of(*evals(3, 2, 1.5)), {}, "the validation loss was still falling: 2.0000 → 1.5000"),
        (facts_of(*evals(3, 1, 2)), {}, "the model memorises the training rows. The final weights"),
        (facts_of(*evals(3, 3, 3)), {}, "learning_rate: another one"),
        (
            facts_of(*evals(3, 1, 1)),
            wrong(*[{"reason": "not JSON; the answer was cut at 64 tokens"}] * 3),
            "3 of 3 wrong answers were cut  (a larger decoding.max_new_tokens)",
        ),
        (facts_of(*evals(3, 1, 1)), wrong({"kind": "parse"}), "1 of 1 wrong answers do not parse"),
        (
            facts_of(*evals(3, 1, 1)),
            wrong({"task": "b"}, {"task": "b"}, {"task": "a"}),
            "2 of 3 wrong answers are of the task b",
        ),
        (facts_of(*evals(3, 1, 1)), {}, "more rows like those answered wrongly"),
    ],
)
def test_the_first_advice_is_about_learning(run, verdict, advice):
    first = learning_advice(run, verdict)[0]
    assert advice in first, first


@pytest.mark.parametrize(("overlong", "word"), [("cut", "cut"), ("drop", "left out")])
def test_rows_that_do_not_fit_are_named(tmp_path, overlong, word):
    (tmp_path / "statistics.json").write_text(json.dumps({"longest": 900}), encoding="utf-8")
    data = {"event": "data", "time": 1.0, "folder": str(tmp_path), "split": "train"}
    plan = planned(data__overlong=overlong, data__max_seq_length=512)
    run = facts_of(data, *evals(3, 1, 1), plan=plan)
    assert learning_advice(run, {})[0].startswith(f"rows of up to 900 tokens were {word} at 512")


def test_the_page_of_a_run_that_failed_its_gate_begins_with_it():
    verdict = {"gate": {"passed": False, "reasons": ["accuracy 1 %"]}, "cases": []}
    reasons = make_page(facts_of(plan=EPOCH, verdict=verdict)).reasons
    assert "What to do: train longer: it saw 12 % of its rows" in reasons
    passed = {"gate": {"passed": True, "reasons": []}, "cases": []}
    assert "train longer" not in make_page(facts_of(plan=EPOCH, verdict=passed)).reasons
