"""What documents are recognised by: one number for the prompt and one for the whole of each.

The numbers are of 64 bits: of a million documents two unlike ones share a number once in 37 million
draws, and then they merely stay on one side of a split.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from expert.data.documents import DocumentStore
from expert.data.encoder import EncodedBatch
from expert.data.flat_documents import FlatDocuments, Shard
from expert.data.prepare import Prepared, short_key

FORMAT = 1
Keys = NDArray[np.uint64]


class RowKeys(NamedTuple):
    """Two numbers for each document, in the order of the documents."""

    prompt: Keys
    """Of all that stands before the last answer; of the whole where nothing does."""
    whole: Keys

    @classmethod
    def of(cls, documents: FlatDocuments) -> Self:
        """Read every token once: 2 us a document of 80 tokens."""
        count = len(documents)
        prompt, whole = np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        for number in range(count):
            tokens, spans = documents.tokens(number), documents.spans(number)
            answer = int(spans[-1, 0]) if len(spans) else 0
            whole[number] = _number(tokens)
            prompt[number] = _number(tokens[:answer]) if answer else whole[number]
        return cls(prompt, whole)

    @classmethod
    def joined(cls, parts: list[RowKeys]) -> Self:
        """The keys of several sources, one after the other."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def keys_of_batch(batch: EncodedBatch) -> RowKeys:
    """The keys of documents that were encoded just now."""
    ends, span_ends = np.cumsum([0, *batch.lengths]), np.cumsum([0, *batch.span_counts])
    return RowKeys.of(FlatDocuments([Shard(batch.ids, ends, batch.spans, span_ends)]))


def saved_keys(prepared: Prepared, cache: Path) -> RowKeys:
    """The keys of a prepared folder, made once and kept beside it: training starts many times."""
    file = cache / f"rows-{short_key(prepared.key)}-{FORMAT}.npy"
    try:
        saved = np.load(file)
        if saved.shape == (2, prepared.statistics.documents):
            return RowKeys(*saved)
    except (OSError, ValueError):  # not made yet, or damaged: made again
        pass
    made = RowKeys.of(DocumentStore(prepared.folder))
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("wb") as sink:
        np.save(sink, np.stack(made))
    temporary.replace(file)
    return made


def _number(tokens: NDArray[np.int32]) -> int:
    digest = hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=8).digest()
    return int.from_bytes(digest, "little")
