"""The real data sets beside the checkout, row by row; tests skip where they are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

import pytest

from expert.data.examples.formats import example_of
from expert.data.records import BadRow, Example, Row
from tests.data import SHARED
from tests.data.examples.understood import understand

REAL_FILES = (
    "json/train.jsonl",
    "json/test.jsonl",
    "json/corpus.jsonl",
    "sql/train.jsonl",
    "sql/test.jsonl",
    "cypher/train.jsonl",
    "cypher/test.jsonl",
    "alpaca/alpaca_libre.jsonl",
)
# Five answers are nothing but line breaks.
REAL_EMPTY_ANSWERS = {
    ("alpaca/alpaca_libre.jsonl", line) for line in (1194, 1195, 1197, 1461, 2162)
}


EVERY = 20
"""Which of the rows are read by default; the slow tier reads all of them."""
REAL_SAMPLES = [
    *(pytest.param(name, EVERY, id=name) for name in REAL_FILES),
    *(pytest.param(name, 1, id=f"all of {name}", marks=pytest.mark.slow) for name in REAL_FILES),
]


def real_examples(name: str, every: int) -> Iterator[tuple[Row, Example]]:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"shared/data/{name} is not here")
    lines = enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], 1)
    rows = [Row(json.loads(line), name, number) for number, line in islice(lines, 0, None, every)]
    columns = understand(list(rows[0].values), rows[0].values)
    for row in rows:
        example = example_of(row, columns)
        if (name, row.line) in REAL_EMPTY_ANSWERS:
            assert isinstance(example, BadRow)
            assert example.reason == "column 'output': the answer is empty"
            continue
        assert isinstance(example, Example), example
        yield row, example
