"""Errors for people: where, what, what to do; all at once; with a meaning for the shell."""

from __future__ import annotations

import copy
import pickle

import pytest

from expert.core import errors
from expert.core.errors import EXIT_MEANINGS, ManifestError, Problem
from tests.wording import wording


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("a.b", "unknown key", "remove it", 3), "line 3: a.b: unknown key  (remove it)"),
        (Problem("a.b", "unknown key", "", 3), "line 3: a.b: unknown key"),
        (Problem("a.b", "unknown key", "remove it"), "a.b: unknown key  (remove it)"),
        (Problem("", "no such file"), wording("no-such-file-2")),
    ],
)
def test_a_problem_says_where_what_and_what_to_do(problem: Problem, text: str):
    assert str(problem) == text


def test_a_manifest_error_lists_every_problem_under_its_source():
    one = ManifestError("m.yaml", [Problem("a", "is wrong")])
    two = ManifestError("m.yaml", [Problem("a", "is wrong"), Problem("b", "is too", line=2)])
    assert str(one) == "m.yaml: 1 problem\n  - a: is wrong"
    assert str(two) == "m.yaml: 2 problems\n  - a: is wrong\n  - line 2: b: is too"
    assert two.problems[1].line == 2


def test_a_manifest_error_survives_the_way_to_another_process():
    error = ManifestError("m.yaml", [Problem("a", "is wrong", "mend it", 1)])
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(twin) == str(error)
        assert twin.problems == error.problems


def test_every_exit_code_has_a_meaning_of_its_own():
    codes = {name: code for name, code in vars(errors).items() if name.startswith("EXIT_")}
    codes.pop("EXIT_MEANINGS")
    assert len(codes) >= 5
    assert sorted(codes.values()) == sorted(EXIT_MEANINGS)
    assert len(set(EXIT_MEANINGS.values())) == len(EXIT_MEANINGS)
