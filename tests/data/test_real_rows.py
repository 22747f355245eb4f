"""Masks on real rows, token by token: what is learnt is the answer and its end, nothing else."""

from __future__ import annotations

from itertools import islice

import pytest

from expert.data.examples.formats import example_of
from expert.data.read.rows import read_rows
from expert.data.records import Example, Row, Segment
from expert.data.template.templates import Template, named_template, plain_segments
from tests.data import SHARED
from tests.data.examples.understood import understand
from tests.data.tokenizers import QWEN3, qwen3_encoder

FILES = [
    "json/train.jsonl",
    "json/corpus.jsonl",
    "sql/train.jsonl",
    "cypher/train.jsonl",
    "alpaca/alpaca_libre.jsonl",
    "typescript/handbook_text.jsonl",
    "shakespeare/train.jsonl",
]
SAMPLED = 150

pytestmark = pytest.mark.skipif(
    not QWEN3.is_dir(), reason="the real data is not beside this checkout"
)


def examples_of(name: str, most: int | None) -> list[Example]:
    rows = [row for row in islice(read_rows(SHARED / name), most) if isinstance(row, Row)]
    columns = understand(list(rows[0].values), rows[0].values)
    made = [example_of(row, columns) for row in rows]
    return [example for example in made if isinstance(example, Example)]


def answers_of(example: Example, template: Template) -> str:
    """The obvious expectation: each answer followed by what ends it, or the whole plain text."""
    if not example.turns:
        return "".join(segment.text for segment in plain_segments(example.text, eos="<|im_end|>"))
    return "".join(turn.text + "<|im_end|>\n" for turn in example.turns if turn.role == "assistant")


@pytest.mark.parametrize("name", FILES)
def test_exactly_the_answers_are_learnt(name: str):
    encoder = qwen3_encoder()
    template = named_template("chatml", eos="<|im_end|>")
    examples = examples_of(name, SAMPLED)
    assert len(examples) > 40
    documents: list[list[Segment]] = [template.segments(example) for example in examples]
    made = encoder.encode(documents)
    start = span = 0
    decode = encoder.tokenizer.decode
    for example, segments, length, count in zip(
        examples, documents, made.lengths.tolist(), made.span_counts.tolist(), strict=True
    ):
        ids = made.ids[start : start + length].tolist()
        spans = made.spans[span : span + count].reshape(-1, 2).tolist()
        start, span = start + length, span + count
        learnt = [token for first, last in spans for token in ids[first:last]]
        whole = "".join(segment.text for segment in segments)
        assert decode(ids, skip_special_tokens=False) == whole
        assert decode(learnt, skip_special_tokens=False) == answers_of(example, template)
