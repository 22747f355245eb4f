"""Files of cases: what is read, and what is refused with which message."""

from __future__ import annotations

import json

import pytest

from expert.judging.cases import CasesError, is_case_file, read_case_file
from tests.each import each


def write(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_cases_are_read_with_their_domain(tmp_path):
    case = {"id": "a", "instruction": "x", "expected": {"b": 1}, "check": {"equals": True}}
    path = write(tmp_path / "test_cases.json", {"version": 1, "domain": "json", "cases": [case]})
    assert is_case_file(path)
    assert read_case_file(path) == ("json", [case])


def test_a_list_of_rows_is_no_file_of_cases(tmp_path):
    assert not is_case_file(write(tmp_path / "rows.json", [{"a": 1}]))
    assert not is_case_file(write(tmp_path / "rows.jsonl", {"cases": []}))
    assert not is_case_file(write(tmp_path / "broken.json", "{"))


@each(
    ("data", "text"),
    [
        ("{", "is not JSON"),
        ({"version": 2, "cases": []}, "version 2 is not known  (write version: 1)"),
        ({"cases": []}, "cases: is not a list of cases"),
        ({"cases": [3]}, "cases[0]: is not an object"),
        ({"cases": [{"instruction": "x"}]}, "cases[0]: has no expected answer"),
        ({"cases": [{"id": "a", "expected": "x"}]}, "cases[0]: asks nothing"),
        ({"cases": [{"instruction": "x", "expected": "y", "check": 3}]}, "cases[0].check: is no"),
        (
            {"cases": [{"id": 1, "instruction": "x", "expected": "y"}] * 2},
            "1 is used by another case",
        ),
        ({"cases": [{"id": [1], "instruction": "x"}] * 2}, "[1] is used by another case"),
        ({"cases": [3] * 9}, ": 9 problems\n"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path, data, text):
    path = write(tmp_path / "test_cases.json", data)
    with pytest.raises(CasesError) as raised:
        read_case_file(path)
    assert str(raised.value).startswith(str(path))
    assert text in str(raised.value)
