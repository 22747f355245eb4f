"""`expert improve`: what is asked, what is trained on, and that nothing is asked twice."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from expert import improve
from expert.answer.writer import Answer
from expert.core.errors import ExpertError
from expert.data.records import Example, Turn
from expert.jobs.improve import answers as asking
from expert.jobs.improve.answers import Asked, OwnAnswer, doubts_about, facts_of, read_answers
from expert.jobs.improve.groups import first_and_last
from expert.jobs.improve.overlap import overlapping
from expert.jobs.improve.rows import (
    copies_for,
    pairs,
    right_answers,
    row_of,
    rows_to_judge_by,
)
from expert.jobs.report import report
from expert.jobs.validate.test_sets import TestSet
from expert.jobs.validate.validate import JudgeChoice
from expert.jobs.validate.vote import vote
from expert.judging.cases import Case
from expert.judging.gate import GateRequirements
from expert.judging.judge_command import JudgeCommand
from tests.each import each
from tests.jobs.drawn import drawn_and_learnt
from tests.jobs.runs import base_model, place, plan_of, run, saved_steps, write_expert
from tests.jobs.trained_runs import with_plan
from tests.jobs.validated_runs import ROWS, TESTS, YES, rows_file

LINES = [json.dumps(row) for row in ROWS]


def own(
    text: str, *, passed: bool | None = True, kind: str = "equal", tokens: int = 5
) -> OwnAnswer:
    return OwnAnswer(
        text=text, tokens=tokens, ended=tokens < 99, passed=passed, reason="", kind=kind
    )


def asked(id: str, *answers: OwnAnswer, expected: str = "gold") -> Asked:
    return Asked(id=id, prompt=id, expected=expected, answers=answers)


def rows(*prompts: str, answer: str = "gold") -> TestSet:
    """Rows of one question and its answer."""
    turns = [(Turn("user", text), Turn("assistant", answer)) for text in prompts]
    return TestSet(
        name="rows",
        domain="",
        examples=tuple(map(Example, turns)),
        cases=tuple(
            (Case(id=text, turns=(("user", text),), expected=answer, turn=2),) for text in prompts
        ),
    )


def answers_in(found: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][-1]["content"] for row in found]


# --- rows ----------------------------------------------------------------------------------------


def test_every_prompt_is_trained_on_as_often_with_its_right_answers_else_the_expected_one():
    trained = rows("a", "b", "c")
    known = [
        asked("a", own("x"), own("y"), own(" x "), own("no", passed=False)),
        asked("b", own("no", passed=False), own("cut", tokens=99), own(" ")),
    ]
    assert copies_for(known, 3.0) == 2  # no prompt has more different right answers
    assert copies_for(known, 1.0) == 1  # nor are there more epochs to share
    found = answers_in(list(right_answers(trained, known, 2)))
    assert found == ["x", "y", "gold", "gold", "gold", "gold"]


def test_a_pair_is_a_right_answer_or_the_expected_one_beside_a_wrong_one():
    trained = rows("a", "b", "c")
    known = [
        asked("a", own("x"), own("bad", passed=False), own("worse", passed=False)),
        asked("b", own("bad", passed=False), own("?", passed=None)),
        asked("c", own("x")),
    ]
    found = [
        (row["prompt"][0]["content"], row["chosen"][0]["content"], row["rejected"][0]["content"])
        for row in pairs(trained, known)
    ]
    assert found == [("a", "x", "bad"), ("a", "x", "worse"), ("b", "gold", "bad")]


def test_of_a_conversation_only_the_answer_that_was_asked_for_is_trained_on():
    turns = [
        Turn("user", "1"),
        Turn("assistant", "one"),
        Turn("user", "2"),
        Turn("assistant", "two"),
    ]
    cases = tuple(Case(id=f"r, turn {n}", turns=(), expected="", turn=n, row="r") for n in (2, 4))
    talk = TestSet(name="", domain="", examples=(Example(tuple(turns)),), cases=(cases,))
    (first, second) = right_answers(talk, [asked("r, turn 4", own("zwei"))], 1)
    assert answers_in([first, second]) == ["one", "zwei"]
    assert [message.get("weight") for message in second["messages"]] == [None, 0, None, None]


def test_an_answer_inside_a_prompt_stays_untrained_and_a_call_does_not_judge_the_text_after_it():
    context = Turn("assistant", "as before", in_prompt=True)
    row = row_of(Example((Turn("user", "1"), context, Turn("user", "2"), Turn("assistant", "x"))))
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, None]
    call = Case(id="r, turn 2", turns=(), expected="", domain="calls", check={"calls": []}, row="r")
    text = Case(id="r, turn 4", turns=(), expected="x", check={"equals": True}, row="r")
    test = TestSet(name="", domain="", examples=(Example(()),), cases=((call, text),))
    (kept,) = rows_to_judge_by(test)
    assert (kept["id"], kept.get("domain"), kept["check"]) == ("r", None, '{"equals": true}')


# --- the test set --------------------------------------------------------------------------------

QUESTION = "Which of the {} countries that border the sea exports the most cheese to Norway?"
SCHEMA = " Schema: CREATE TABLE trade (country TEXT, goods TEXT, tonnes INTEGER, year INTEGER)"


@each(
    "prompt, expected, is_known",
    [
        (QUESTION.format("five"), "France", True),
        (QUESTION.format("five").upper() + "!", "Denmark", True),
        (QUESTION.format("five") + " Please answer.", "france.", True),
        (QUESTION.format("five") + " Please answer.", "Denmark", False),
        ("Which country that borders the sea imports most?", "France", False),
        ("How many tonnes of butter were sold in 1999?" + SCHEMA, "France", False),
        ("哪个国家出口最多的奶酪到挪威今年在北方的海边？请回答。", "法国", True),
        ("哪个国家出口最多的黄油到挪威今年在南方的山边？", "法国", False),
        ("Which x has x < 5?", "a", True),
        ("Which x has x > 5?", "b", False),
        ("", "", False),
    ],
)
def test_a_prompt_of_the_test_set_or_nearly_is_recognised(prompt, expected, is_known):
    # Many questions share a schema, which says nothing about copies.
    others = [(f"What is number {n} of our {n * 7} ships?{SCHEMA}", "Ann") for n in range(40)]
    tests = [
        (QUESTION.format("five"), "France"),
        ("哪个国家出口最多的奶酪到挪威今年在北方的海边？", "法国"),
        ("Which x has x < 5?", "a"),
    ]
    found = overlapping([(prompt, expected), *others[20:]], [*tests, *others[:20]])
    assert found[0] is is_known
    assert not any(found[1:])


# --- doubts and votes ----------------------------------------------------------------------------


@each(
    "answers, says",
    [
        ([asked(str(n), own("gold")) for n in range(4)], ""),
        ([asked(str(n), own(f"gold {n} " * 3)) for n in range(4)], "times as long"),
        ([asked(str(n), own("yes"), expected=f"no{n}") for n in range(4)], "the same text"),
        ([asked(str(n), own("yes"), expected="yes") for n in range(4)], ""),
        ([asked(str(n), own(f"g {n}", kind="schema")) for n in range(4)], "form alone"),
        ([asked("a", own("gold", passed=False))], ""),
    ],
)
def test_answers_that_only_please_the_judge_are_doubted(answers, says):
    found = doubts_about(answers, None)
    assert bool(found) == bool(says)
    assert says in "".join(found)


def test_answers_that_grow_from_round_to_round_are_doubted():
    now = [asked("a", own("gold", tokens=30))]
    assert doubts_about(now, {"tokens": 29.0}) == []
    assert "answers grow" in doubts_about(now, {"tokens": 15.0})[0]


def test_answers_that_grow_from_step_to_step_are_doubted_though_none_is_right():
    wrong = [
        replace(asked("a", own("gold", tokens=9 + 2 * step, passed=False)), step=step)
        for step in range(20)
    ]
    first, last = first_and_last(wrong)
    assert [[each.step for each in part] for part in (first, last)] == [[0, 1], [18, 19]]
    assert "answers grow: 46 tokens, 10 before" in doubts_about(last, facts_of(first))[0]


def test_a_vote_takes_the_answer_whose_result_most_share():
    table = "CREATE TABLE t (a INTEGER, b INTEGER); INSERT INTO t VALUES (1, 2), (3, 4), (5, 6)"
    case = Case(id="1", turns=(("user", "?"),), expected="unknown", check={"setup": table})
    texts = [
        "SELECT b FROM t WHERE a > 1",
        "SELECT a FROM t",
        "SELECT a FROM t",
        "SELECT b FROM t WHERE a >= 3",
        "SELECT b FROM t WHERE NOT a = 1",
    ]
    answers = [Answer(text=text, marked=text, tokens=9, ended=True) for text in texts]
    assert vote([case], [answers], domain="sql")[0].text == texts[0]
    assert vote([case], [answers], domain="text")[0].text == texts[1]  # two are the same text


def test_answers_that_were_cut_have_no_vote():
    answers = [
        Answer(text=text, marked=text, tokens=9, ended=text == "b") for text in ("a", "a", "b")
    ]
    case = Case(id="1", turns=(("user", "?"),), expected="a")
    assert vote([case], [answers], domain="text")[0].text == "b"


# --- whole rounds --------------------------------------------------------------------------------


@cache
def unsure() -> Path:
    """The run of an expert that answers right at times, if it samples."""
    folder = place() / "unsure"
    path = write_expert(
        folder,
        base_model(2),
        {"epochs": 4, "learning_rate": 1e-2, "rank": 16, "modules_to_save": ["lm_head"]},
        rows=ROWS,
        dataset={"test_path": "test.jsonl"},
        capabilities=["format:json"],
    )
    rows_file(folder, TESTS, "test.jsonl")
    return run(path).folder


HOW: dict[str, Any] = {"answers": 4, "prompts": 8, "rounds": 1, "temperature": 1.0, "device": "cpu"}


@pytest.mark.parametrize("method", ["rft", "dpo", "grpo"])
def test_a_round_asks_judges_trains_and_is_judged(tmp_path, method):
    said: list[str] = []
    own = {**HOW, "say": said.append}
    done = improve(unsure(), method=method, output=tmp_path, min_accuracy=1.0, **own)
    assert len(said) == 2
    assert re.match(r"a round: \d+ answers to \d+ prompts in .*, test rows in", said[0])
    assert ("training in about" in said[0]) == (method != "grpo")
    assert re.match(r"memory: [\d.]+ [GM]iB as planned", said[1])
    found = read_answers(done.folder / "round-1" / "answers.jsonl")
    assert len(found) == 8
    assert {len(each.answers) for each in found} == {4}
    assert {one.passed for each in found for one in each.answers} == {True, False}
    (only,) = done.rounds
    assert only.standing is not None
    assert only.standing.judged == done.before.judged == len(TESTS)
    assert only.facts["answers"] == 32
    state = json.loads((done.folder / "improve.json").read_text())
    assert state["ended"]
    assert state["best"] == done.best.run
    page = report(Path(only.run), to=tmp_path / "page.html").html.read_text(encoding="utf-8")
    assert "Accuracy on the test rows, by round" in page
    assert "round 1 (this run)" in page
    assert "Prompts that were answered right and wrong" in page
    plan = plan_of(Path(only.run))
    if method == "rft":
        assert only.rows % 43 == 0  # the run held five of its 48 rows out
        assert plan["adapter"]["start"] is None
    else:
        assert plan["adapter"]["start"] == str(unsure() / "final")
        assert plan["objective"]["loss"] == {"dpo": "sigmoid", "grpo": None}[method]
        assert ("Rewards of the model" in page) == (method == "grpo")


def test_what_is_interrupted_goes_on_without_asking_anything_twice(tmp_path, monkeypatch):
    how = {**HOW, "min_accuracy": 1.0, "output": tmp_path}
    monkeypatch.setattr(asking, "ANSWERS_AT_ONCE", {"cpu": 8})
    whole = improve(unsure(), **{**how, "output": tmp_path / "whole"})
    from expert.answer import engine

    answer_all, calls = engine.answer_all, list[int]()

    def counting(trained: Any, questions: Any, settings: Any, **more: Any) -> Any:
        if "numbers" in more:  # not the validation's
            calls.append(len(questions))
            if len(calls) == 3:
                raise KeyboardInterrupt
        return answer_all(trained, questions, settings, **more)

    monkeypatch.setattr(engine, "answer_all", counting)
    with pytest.raises(KeyboardInterrupt):
        improve(unsure(), **how)
    (folder,) = tmp_path.glob("2*")
    file = folder / "round-1" / "answers.jsonl"
    with file.open("ab") as stream:
        stream.write(b'{"id": "half a li')
    kept = len(read_answers(file))
    assert kept
    calls[:] = [0, 0, 0]
    done = improve(unsure(), **how, resume=True)
    assert done.folder == folder
    assert sum(calls[3:]) == (8 - kept) * 4
    assert file.read_bytes() == (whole.folder / "round-1" / "answers.jsonl").read_bytes()
    with pytest.raises(ExpertError, match="there is no improvement"):
        improve(unsure(), **{**how, "output": tmp_path / "elsewhere"}, resume=True)


def test_more_rounds_follow_an_improvement_that_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("expert.jobs.improve.improve._brought_nothing", lambda done: False)
    how = {**HOW, "min_accuracy": 1.0, "output": tmp_path}
    once = improve(unsure(), **how)
    assert once.ended == "1 round done"
    again = improve(unsure(), **{**how, "rounds": 2}, resume=True)
    assert again.folder == once.folder
    assert again.rounds[0].run == once.rounds[0].run
    assert again.ended == "2 rounds done"


STEPS: dict[str, Any] = {
    **HOW,
    "method": "grpo",
    "min_accuracy": 1.0,
    "overrides": ("batch_size=2", "learning_rate=1e-3"),
}


def weights(run: str) -> bytes:
    return (Path(run) / "final" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("cut", [0, 40])
def test_steps_of_answers_go_on_where_they_were_interrupted_with_the_same_weights(
    tmp_path, monkeypatch, cut
):
    from expert.jobs.improve import groups

    whole = improve(unsure(), **STEPS, output=tmp_path / "whole")
    curve = whole.rounds[0].facts["steps"]
    assert len(curve) >= 4
    judged, calls = groups.judged, list[int]()

    def counting(cases: Any, answers: Any, judging: Any, **more: Any) -> Any:
        calls.append(len(answers))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return judged(cases, answers, judging, **more)

    monkeypatch.setattr(groups, "judged", counting)
    with pytest.raises(KeyboardInterrupt):
        improve(unsure(), **STEPS, output=tmp_path / "cut")
    (folder,) = (tmp_path / "cut").glob("2*")
    file = folder / "round-1" / "answers.jsonl"
    if cut:  # the last line too: its whole step is asked again
        file.write_bytes(file.read_bytes()[:-cut])
    calls[:] = [0, 0, 0]
    done = improve(unsure(), **STEPS, output=tmp_path / "cut", resume=True)
    assert len(calls[3:]) == len(curve) - (1 if cut else 2)
    assert file.read_bytes() == (whole.folder / "round-1" / "answers.jsonl").read_bytes()
    assert weights(done.rounds[0].run) == weights(whole.rounds[0].run)
    assert weights(done.rounds[0].run) != weights(str(unsure()))


def test_tokens_are_as_likely_when_they_are_learnt_as_when_they_were_drawn(tmp_path, monkeypatch):
    drawn, learnt = drawn_and_learnt(monkeypatch)
    improve(unsure(), **STEPS, output=tmp_path)
    assert len(drawn) > 50
    # Float32 logits of a batch differ from those of a row alone by up to 3e-5.
    assert learnt == pytest.approx(drawn, abs=1e-4)


def test_a_step_whose_groups_have_no_difference_changes_nothing(tmp_path):
    judge = tmp_path / "score.py"
    judge.write_text("def judge(prompt, expected, answer):\n    return 0\n", encoding="utf-8")
    how = {**STEPS, "min_accuracy": None, "min_score": 0.9, "judge_command": str(judge)}
    done = improve(unsure(), **how, output=tmp_path / "out")
    (only,) = done.rounds
    assert {each["mixed"] for each in only.facts["steps"]} == {0}
    assert weights(only.run) == weights(str(unsure()))


def test_a_signal_stops_a_run_whose_groups_have_no_difference(tmp_path, monkeypatch):
    from expert.jobs.improve import groups

    whole, calls, judged = improve(unsure(), **STEPS, output=tmp_path / "whole"), [], groups.judged

    def without_difference(cases: Any, answers: Any, judging: Any, **more: Any) -> Any:
        calls.append(len(answers))
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        found = judged(cases, answers, judging, **more)
        if len(calls) == 1:
            return found
        same = [replace(one, passed=False) for each in found for one in each.answers]
        return [replace(each, answers=tuple(same[:4])) for each in found]

    monkeypatch.setattr(groups, "judged", without_difference)
    how = {**STEPS, "overrides": (*STEPS["overrides"], "save_steps=1"), "output": tmp_path / "cut"}
    stopped = improve(unsure(), **how)
    assert stopped.exit_code != 0
    assert len(calls) == 3
    done = improve(unsure(), **how, resume=True)
    assert len(done.rounds[0].facts["steps"]) == len(calls) == 4
    assert weights(str(done.rounds[0].run)) != weights(str(whole.rounds[0].run))


def test_prompts_that_leave_no_room_are_counted_and_notes_are_kept_once(tmp_path, monkeypatch):
    from expert.run.session.groups import Sampler

    prompt = Sampler.prompt
    monkeypatch.setattr(
        Sampler, "prompt", lambda self, row: None if "1" in row.turns[0].text else prompt(self, row)
    )
    judge = tmp_path / "score.py"
    judge.write_text("def judge(prompt, expected, answer):\n    return len(answer) / 1000\n")
    how = {**STEPS, "min_accuracy": None, "min_score": 0.9, "judge_command": str(judge)}
    done = improve(unsure(), **how, output=tmp_path / "out")
    left = 8 - done.rounds[0].facts["prompts"]
    assert 0 < left < 8
    assert any(f"{left} prompt" in text and "no room" in text for text in done.notes)
    assert len(set(done.notes)) == len(done.notes)


def test_a_run_that_answers_with_a_checkpoint_is_not_continued_from_another(tmp_path):
    (step, *_) = saved_steps(unsure())
    with_checkpoint = with_plan(
        unsure(), tmp_path / "run", watch={"packaging_checkpoint": f"checkpoint-{step}"}
    )
    with pytest.raises(ExpertError, match="continues final/"):
        improve(with_checkpoint, **STEPS, output=tmp_path)


def test_layers_that_carry_a_state_cannot_share_a_prompt(tmp_path):
    work = plan_of(unsure())["memory"]["workload"]
    changed = {"workload": {**work, "shape": {**work["shape"], "recurrent": "conv"}}}
    stateful = with_plan(unsure(), tmp_path / "run", memory=changed)
    with pytest.raises(ExpertError, match="carry a state from there"):
        improve(stateful, **STEPS, output=tmp_path)


def test_only_improve_trains_on_answers_of_the_run(tmp_path):
    done = improve(unsure(), **STEPS, output=tmp_path)
    with pytest.raises(ExpertError, match="expert improve RUN --method grpo"):
        run(done.folder / "round-1" / "manifest.json")
    with pytest.raises(ExpertError, match="drawn as the weights have it"):
        improve(unsure(), **{**STEPS, "temperature": 0.5}, output=tmp_path)


def test_all_weights_learn_from_their_answers_too(tmp_path):
    whole = write_expert(
        tmp_path,
        base_model(2),
        {"epochs": 3, "learning_rate": 5e-3, "adapter_type": "full", "bf16": True},
        rows=ROWS,
        capabilities=["format:json"],
    )
    rows_file(tmp_path, TESTS, "test.jsonl")
    begun = run(whole).folder
    test_set = tmp_path / "test.jsonl"
    done = improve(begun, **STEPS, test_set=test_set, output=tmp_path / "out")
    plan = plan_of(Path(done.rounds[0].run))
    assert plan["model"]["location"] == str(begun / "final")
    assert plan["model"]["prompt_template"] == plan_of(begun)["model"]["prompt_template"]
    with pytest.raises(ExpertError, match="a second copy of all weights"):
        improve(begun, **{**STEPS, "overrides": ("beta=0.1",)}, test_set=test_set, output=tmp_path)


def test_a_test_set_among_the_training_prompts_is_refused(tmp_path):
    file = tmp_path / "seen.jsonl"
    file.write_text("\n".join(LINES), encoding="utf-8")
    with pytest.raises(ExpertError, match="learnt by heart"):
        improve(unsure(), output=tmp_path, test_set=file, **HOW)


def test_an_expert_whose_answers_nothing_judges_is_refused(tmp_path):
    with pytest.raises(ExpertError, match="nothing says which answers are right"):
        improve(unsure(), output=tmp_path, domain="open", **HOW)


def test_other_settings_do_not_continue_what_was_begun(tmp_path, monkeypatch):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    how = {**HOW, "min_accuracy": 1.0, "output": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        improve(unsure(), **how, train=stop)
    with pytest.raises(ExpertError, match="another answers"):
        improve(unsure(), **{**how, "answers": 2}, resume=True)
    (folder,) = tmp_path.glob("2*")
    answers = folder / "round-1" / "answers.jsonl"
    kept = answers.read_bytes()
    answers.write_bytes(b'{"id": 1}\n' + kept)
    with pytest.raises(ExpertError, match=r"answers.jsonl:1: is not as it was written"):
        improve(unsure(), **how, resume=True)
    answers.write_bytes(kept)
    file = folder / "improve.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "rounds": [{"who": 1}]}))
    with pytest.raises(ExpertError, match=r"improve.json: is not as it was written"):
        improve(unsure(), **how, resume=True)
    # A run of another folder is not continued, whatever the file says.
    state["rounds"][0]["run"] = str(unsure())
    file.write_text(json.dumps(state))
    asked: list[str | None] = []

    def look(read: Any, resume: str | None, *_: Any) -> None:
        asked.append(resume)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        improve(unsure(), **how, resume=True, train=look)
    assert asked == [None]
    # Nor is another run taken for the best.
    changed = {**state, "before": {**state["before"], "run": str(tmp_path / "other"), "gate": True}}
    file.write_text(json.dumps(changed))
    with pytest.raises(ExpertError, match="is not below"):
        improve(unsure(), **how, resume=True)
    file.write_text(json.dumps(state))
    precious = tmp_path / "precious.txt"
    precious.write_text("kept")
    answers.unlink()
    answers.symlink_to(precious)
    with pytest.raises(ExpertError, match=r"answers.jsonl: is a link"):
        improve(unsure(), **how, resume=True)
    assert precious.read_text() == "kept"


def test_what_a_schema_accepts_does_not_vote_for_what_it_refuses():
    case = Case(id="1", turns=(), expected="", check={"schema": {"type": "object"}})
    texts = ["not json", "{}", '{"a": 1}']
    answers = [Answer(text=text, marked=text, tokens=9, ended=True) for text in texts]
    assert vote([case], [answers], domain="json")[0].text == texts[1]


@each(
    "setting, name",
    [
        ("training.dataset.path=x", "training.dataset"),
        ("path=x", "training.dataset"),
        ("validation_split=0.5", "training.dataset"),
        ("output_dir=x", "output_dir"),
        ("model=x", "base_models"),
        ("repetition_penalty=1.3", "training.decoding"),
    ],
)
def test_what_a_round_sets_itself_cannot_be_set(tmp_path, setting, name):
    with pytest.raises(ExpertError, match=f"a round sets.*{name}"):
        improve(unsure(), output=tmp_path, overrides=(setting,), **HOW)


def test_pairs_can_be_made_of_a_run_that_was_trained_on_preferred_answers(tmp_path):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    preferred = write_expert(
        tmp_path,
        base_model(2),
        {"max_steps": 2},
        rows=ROWS,
        dataset={"preference_rows": "preferred", "test_path": "test.jsonl"},
        capabilities=["format:json"],
    )
    rows_file(tmp_path, TESTS, "test.jsonl")
    how = {**HOW, "method": "dpo", "min_accuracy": 1.0, "output": tmp_path / "out"}
    with pytest.raises(KeyboardInterrupt):
        improve(run(preferred).folder, **how, train=stop)


def test_a_wrong_setting_is_refused_before_anything_is_asked(tmp_path):
    with pytest.raises(ExpertError, match="learning_rate"):
        improve(unsure(), output=tmp_path, overrides=("learning_rate=fast",), **HOW)
    assert not list(tmp_path.glob("*"))


def test_a_judge_that_gives_no_scores_ends_the_round_before_anything_is_learnt(tmp_path):
    judge = tmp_path / "score.py"
    judge.write_text("def judge(prompt, expected, answer):\n    return None\n", encoding="utf-8")
    with pytest.raises(ExpertError, match="answers have no score"):
        improve(unsure(), output=tmp_path, judge_command=str(judge), **HOW)
    assert not list(tmp_path.glob("2*/round-1/rows.jsonl"))


def test_the_expected_json_is_never_shown_to_the_vote():
    case = Case(id="1", turns=(("user", "?"),), expected=YES)
    texts = ['{"ok": true}', '{"ok": 1, "n": 2}', '{"n": 2, "ok": 1}']
    answers = [Answer(text=text, marked=text, tokens=9, ended=True) for text in texts]
    assert vote([case], [answers], domain="json")[0].text == texts[1]


def test_what_the_rows_of_a_round_would_not_keep_is_refused(tmp_path):
    weighted = with_plan(
        unsure(),
        tmp_path / "weighted",
        data={"dataset": {"tasks": {"a": {"train": "x", "weight": 3}}}},
    )
    with pytest.raises(ExpertError, match="its tasks have weights"):
        improve(weighted, output=tmp_path, **HOW)


def test_an_interruption_does_not_wait_for_a_judge_command(tmp_path, monkeypatch):
    """It would take a thousand seconds; nothing of its group is written."""
    started = tmp_path / "started"
    code = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(1000)"
    judge = JudgeCommand(command=shlex.join([sys.executable, "-c", code]), seconds=2000)
    judging = JudgeChoice(
        domain="",
        because="",
        judge=judge,
        has_judged_answers=True,
        compares_with_base=False,
        demands=GateRequirements(),
        strict=False,
    )
    monkeypatch.setitem(asking.ANSWERS_AT_ONCE, "cpu", 1)

    def answered(trained: Any, examples: list[Example], *_: Any, **more: Any) -> list[Answer]:
        if more["numbers"] == [1]:  # while the first is judged
            while not started.exists():
                time.sleep(0.01)
            raise KeyboardInterrupt
        return [Answer(text="a", marked="a", tokens=1, ended=True)]

    monkeypatch.setattr("expert.answer.engine.answer_all", answered)
    turns = (Turn("user", "q"), Turn("assistant", "a"))
    prompts = [
        (Case(id=name, turns=(("user", "q"),), expected="a"), Example(turns)) for name in "xy"
    ]
    trained, how = cast(Any, SimpleNamespace(device=torch.device("cpu"))), cast(Any, None)
    file, ignore = tmp_path / "answers.jsonl", lambda *_: None
    with pytest.raises(KeyboardInterrupt):
        asking.ask(
            *(trained, prompts, file, how, judging), count=1, seed=0, tell=ignore, note=ignore
        )
    assert not read_answers(file)
