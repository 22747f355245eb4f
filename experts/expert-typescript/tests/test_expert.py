"""The rows of expert-typescript: answers parse, mistakes are mistakes, types are the values'."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from data_making.loading import generator_of
from data_making.rows import make_rows

MAKE = generator_of(Path(__file__).parents[1])


def type_of(value: object) -> str:
    if isinstance(value, list):
        return f"{type_of(value[0])}[]"
    names = {str: "string", bool: "boolean", int: "number"}
    return names[type(value)]


def test_every_answer_parses_and_broken_syntax_does_not():
    pytest.importorskip("tree_sitter_typescript", reason="pip install -e '.[validate]'")
    from expert.judging.answers import DoesNotParse
    from expert.judging.oracles.typescript import tokens

    for row in make_rows(MAKE.draw, 60, "train", 1):
        tokens(row.output)
    source = random.Random(2)
    for _ in range(60):
        with pytest.raises(DoesNotParse):
            tokens(MAKE.syntax_fix(source).input)


def test_interfaces_have_the_types_of_their_samples():
    source = random.Random(3)
    for _ in range(100):
        row = MAKE.types_from_sample(source)
        fields = dict(re.findall(r"  (\w+): ([\w\[\]]+);", row.output))
        assert fields == {key: type_of(value) for key, value in json.loads(row.input).items()}


def test_a_mended_type_is_that_of_its_value_and_one_was_wrong():
    source = random.Random(4)
    pattern = re.compile(r"const \w+: ([\w\[\]]+) = (.+);")
    for _ in range(100):
        row = MAKE.type_fix(source)
        faults = [kind != type_of(json.loads(v)) for kind, v in pattern.findall(row.input)]
        assert sum(faults) == 1
        assert all(kind == type_of(json.loads(v)) for kind, v in pattern.findall(row.output))


def test_a_getter_has_the_type_that_the_interface_says():
    source = random.Random(5)
    for _ in range(100):
        row = MAKE.getter(source)
        name, kind = re.findall(r"\): ([\w\[\]]+) \{\n  return \w+\.(\w+);", row.output)[0][::-1]
        assert f"  {name}: {kind};" in row.input
