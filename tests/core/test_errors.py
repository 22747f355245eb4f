"""Errors for users: where, what and what to do, all of them together, with an exit code."""

from __future__ import annotations

import copy
import pickle

from expert.core import errors
from expert.core.errors import EXIT_MEANINGS, ManifestError, Problem


def test_a_manifest_error_lists_every_problem_and_survives_the_way_to_another_process():
    one = ManifestError("m.yaml", [Problem("a", "is wrong")])
    two = ManifestError("m.yaml", [Problem("a", "is wrong"), Problem("b", "is too", line=2)])
    assert str(one) == "m.yaml: 1 problem\n  - a: is wrong"
    for twin in (two, pickle.loads(pickle.dumps(two)), copy.copy(two)):
        assert str(twin) == "m.yaml: 2 problems\n  - a: is wrong\n  - line 2: b: is too"
        assert twin.problems[1].line == 2


def test_every_exit_code_has_a_meaning_of_its_own():
    codes = {name: code for name, code in vars(errors).items() if name.startswith("EXIT_")}
    codes.pop("EXIT_MEANINGS")
    assert len(codes) >= 5
    assert sorted(codes.values()) == sorted(EXIT_MEANINGS)
    assert len(set(EXIT_MEANINGS.values())) == len(EXIT_MEANINGS)
