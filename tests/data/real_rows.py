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
from tests.wording import wording

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


def real_rows(name: str) -> Iterator[Row]:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"shared/data/{name} is not here")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield Row(json.loads(line), name, number)


def real_examples(name: str, every: int = 1) -> Iterator[tuple[Row, Example]]:
    rows = islice(real_rows(name), 0, None, every)
    first = next(rows)
    columns = understand(list(first.values), first.values)
    for row in (first, *rows):
        example = example_of(row, columns)
        if (name, row.line) in REAL_EMPTY_ANSWERS:
            assert isinstance(example, BadRow)
            assert example.reason == wording("column-output-answer-empty")
            continue
        assert isinstance(example, Example), example
        yield row, example
