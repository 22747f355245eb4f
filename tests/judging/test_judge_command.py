"""A user's program that scores answers, and what can go wrong with it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from expert.core.errors import ExpertError
from expert.judging.cases import Case
from expert.judging.judge_command import JudgeCommand, score_all
from tests.each import each
from tests.judging.judged import case_of

READS = "import json, sys\ncases = [json.loads(line) for line in sys.stdin]\n"
ANSWERS = ["good", "bad", "fair"]
CASES = [replace(case_of("good", prompt=f"say {n}"), id=str(n)) for n in range(3)]


def scored(tmp_path: Path, code: str, seconds: float = 60):
    file = tmp_path / "judge.py"
    file.write_text(READS + code, encoding="utf-8")
    judge = JudgeCommand(command=f"{sys.executable} {file}", seconds=seconds)
    return score_all(judge, CASES, ANSWERS)


def test_a_judge_is_told_all_of_a_case_and_scores_come_back_in_the_order_of_the_cases(tmp_path):
    found, faults = scored(
        tmp_path,
        "wanted = {'id', 'task', 'turns', 'prompt', 'expected', 'answer'}\n"
        "for case in reversed(cases):\n"
        "    assert set(case) == wanted and case['turns'][0]['role'] == 'user'\n"
        "    score = {'good': 1, 'bad': False, 'fair': 0.5}[case['answer']]\n"
        "    print(json.dumps({'id': case['id'], 'score': score, 'reason': case['prompt']}))\n",
    )
    assert [each.score for each in found] == [1.0, 0.0, 0.5]
    assert [each.passed for each in found] == [True, False, True]
    assert found[2].reason == "score 0.5: say 2"
    assert faults == []


def test_a_reason_that_no_file_could_hold_is_made_readable(tmp_path):
    line = "{'id': case['id'], 'score': 1, 'reason': '\\ud800'}"
    code = f"for case in cases:\n    print(json.dumps({line}))"
    found, _ = scored(tmp_path, code)
    assert found[0].reason == "score 1: ?"


@each(
    ("code", "fault"),
    [
        ("sys.exit('no key is set')", "the judge command ended with code 1: no key is set"),
        ("print('hello')", "a score from 0 to 1 (line 1): hello"),
        ("print('[1]')", "a score from 0 to 1 (line 1): [1]"),
        ('print(\'{"id": "9", "score": 1}\')', '(line 1): {"id": "9"'),
        ('print(\'{"id": "1", "score": 7}\')', '(line 1): {"id": "1", "score": 7'),
        ('print(\'{"id": "1", "score": NaN}\')', "(line 1): "),
        ('print(\'{"id": "1", "score": "1"}\')', "(line 1): "),
        ('print(\'{"id": "1", "score": 1}\\n\' * 2)', "(line 2): "),
        ("pass", "has no score for 3 of 3 cases, such as 0"),
        ("print('x\\n' * 9)", "… and 6 more lines like these"),
    ],
)
def test_what_a_judge_does_wrong_is_told_in_words_and_is_no_pass(tmp_path, code, fault):
    found, faults = scored(tmp_path, code)
    assert any(fault in text for text in faults), faults
    assert found[0].passed is None
    assert found[0].reason.startswith("no score: ")


def test_a_judge_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    code = (
        "import subprocess\n"
        "print(json.dumps({'id': '0', 'score': 1}), flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    found, faults = scored(tmp_path, code, seconds=3)
    assert faults == ["the judge command took longer than 3 s  (raise it with --judge-seconds)"]
    assert [each.score for each in found] == [1.0, None, None]


@pytest.mark.parametrize("command", ["no-such-program --x", "", "'open"])
def test_a_judge_that_cannot_be_started_is_refused(command):
    with pytest.raises(ExpertError, match="--judge-command"):
        JudgeCommand(command=command).parts()


def test_no_shell_reads_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    judge = JudgeCommand(command=f"{sys.executable} -c pass; touch made")
    score_all(judge, CASES, ANSWERS)
    assert list(tmp_path.iterdir()) == []


def test_a_function_of_a_python_file_scores_each_answer_in_the_sandbox(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_KEY", "secret")
    file = tmp_path / "score.py"
    file.write_text(
        "import os\n"
        "def judge(prompt, expected, answer):\n"
        "    if answer == 'look':\n"
        "        return float('OWN_KEY' in os.environ)\n"
        "    if answer == 'wrong type':\n"
        "        return 'good'\n"
        "    return answer == expected if prompt == 'p' else 0.25\n",
        encoding="utf-8",
    )
    cases = [Case(id=str(n), turns=(("user", "p" if n else "q"),), expected="x") for n in range(5)]
    answers = ["x", "x", "y", "look", "wrong type"]
    judge = JudgeCommand(command=str(file), min_score=0.2)
    judge.check()
    found, faults = score_all(judge, cases, answers)
    assert [each.score for each in found] == [0.25, 1.0, 0.0, 0.0, None]
    assert [each.passed for each in found] == [True, True, False, False, None]
    assert "'good', expected a score from 0 to 1" in faults[0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [("def score(): pass", "has no function judge("), ("def judge(:", "is not Python")],
)
def test_a_python_file_without_the_function_is_refused(tmp_path, text, fault):
    file = tmp_path / "score.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ExpertError) as refused:
        JudgeCommand(command=str(file)).check()
    assert fault in str(refused.value)
