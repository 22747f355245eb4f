"""Keys to recognise documents by: one for the prompt and one for the whole document.

Keys have 64 bits: among a million documents, the chance that two different ones share a key is 1 in
37 million, and they would merely stay on the same side of a split.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from expert.data.tokens.documents import FlatDocuments, Shard, shard_of
from expert.data.tokens.encoder import EncodedBatch

Keys = NDArray[np.uint64]


class RowKeys(NamedTuple):
    """Two keys per document, in document order."""

    prompt: Keys
    """Of everything before the last answer, or of the whole document if there is nothing."""
    whole: Keys

    @classmethod
    def of(cls, documents: FlatDocuments) -> Self:
        """Reads every token once, shard by shard: 25 million tokens take a second or two."""
        parts = [_keys_of(shard) for shard in documents.shards()]
        columns = zip(*parts, strict=True) if parts else np.zeros((2, 1, 0), np.uint64)
        return cls(*map(np.concatenate, columns))


def keys_of_batch(batch: EncodedBatch) -> RowKeys:
    return _keys_of(shard_of(batch))


def _keys_of(shard: Shard) -> RowKeys:
    """The sum of a hash of each token and its position, modulo 2**64. Cumulative sums over the
    shard give those of any range by one subtraction."""
    starts, stops = shard.offsets[:-1].astype(np.int64), shard.offsets[1:].astype(np.int64)
    first, last = (int(starts[0]), int(stops[-1])) if len(starts) else (0, 0)
    places = np.arange(first, last) - np.repeat(starts, stops - starts)
    values = _mixed(shard.tokens[first:last].astype(np.uint64) << np.uint64(32) | places.view("u8"))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    whole = sums[stops - first] - sums[starts - first]
    has_answer = np.diff(shard.span_offsets) > 0
    answers = np.zeros(len(starts), np.int64)
    answers[has_answer] = shard.spans[shard.span_offsets[1:][has_answer] - 2]
    prompt = sums[starts + answers - first] - sums[starts - first]
    return RowKeys(np.where(answers > 0, prompt, whole), whole)


def _mixed(values: Keys) -> Keys:
    """Hash numbers with the finalizer of splitmix64 (Vigna)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Keys = values ^ (values >> np.uint64(31))
    return mixed
