"""Rows of validation or test files that are also trained on.

Rows split off from the training data never are, by construction. A separate file may hold anything,
and the loss on rows that were trained on measures memorisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expert.core.text import counted
from expert.data.tokens.documents import DocumentStore
from expert.data.tokens.prepare import Prepared
from expert.data.tokens.row_keys import RowKeys


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """The rows of a split: their sources, tokens and keys."""

    names: Sequence[str]
    folders: Sequence[Prepared]
    keys: RowKeys

    def place(self, document: int) -> str:
        """The row number, from 1, and source of a document."""
        counts = [prepared.statistics.documents for prepared in self.folders]
        ends = np.cumsum(counts)
        source = int(np.searchsorted(ends, document, side="right"))
        within = document - int(ends[source]) + counts[source]
        row = DocumentStore(self.folders[source].folder).row(within)
        return f"row {row + 1:,} of {self.names[source]}"


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """How many rows of a split are also trained on, and one of them."""

    split: str
    count: int
    of: int
    example: str
    """The position of the first one, and of its copy in training."""

    @property
    def key(self) -> str:
        """The manifest key that names their file; with tasks, each has its own."""
        return f"training.dataset.{self.split}_path"

    @property
    def evidence(self) -> str:
        return f"{self.count:,} of {counted(self.of, 'row')}, such as {self.example}"

    @property
    def consequence(self) -> str:
        return f"the {self.split} loss is lower than on unseen rows"

    def as_text(self, list_command: str) -> str:
        """The warning in one line, with what to do."""
        verb = "is" if self.count == 1 else "are"
        return (
            f"{self.split}: {self.count:,} of {counted(self.of, 'row')} {verb} in the training "
            f"rows as well ({self.example}): {self.consequence}  "
            f"(remove them from one of the two; {list_command})"
        )


def find_shared(
    split: str, own: SplitRows, train: SplitRows, trained: NDArray[np.integer[Any]]
) -> SharedRows | None:
    """The rows of a split whose prompt and answer are also trained on; None if there are none."""
    known = train.keys.whole[trained]
    shared = np.flatnonzero(np.isin(own.keys.whole, known))
    if not len(shared):
        return None
    first = int(shared[0])
    twin = int(trained[np.argmax(known == own.keys.whole[first])])
    return SharedRows(
        split=split,
        count=len(shared),
        of=len(own.keys.whole),
        example=f"{own.place(first)} is {train.place(twin)}",
    )
