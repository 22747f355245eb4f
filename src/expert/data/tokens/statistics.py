"""Statistics of a data set: rows read and left out, tokens, lengths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from expert.data.tokens.encoder import EncodedBatch

# Upper edges of the histogram, in tokens per document.
EDGES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass
class DocumentStatistics:
    """Counts that can be added over shards."""

    rows_in: int = 0
    bad_rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    documents: int = 0
    tokens: int = 0
    trainable_tokens: int = 0
    longest: int = 0
    largest_id: int | None = None
    """Of all tokens; None if there are none."""
    histogram: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))

    @classmethod
    def of(
        cls, batch: EncodedBatch, *, rows_in: int, dropped: dict[str, int]
    ) -> DocumentStatistics:
        spans = batch.spans.reshape(-1, 2)
        places = np.searchsorted(np.array(EDGES), batch.lengths, side="left")
        return cls(
            rows_in=rows_in,
            dropped=dict(dropped),
            documents=len(batch.lengths),
            tokens=int(batch.lengths.sum(dtype=np.int64)),
            trainable_tokens=int((spans[:, 1] - spans[:, 0]).sum(dtype=np.int64)),
            longest=int(batch.lengths.max(initial=0)),
            largest_id=int(batch.ids.max()) if len(batch.ids) else None,
            histogram=np.bincount(places, minlength=len(EDGES) + 1).tolist(),
        )

    def plus(self, other: DocumentStatistics) -> DocumentStatistics:
        summed = ("rows_in", "bad_rows", "documents", "tokens", "trainable_tokens")
        known = [one.largest_id for one in (self, other) if one.largest_id is not None]
        return DocumentStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in summed},
            dropped=dict(Counter(self.dropped) + Counter(other.dropped)),
            longest=max(self.longest, other.longest),
            largest_id=max(known, default=None),
            histogram=[a + b for a, b in zip(self.histogram, other.histogram, strict=True)],
        )


def percentiles(lengths: Any) -> list[int]:
    """Lengths that 50, 90, 95 and 99 % of the documents do not exceed."""
    lengths = lengths if len(lengths) else [0]
    return [int(value) for value in np.quantile(lengths, (0.5, 0.9, 0.95, 0.99), method="higher")]
