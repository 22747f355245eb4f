"""What fuzzing has found stays fixed, and every parser still takes what is damaged at random."""

from __future__ import annotations

import random

import pytest

from tests.faults.fuzz import FINDS, TARGETS, attempt, mutated

FOUND = sorted(FINDS.iterdir())


@pytest.mark.parametrize("find", FOUND, ids=lambda find: find.name)
def test_what_was_found_is_read_or_refused(find, tmp_path):
    name = find.name.rpartition("-")[0]
    assert attempt(name, find.read_bytes(), tmp_path) == ""


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_sound_is_read_and_what_is_damaged_is_read_or_refused(name, tmp_path):
    seeds, chance = TARGETS[name][2](), random.Random(name)
    for raw in (*seeds[:3], *(mutated(chance, seeds) for _ in range(10))):
        assert attempt(name, raw, tmp_path) == ""


def test_a_parser_that_fails_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("expert.core.stored_json.read_object", lambda path: 1 / 0)
    assert "ZeroDivisionError" in attempt("stored-json", b"{}", tmp_path)
