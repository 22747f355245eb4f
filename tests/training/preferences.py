"""Rows of two answers to one prompt as tokens, and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from expert.data.feed.batches import BatchShape
from expert.data.feed.feed import Batch, PackedFeed, StepWork
from expert.data.feed.order import StepBins
from expert.data.pack.pack import pack_best_fit
from expert.data.records import Branched, Segment, TokenSegment
from expert.data.tokens.documents import FlatDocuments, shard_of
from expert.data.tokens.encoder import batch_of_tokens, joined_answers

Tokens = Sequence[int]
Row = tuple[Tokens, Tokens, Tokens]
"""A prompt, the preferred answer and the rejected one."""


def conversation(prompt: Tokens, answer: Tokens) -> list[Segment]:
    parts = (np.array(prompt, np.int32), False), (np.array(answer, np.int32), True)
    return [TokenSegment("", learn, ids) for ids, learn in parts]


def documents_of(rows: Sequence[Row]) -> FlatDocuments:
    pairs = [Branched([conversation(row[0], each) for each in row[1:]]) for row in rows]
    return FlatDocuments([shard_of(joined_answers(pairs, batch_of_tokens))])


def batches_of(
    rows: Sequence[Row],
    *,
    length: int,
    bins: int,
    flat: bool = False,
    store: FlatDocuments | None = None,
) -> Iterator[Batch]:
    """The rows in packed sequences of `length`, `bins` of them in a batch. Valid one by one."""
    store = store or documents_of(rows)
    index = pack_best_fit(store.lengths, length, 0, overlong="drop")
    numbers = np.arange(index.bins)
    works = [
        StepWork(StepBins(at, 0, at, numbers[first : first + bins]), index, store)
        for at, first in enumerate(range(0, index.bins, bins))
    ]
    feed = PackedFeed(
        works,
        BatchShape.for_index(index, bins, branches=2),
        batches_per_step=1,
        device=torch.device("cpu"),
        flat=flat,
    )
    with feed as steps:
        yield from (batch for step in steps for batch in step.batches)
