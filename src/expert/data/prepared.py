"""What preparing leaves: the tokens of every split, packed, and the warnings about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.data.inspect.shared_rows import SharedRows
    from expert.data.pack.pack_index import PackIndex
    from expert.data.tokens.documents import DocumentStore
    from expert.data.tokens.encoder import Encoder
    from expert.data.tokens.prepare import Prepared
    from expert.planning.decisions import Remark


@dataclass(frozen=True, repr=False)
class PreparedSplit:
    """Training, validation or test rows: the tokens, and the sequences they were packed into."""

    name: str
    folders: tuple[Prepared, ...]
    index: PackIndex
    index_file: Path
    index_hit: bool
    rows: int = 0
    """Rows that belong to it, with those that packing left out."""
    packed_before: bool = False
    """The rows are those of the run that is resumed, which an earlier version had packed."""

    @property
    def longest(self) -> int:
        """Tokens of the longest row of the files it is made from."""
        return max((each.statistics.longest for each in self.folders), default=0)

    def __repr__(self) -> str:
        index = self.index
        rows = f"{index.examples:,} rows in {index.bins:,} sequences of {index.length:,} tokens"
        where = ", ".join(str(prepared.folder) for prepared in self.folders)
        return f"<PreparedSplit {self.name}: {rows}, in {where}>"

    def open(self) -> DocumentStore:
        """The documents, memory-mapped; `index` says which of them are this split's."""
        from expert.data.tokens.documents import DocumentStore

        return DocumentStore(*(prepared.folder for prepared in self.folders))


@dataclass(frozen=True)
class PreparedData:
    """Everything a run reads, and the warnings about it."""

    train: PreparedSplit
    validation: PreparedSplit | None
    test: PreparedSplit | None
    encoder: Encoder
    template: str
    doubts: tuple[Remark, ...] = ()
    """Warnings about the rows, those that are trained on or those that it is judged by."""
    shared: tuple[SharedRows, ...] = ()
    """Rows of files for validation and test that are trained on as well; `doubts` name them."""
    columns: tuple[str, ...] = ()
    """For each source of training rows: which columns are read, and which are not."""
    notes: tuple[str, ...] = ()
    """What was checked of tokens that were made elsewhere."""

    def splits(self) -> list[PreparedSplit]:
        found = (self.train, self.validation, self.test)
        return [split for split in found if split is not None]


@dataclass(frozen=True)
class PartsLeft:
    """The parts that are still to do, of so many."""

    missing: tuple[int, ...]
    of: int

    def __str__(self) -> str:
        runs: list[list[int]] = []
        for part in self.missing:
            if runs and part == runs[-1][-1] + 1:
                runs[-1].append(part)
            else:
                runs.append([part])
        named = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
        words = "part {} is" if len(self.missing) == 1 else "parts {} are"
        done = f"{self.of - len(self.missing)} of {self.of} parts done; "
        return f"{done}{words.format(', '.join(named))} still to do"
