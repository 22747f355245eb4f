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
class SharedRows:
    """How many rows of a split are also trained on, and one of them."""

    split: str
    count: int
    of: int
    example: str
    """The position of the first one, and of its copy in training."""

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
    split: str,
    own: Sequence[tuple[str, Prepared]],
    train: Sequence[tuple[str, Prepared]],
    train_keys: RowKeys,
    trained: NDArray[np.integer[Any]],
) -> SharedRows | None:
    """The rows of a split whose prompt and answer are also trained on; None if there are none.
    `own` and `train` are the sources of both, by name."""
    keys = RowKeys.of(DocumentStore(*(prepared.folder for _, prepared in own))).whole
    known = train_keys.whole[trained]
    shared = np.flatnonzero(np.isin(keys, known))
    if not len(shared):
        return None
    first = int(shared[0])
    twin = int(trained[np.argmax(known == keys[first])])
    example = f"{_place(own, first)} is {_place(train, twin)}"
    return SharedRows(split=split, count=len(shared), of=len(keys), example=example)


def _place(sources: Sequence[tuple[str, Prepared]], document: int) -> str:
    """The row number, from 1, and source of a document."""
    for name, prepared in sources:
        if document < prepared.statistics.documents:
            return f"row {DocumentStore(prepared.folder).row(document) + 1:,} of {name}"
        document -= prepared.statistics.documents
    raise IndexError(document)
