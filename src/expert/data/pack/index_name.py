"""What decides the index of a split, and so its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from expert.planning.choose.sequences import LENGTHS_OF

FORMAT = 3
FITTED = "as they come"
"""How best-fit packing lays rows into sequences. Earlier versions laid the longest first; the names
of their indexes say nothing of it."""


@dataclass(frozen=True, kw_only=True)
class IndexName:
    """All that an index depends on."""

    split: str
    tokens: tuple[str, ...]
    documents: str
    """A hash of the numbers of the rows that were drawn."""
    packing: str
    length: int
    overlong: str
    soft_tokens: int
    seed: int
    most_rows: int | None
    leaves_out: bool
    """Some rows are left out, as nothing would be learnt from them."""

    @property
    def file(self) -> str:
        return self._file(FITTED if self.packing == "best-fit" else None)

    def before(self, known: Collection[str], *, longest: int, most: int) -> str | None:
        """Of some names, the one that an index of the same rows had when the longest were laid
        first; None where there is none. At that time sequences of another length, up to `longest`,
        and with another number of rows, up to `most`, may have been chosen for them."""
        if self.packing != "best-fit":
            return None
        wanted = {name for name in known if name.startswith(f"index-{self.split}-")}
        for one in self._lengths_and_rows(longest, most) if wanted else ():
            if (file := one._file(None)) in wanted:
                return file
        return None

    def _lengths_and_rows(self, longest: int, most: int) -> Iterator[IndexName]:
        for length in {longest, *range(LENGTHS_OF, longest, LENGTHS_OF)}:
            for rows in (None, *range(1, most + 1)):
                yield replace(self, length=length, most_rows=rows)

    def _file(self, fitted: str | None) -> str:
        decides: dict[str, Any] = {
            "tokens": list(self.tokens),
            "documents": self.documents,
            "rule": [self.packing, self.length, self.overlong, self.soft_tokens, self.seed],
            "format": FORMAT,
        }
        if fitted is not None:
            decides["fitted"] = fitted
        if self.most_rows is not None:
            decides["most rows"] = self.most_rows
        if self.leaves_out:
            decides["left out"] = "what is not learnt"
        key = hashlib.sha256(json.dumps(decides).encode("utf-8")).hexdigest()[:16]
        return f"index-{self.split}-{key}.arrow"
