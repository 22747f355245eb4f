"""The rows of expert-json: what is broken can be mended in one way, and answers are right."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from data_making.loading import generator_of

MAKE = generator_of(Path(__file__).parents[1])


def test_a_repaired_object_was_really_broken():
    source = random.Random(1)
    for _ in range(300):
        row = MAKE.repair(source)
        with pytest.raises(json.JSONDecodeError):
            json.loads(row.input)
        json.loads(row.output)


def test_every_fault_is_made():
    source = random.Random(2)
    whole = {"name": "anna", "age": 3, "open": [1, 2]}
    text = json.dumps(whole)
    assert len(MAKE.FAULTS) == 7
    for fault in MAKE.FAULTS:
        broken = fault(text, whole, source)
        assert broken != text
        assert abs(len(broken) - len(text)) <= 2 * len(whole)


def test_converted_records_picked_keys_and_types_are_those_of_the_input():
    source = random.Random(3)
    for _ in range(200):
        picked = MAKE.pick(source)
        whole, answer = json.loads(picked.input), json.loads(picked.output)
        assert answer.items() <= whole.items()
        assert picked.instruction == f"Keep only {' and '.join(answer)}."
        types = MAKE.schema(source)
        for key, value in json.loads(types.input).items():
            assert json.loads(types.output)[key] == MAKE.TYPES[type(value)]
        record = MAKE.convert(source)
        for key, value in json.loads(record.output).items():
            assert key in record.input
            assert MAKE.plain(value) in record.input
