"""Prepared data: the packed tokens of every split, and warnings about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from expert.data.pack.pack_index import PackIndex
    from expert.data.tokens.documents import DocumentStore
    from expert.data.tokens.encoder import Encoder
    from expert.data.tokens.prepare import Prepared
    from expert.data.tokens.statistics import DocumentStatistics
    from expert.planning.decisions import Remark


@dataclass(frozen=True, repr=False)
class PreparedSplit:
    """Training, validation or test rows: their tokens and the sequences they are packed into."""

    name: str
    folders: tuple[Prepared, ...]
    index: PackIndex
    index_file: Path
    index_hit: bool
    rows: int = 0
    """All rows of the split, including those that packing left out."""
    reference: NDArray[np.float32] | None = None
    """For preference training, what `run/session/reference.py` measured, by document."""

    @property
    def statistics(self) -> DocumentStatistics:
        """Of all rows in its files."""
        from expert.data.tokens.statistics import DocumentStatistics

        total = DocumentStatistics()
        for prepared in self.folders:
            total = total.plus(prepared.statistics)
        return total

    def __repr__(self) -> str:
        index = self.index
        rows = f"{index.examples:,} rows in {index.bins:,} sequences of {index.length:,} tokens"
        where = ", ".join(str(prepared.folder) for prepared in self.folders)
        return f"<PreparedSplit {self.name}: {rows}, in {where}>"

    def open(self) -> DocumentStore:
        """The documents, memory-mapped; `index` selects those of this split."""
        from expert.data.tokens.documents import DocumentStore

        store = DocumentStore(*(prepared.folder for prepared in self.folders))
        store.reference = self.reference
        return store


@dataclass(frozen=True)
class PreparedData:
    """All data of a run, and the warnings about it."""

    train: PreparedSplit
    validation: PreparedSplit | None
    test: PreparedSplit | None
    encoder: Encoder
    template: str
    doubts: tuple[Remark, ...] = ()
    """Warnings about the rows of any split."""
    columns: tuple[str, ...] = ()
    """For each source of training rows: which columns are used and which are not."""
    notes: tuple[str, ...] = ()
    """Results of checking token rows that were made elsewhere."""

    def splits(self) -> list[PreparedSplit]:
        splits = (self.train, self.validation, self.test)
        return [split for split in splits if split is not None]
