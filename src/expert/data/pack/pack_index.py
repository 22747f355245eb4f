"""The index of a packed data set (which pieces of documents fill which bin), and its file name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expert.core.errors import ExpertError
from expert.core.hashed import writing_hashed
from expert.data.tokens.documents import numbers_in
from expert.data.tokens.encoder import edges_of
from expert.planning.choose.sequences import Packing
from expert.planning.run_plan import RunPlan

PackRule = Literal["best-fit", "concat", "none", "blocks"]

FORMAT_VERSION = 1
_METADATA = b"expert.pack"
_PIECE = pa.struct([(name, pa.int32()) for name in ("document", "start", "stop")])


@dataclass(frozen=True, slots=True)
class OverlongCounts:
    """What happened to documents longer than a bin."""

    cut: int = 0
    split: int = 0
    dropped: int = 0
    tokens_lost: int = 0
    unlearnt: int = 0
    """Documents with nothing left to train on; they are in no bin."""


class PackStatistics(NamedTuple):
    tokens: int
    fill: float
    """Share of all places that hold a token or a soft prompt."""


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class PackIndex:
    """Pieces of documents in bins. Flat arrays: bin b has the pieces from `bin_offsets[b]` to
    `bin_offsets[b + 1]`."""

    rule: PackRule
    length: int
    """Places in a bin."""
    soft_tokens: int
    """Places before the tokens of each piece, for a soft prompt."""
    examples: int
    """Rows to train on: documents, with an overlong one counted once per chunk."""
    overlong: OverlongCounts
    piece_document: NDArray[np.int32]
    piece_start: NDArray[np.int32]
    piece_stop: NDArray[np.int32]
    bin_offsets: NDArray[np.int64]

    def __repr__(self) -> str:
        sizes = f"{self.examples:,} rows in {self.bins:,} sequences of {self.length:,} tokens"
        return f"<PackIndex: {sizes}, packed by {self.rule!r}>"

    @property
    def bins(self) -> int:
        return len(self.bin_offsets) - 1

    def pieces(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Document, start and stop of each piece in a bin."""
        here = slice(int(self.bin_offsets[number]), int(self.bin_offsets[number + 1]))
        return zip(
            self.piece_document[here].tolist(),
            self.piece_start[here].tolist(),
            self.piece_stop[here].tolist(),
            strict=True,
        )

    def examples_in(self, start: Any, stop: Any) -> Any:
        """Examples that begin in a piece: a document counts once per `limit` tokens, so that the
        rest of a document cut at the end of a bin does not count again."""
        limit = self.length - self.soft_tokens
        return -start // limit - -stop // limit

    def bin_lengths(self) -> NDArray[np.int64]:
        """Used places of every bin."""
        ends = edges_of(self.piece_stop - self.piece_start + self.soft_tokens)
        return np.diff(ends[self.bin_offsets])

    def lengths_of(self, bins: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Used places of some bins."""
        begins, ends = self.bin_offsets[bins], self.bin_offsets[bins + 1]
        taken = [
            int((self.piece_stop[begin:end] - self.piece_start[begin:end]).sum())
            + self.soft_tokens * int(end - begin)
            for begin, end in zip(begins, ends, strict=True)
        ]
        return np.array(taken, dtype=np.int64)

    def documents_in(self, bins: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """The documents of some bins, in order."""
        begins, ends = self.bin_offsets[bins], self.bin_offsets[bins + 1]
        parts = [self.piece_document[a:b] for a, b in zip(begins, ends, strict=True)]
        return np.concatenate([*parts, self.piece_document[:0]])

    def statistics(self) -> PackStatistics:
        """How well the bins are filled."""
        sizes = self.piece_stop - self.piece_start + self.soft_tokens
        places, taken = self.bins * self.length, int(sizes.sum(dtype=np.int64))
        return PackStatistics(
            taken - self.soft_tokens * len(sizes), taken / places if places else 0.0
        )

    def save(self, path: Path) -> None:
        """Write the index as an Arrow file, atomically."""
        fields = [
            pa.array(column) for column in (self.piece_document, self.piece_start, self.piece_stop)
        ]
        pieces = pa.StructArray.from_arrays(fields, fields=list(_PIECE))
        column = pa.LargeListArray.from_arrays(pa.array(self.bin_offsets), pieces)
        facts = {
            "format": FORMAT_VERSION,
            "rule": self.rule,
            "length": self.length,
            "soft_tokens": self.soft_tokens,
            "examples": self.examples,
            "overlong": asdict(self.overlong),
        }
        schema = pa.schema(
            [("pieces", column.type)], metadata={_METADATA: json.dumps(facts).encode()}
        )
        with writing_hashed(path) as stream, pa.ipc.new_file(stream, schema) as writer:
            writer.write_batch(pa.record_batch([column], schema=schema))

    @classmethod
    def open(cls, path: Path) -> PackIndex:
        """Memory-map a saved index, without reading or copying it."""
        try:
            batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
            facts: dict[str, Any] = json.loads((batch.schema.metadata or {})[_METADATA])
            if facts.pop("format", None) != FORMAT_VERSION:
                raise ValueError("another version")
        except (pa.ArrowInvalid, KeyError, IndexError, ValueError) as error:
            what = "not an index of packed documents of this version of Expert"
            raise ExpertError(f"{path}: {what}; delete it and it will be made again") from error
        column = batch.column(0)
        document, start, stop = (numbers_in(column.values.field(number)) for number in range(3))
        return cls(
            **{**facts, "overlong": OverlongCounts(**facts["overlong"])},
            piece_document=document,
            piece_start=start,
            piece_stop=stop,
            bin_offsets=numbers_in(column.offsets),
        )


# --- the name of an index ------------------------------------------------------------------------

NAME_FORMAT = 3
FITTED = "as they come"
"""How best-fit packing fills sequences; part of the name."""


def index_name(
    plan: RunPlan,
    split: str,
    *,
    tokens: Sequence[str],
    documents: NDArray[np.integer[Any]],
    packing: Packing,
    leaves_out: bool,
) -> str:
    """The file name of an index, which follows from everything that determines it. `leaves_out`:
    rows without tokens to train on are left out."""
    data = plan.data
    decides: dict[str, Any] = {
        "tokens": list(tokens),
        "documents": hashlib.sha256(np.ascontiguousarray(documents).data).hexdigest(),
        "rule": [data.packing, packing.length, data.overlong, plan.soft_tokens, plan.optim.seed],
        "format": NAME_FORMAT,
    }
    if data.packing == "best-fit":
        decides["fitted"] = FITTED
    if packing.most_rows is not None:
        decides["most rows"] = packing.most_rows
    if leaves_out:
        decides["left out"] = "what is not learnt"
    key = hashlib.sha256(json.dumps(decides).encode("utf-8")).hexdigest()[:16]
    return f"index-{split}-{key}.arrow"
