"""Conversations of several turns: every answer is judged, and each row counts once."""

from __future__ import annotations

from typing import Any

import pytest

from expert.jobs.export.checks import CannotExport
from expert.jobs.export.export import export
from expert.jobs.validate.validate import validate
from expert.judging.score import wilson
from tests.jobs.validated_runs import YES, as_it_was, learnt, rows_file, written

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too


def talk(*said: str, **more: Any) -> dict[str, Any]:
    """A row in which user and assistant take turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
    return {**more, "messages": turns}


def test_every_answer_of_a_conversation_is_asked_for_with_the_turns_before_it(tmp_path):
    rows = [talk(f"sum {n}", '{"sum": 3}', "Sure?", YES, id=f"row-{n}") for n in range(6)]
    done = validate(learnt(), test_set=rows_file(tmp_path, rows), device="cpu")
    assert (done.result.score.passed, done.result.score.failed) == (6, 6)
    assert done.gate.reasons == ("accuracy 50.0% is below 95.0%",)
    first, second = (each.case for each in done.result.cases[:2])
    assert (first.id, first.turns) == ("row-0, turn 2", (("user", "sum 0"),))
    assert second.turns == (("user", "sum 0"), ("assistant", '{"sum": 3}'), ("user", "Sure?"))
    found = [(case["row"], case["turn"]) for case in written(learnt())["cases"]]
    assert found[:3] == [("row-0", 2), ("row-0", 4), ("row-1", 2)]
    # The loss is that of the rows, whole, as before.
    assert done.result.rows.examples == 6


def test_turns_without_an_answer_or_weight_are_not_cases(tmp_path):
    unlearnt = talk("say cat", "dog", "No, really.", YES)
    unlearnt["messages"][1]["weight"] = 0
    talks = [talk("say cat", YES, "Thanks!"), talk("say dog", YES, "Bye."), unlearnt]
    done = validate(learnt(), test_set=rows_file(tmp_path, talks), device="cpu")
    assert done.result.score.accuracy == 1.0
    prompts = [each.case.prompt for each in done.result.cases]
    assert prompts == ["say cat", "say dog", "No, really."]
    # A row with one answer keeps its name.
    assert [each.case.id for each in done.result.cases[:2]] == ["rows.jsonl:1", "rows.jsonl:2"]
    last = done.result.cases[-1].case
    assert (last.expected, last.turns[1]) == (YES, ("assistant", "dog"))


def test_the_interval_and_the_comparison_count_each_conversation_once(tmp_path):
    from expert.cli.validate import score_sheet

    rows = rows_file(tmp_path, [talk(f"a {n}", YES, "b", YES, "c", YES) for n in range(4)])
    done = validate(learnt(), test_set=rows, baseline="base", device="cpu")
    assert (done.result.score.judged, done.result.score.rows) == (12, 4)
    assert done.result.score.interval == wilson(4, 4)
    assert (done.comparison.cases, done.comparison.rows) == (12, 4)
    assert done.comparison.p_value == pytest.approx(2 * 0.5**4)  # four rows, not twelve answers
    assert any(note.startswith("every answer of a conversation is a case") for note in done.notes)
    assert "12 cases of 4 rows" in (score_sheet(done).title or "")


def test_a_limit_counts_answers_and_the_part_says_of_how_many(tmp_path):
    rows = rows_file(tmp_path, [talk(f"a {n}", YES, "b", YES) for n in range(6)])
    done = validate(learnt(), test_set=rows, device="cpu", limit=4)
    assert done.test_set.startswith("4 of 12: ")
    assert done.partial == {"test_set": str(rows), "of": 12}
    asked = [(each.row, each.case.turn) for each in done.result.cases]
    assert asked == [(f"rows.jsonl:{row}", turn) for row, turn in ((1, 2), (2, 4), (4, 2), (5, 4))]
    assert done.result.rows.examples == 4
    with pytest.raises(
        CannotExport, match="not enough to tell whether the quality gate passes: 4 rows: accuracy"
    ):
        export(learnt(), tmp_path / "out", device="cpu")
