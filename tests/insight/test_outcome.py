"""How learning went: reported first, with numbers, and called good only if it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from expert.insight.outcome import Outcome, judge_learning
from tests.each import each
from tests.insight.pages import START, finished, page_of, started, step_event, usual, write_run
from tests.insight.records import evidence, finished_events, record, step_events

FALLING = [2.0 * 0.9**n for n in range(50)]
MEMORISED = [1.2 * 0.9**n for n in range(50)]
STEEP = [1.2 * 0.8**n for n in range(50)]
KEPT = {"event": "took_best", "step": 20}
STOPPED = {"event": "not_finite", "step": 3, "policy": "stop"}


def steps_of(losses: list[Any]) -> list[dict[str, Any]]:
    return [{**step_events(1)[0], "step": n, "loss": loss} for n, loss in enumerate(losses, 1)]


def evals_of(*losses: float, every: int = 10) -> list[dict[str, Any]]:
    told = {"event": "eval", "split": "validation", "seconds": 0.1}
    return [{**told, "step": n * every, "loss": loss} for n, loss in enumerate(losses, 1)]


def outcome(losses: list[Any], *more: dict[str, Any]) -> Outcome:
    return judge_learning(evidence(record(finished_events(steps_of(losses), *more))))


@each(
    ("losses", "evals", "kind", "words"),
    [
        (FALLING, (2.0, 1.0, 1.8, KEPT), "overfitted", "The weights of step 20 were kept."),
        (MEMORISED, (1.01, 1.4, 1.8), "overfitted", "evaluation on: 1.0100 → 1.8000 at step 30"),
        (FALLING, (1.0, 1.2), "overfitted", ""),  # two evaluations are enough
        (FALLING, (1.5, 1.0, 1.04), "learning", ""),  # noise is not overfitting
        ([2.0] * 30, (), "not learning", "did not fall: first 2.0"),
        ([2.0] * 30, (2.0, 2.0), "not learning", "did not fall: first 2.0"),
        ([2.0, 2.01] * 15, (), "not learning", "did not fall: first 2.0"),
        ([*FALLING[:30], *([3.0] * 20)], (), "diverged", ""),
        ([*FALLING[:20], "nan"], (), "diverged", ""),
        (FALLING[:3], (STOPPED,), "diverged", ""),
        ([*FALLING, *([0.02] * 10)], (), "learning", ""),  # a loss near zero may double
        (
            FALLING,
            (1.5, 0.9, 0.8),
            "learning",
            "The validation loss fell from 1.5000 to 0.8000 (training",
        ),
        (FALLING, (), "learning", "No rows were held out"),
        (STEEP, (1.80,), "learning", "is far above the training loss"),
        *((FALLING[:lines], (), "unknown", "") for lines in (0, 1, 9)),
    ],
)
def test_what_became_of_a_run_is_told_by_its_losses(losses, evals, kind, words):
    told = [one for one in evals if isinstance(one, dict)]
    found = outcome(losses, *evals_of(*(one for one in evals if one not in told)), *told)
    assert found.kind == kind
    assert words in found.sentence
    assert found.is_good == (kind == "learning" or KEPT in told)


# --- on the page ---------------------------------------------------------------------------------


def test_the_head_of_an_overfitted_run_is_about_learning_and_nowhere_good(tmp_path: Path):
    steps = [step_event(n, loss=loss) for n, loss in enumerate(MEMORISED, 1)]
    evals = [{**event, "time": START + event["step"]} for event in evals_of(1.01, 1.4, 1.8)]
    page = page_of(write_run(tmp_path / "run", [started(), *steps, *evals, finished(50)]))
    assert (page.kind, page.tone) == ("overfitted", "warning")
    assert page.verdict.startswith("The validation loss rose from the first evaluation on: ")
    assert page.verdict.endswith("The final weights are the last ones, not the best.")
    assert "Good." not in page.verdict
    assert page.reasons.startswith("Speed: compute-bound. ")
    assert "What to do: training.config.load_best_model_at_end: true" in page.reasons


def test_a_stopped_run_is_reported_before_all_else(tmp_path: Path):
    stop = {"event": "stopped", "time": START + 40, "step": 30, "reason": "SIGINT"}
    page = page_of(write_run(tmp_path / "run", [*usual()[:-1], stop]))
    assert (page.kind, page.tone) == ("stopped early", "warning")
    assert page.verdict == "The run ended after step 30 of 30."
    assert "Learning: The training loss fell" in page.reasons


def test_wrong_answers_come_right_after_the_loss_then_the_tasks(tmp_path: Path):
    cases = [
        {"id": n, "prompt": f"p{n}", "answer": f"a{n}", "passed": n % 2 == 0} for n in range(12)
    ]
    facts = {"accuracy": 0.5, "cases": cases, "gate": {"passed": False, "reasons": ["x"]},
             "tasks": {"sums": {"accuracy": 0.25, "passed": 1, "cases": 4}}}  # fmt: skip
    page = page_of(write_run(tmp_path / "run", usual(), validation=facts))
    assert [section.name for section in page.sections][:2] == ["loss", "validation"]
    folds = re.findall(r"<details( open)?><summary>([^<]+)", page.sections[1].html)
    assert folds == [
        (" open", "6 wrong answers"),
        ("", "6 correct answers"),
    ]
    html = page.sections[1].html
    wrong, tasks, correct = (
        html.index(one) for one in ("6 wrong answers", "1 of 4", "6 correct answers")
    )
    assert wrong < tasks < correct
    assert "25.0%" in html
    assert not any(section.folded for section in page.sections[:3])
    assert all(section.folded for section in page.sections[4:])
