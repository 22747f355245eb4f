"""Counts of shards that add up to those of a data set."""

from __future__ import annotations

import numpy as np

from expert.data.tokens.encoder import EncodedBatch
from expert.data.tokens.statistics import DocumentStatistics


def shard(*ids: int) -> DocumentStatistics:
    batch = EncodedBatch(
        ids=np.array(ids, dtype=np.int32),
        lengths=np.array([len(ids)] if ids else [], dtype=np.int32),
        spans=np.array([0, len(ids)] if ids else [], dtype=np.int32),
        span_counts=np.array([2] if ids else [], dtype=np.int32),
    )
    return DocumentStatistics.of(batch, rows_in=1, dropped={})


def test_the_largest_token_of_all_shards_is_kept():
    total = DocumentStatistics()
    for part in (shard(3, 9, 4), shard(), shard(7, 8)):
        total = total.plus(part)
    assert (total.tokens, total.largest_id) == (5, 9)
    assert DocumentStatistics.from_json(total.to_json()) == total
    assert DocumentStatistics().largest_id is None


def test_a_file_of_before_the_largest_token_was_kept_is_read_and_says_nothing_of_it():
    old = shard(3, 9).to_json()
    del old["largest_id"]
    read = DocumentStatistics.from_json(old)
    assert (read.tokens, read.largest_id) == (2, None)
    assert read.plus(shard(4)).largest_id is None
