"""Padded batches, made here or by workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expert.data.feed.loader import MakeBatch, PaddedFeed, from_prepared
from expert.data.feed.order import DataOrder
from expert.data.pack.pack import pack_none
from expert.data.records import Row, Segment
from expert.data.tokens.documents import DocumentStore, dataset_files, write_shard
from expert.data.tokens.encoder import CharacterEncoder
from tests.data.shards import loader_plan

LINES = [f"line {number}: {'la ' * (number % 7)}" for number in range(23)]
ENCODER = CharacterEncoder("".join(LINES) + "?")
CPU = torch.device("cpu")
LENGTH = 40


def segments_of(row: Row) -> list[Segment]:
    text = str(row.values["text"])
    return [Segment(text[:6], False), Segment(text[6:], True)]


def rows() -> list[Row]:
    return [Row({"text": text}, "lines.txt", n + 1) for n, text in enumerate(LINES)]


@pytest.fixture
def prepared(tmp_path: Path) -> MakeBatch:
    batch = ENCODER.encode([segments_of(row) for row in rows()])
    spans = np.concatenate([[6, length] for length in batch.lengths]).astype(np.int32)
    batch = type(batch)(batch.ids, batch.lengths, spans, batch.span_counts)
    write_shard(tmp_path / "data-00000.arrow", batch, np.arange(len(LINES), dtype=np.int32))
    state = dataset_files(["data-00000.arrow"], "f" * 16)["state.json"]
    (tmp_path / "state.json").write_text(state, encoding="utf-8")
    store = DocumentStore(tmp_path)
    return from_prepared(pack_none(store.lengths, LENGTH, overlong="cut"), store)


def a_feed(dataset, *, done=0, total=14, rows=2, grouped=False, **options) -> PaddedFeed:
    lengths = np.array([min(len(text), LENGTH) for text in LINES])
    return PaddedFeed(
        dataset,
        DataOrder(len(LINES), 4, seed=5, grouped=lengths if grouped else None),
        done=done,
        total=total,
        rows=rows,
        device=CPU,
        options=loader_plan(**options),
    )


def contents(feed: PaddedFeed) -> list[tuple[Any, ...]]:
    with feed:
        return [
            (batch.bins, batch.tokens.tolist(), batch.labels.tolist(), batch.counts)
            for fed in feed
            for batch in fed.batches
        ]


def test_workers_change_nothing_but_who_makes_the_batches(prepared):
    alone = contents(a_feed(prepared))
    assert len(alone) == 2 * 14
    assert contents(a_feed(prepared, workers=2)) == alone


def test_a_row_is_a_document_padded_to_the_longest_and_its_targets_have_labels(prepared):
    with a_feed(prepared) as feed:
        for batch in (batch for fed in feed for batch in fed.batches):
            texts = [LINES[number][:LENGTH] for number in batch.bins]
            assert batch.tokens.shape == (len(texts), max(map(len, texts)))
            assert batch.whole_rows
            for text, tokens in zip(texts, batch.tokens.tolist(), strict=True):
                assert ENCODER.decode(tokens)[: len(text)] == text
            labels, places = batch.labels.flatten(), batch.target_places
            expected = torch.nonzero(labels >= 0).flatten()
            torch.testing.assert_close(places[: batch.targets].long(), expected)
            assert bool((labels[places[batch.targets :].long()] < 0).all())


def test_a_feed_resumes_anywhere_without_touching_global_rng(prepared):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    whole = contents(a_feed(prepared))
    assert torch.equal(torch.rand(3), expected)
    assert contents(a_feed(prepared, done=5)) == whole[10:]


def test_rows_grouped_by_length_are_the_same_however_many_go_at_once_and_pad_less(prepared):
    def seen(rows: int, grouped: bool = True) -> tuple[list[tuple[int, ...]], int]:
        with a_feed(prepared, rows=rows, grouped=grouped) as feed:
            batches = [[(b.bins, b.tokens.numel()) for b in fed.batches] for fed in feed]
        bins = [sum((bins for bins, _ in some), ()) for some in batches]
        return bins, sum(places for some in batches for _, places in some)

    assert seen(1)[0] == seen(2)[0] == seen(4)[0]
    assert seen(2)[1] < seen(2, grouped=False)[1]
