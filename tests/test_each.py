"""A test over a table of rows reports every failing row."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.each import each


def test_every_row_that_fails_is_named_with_its_reason():
    @each(("name", "value"), [("one", 1), ("two", 2), pytest.param("three", 3, id="the third")])
    def odd(name, value):
        assert name
        assert value == 2, f"{value} is not two"

    with pytest.raises(AssertionError) as failed:
        odd()
    told = str(failed.value).splitlines()
    assert told[0] == "2 of 3 rows fail"
    assert [line.partition("]")[0] for line in told if line[0] == "["] == ["[one-1", "[the third"]
    assert "1 is not two" in str(failed.value)
    assert "3 is not two" in str(failed.value)


@each("first", "ab")
@each("second", [1, 2])
def test_tables_multiply_and_a_row_has_its_own_folder_and_patches(
    first, second, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert "ROW" not in os.environ
    monkeypatch.setenv("ROW", f"{first}{second}")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()


def test_a_table_without_rows_and_a_row_with_a_mark_are_refused():
    with pytest.raises(AssertionError, match="no rows"):
        each("row", [])
    with pytest.raises(AssertionError, match="cannot be marked"):
        each("row", [pytest.param(1, marks=pytest.mark.slow)])
