"""Rows that are left out by what their answers are."""

from __future__ import annotations

import pytest

from expert.data.examples.checks import RowFilter
from expert.data.records import Example, Turn
from expert.manifest.schema.dataset import RowChecks

DEEP = '{"not":' * 50_000 + "{}" + "}" * 50_000


@pytest.mark.parametrize("check", ["validate_json", "validate_schema"])
def test_an_answer_that_nests_without_end_is_left_out_and_ends_nothing(check):
    example = Example((Turn("user", "say"), Turn("assistant", DEEP)))
    assert RowFilter(RowChecks(**{check: True})).reason(example)
