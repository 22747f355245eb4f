"""Tokenises rows into pieces, in one process or several, and joins pieces into shards.

A piece is a range of rows, named after the first. A single process cuts pieces like shards, so that
they only need renaming. Several processes (`--part`) take turns in blocks of rows and cut each
block separately; joined, their pieces give the same shards byte for byte. A piece counts once its
metadata is written, so that a crash loses at most one, and a later process makes only what is
missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import uuid
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from expert.core.files import read_json, sha256_of, sync_file
from expert.core.hashed import file_integrity, write_hashed
from expert.data.records import BadRow, DataError, Dropped, Row, RowOutcome, RowsToSkip, Segment
from expert.data.tokens.documents import Ids, open_shards, write_shard
from expert.data.tokens.encoder import EncodedBatch, Encoder
from expert.data.tokens.statistics import DocumentStatistics

SHARD_ROWS = 4096
# A tokenizer needs about 150 bytes per token while encoding: this limits it to 0.15 GB.
SHARD_CHARACTERS = 4_000_000
BLOCKS_OF_A_PART = 8
"""At least this many, if there are enough rows, so that parts take about equally long."""
SHOWN_BAD_ROWS = 5
LOOKED_AT_FURTHER = 100_000
"""Rows read after the first bad one to count the others: takes some seconds."""


@dataclass(frozen=True, kw_only=True)
class TokeniseJob:
    """How to tokenise a source: its rows, a formatter and an encoder."""

    rows: Callable[[RowsToSkip], Iterator[Row | BadRow]]
    """Start a new pass over all rows; unneeded ones may be skipped."""
    formatter: Callable[[], Callable[[Row], RowOutcome]]
    """Turns the rows of one pass into segments."""
    encoder: Encoder
    in_order: bool = False
    """The outcome of a row depends on the rows before it: duplicates are left out."""
    row_count: int | None = None
    """Rows of the source, if known."""
    made_for: str = ""
    """The split and its source, for messages; a cache miss is explained by others of this name."""
    max_bad_rows: int = 0
    list_command: str = ""
    """The command that lists all bad rows."""
    tell: Callable[[int, int], None] = field(default=lambda rows, tokens: None)
    expect: Callable[[int], None] = field(default=lambda rows: None)
    """Called with the number of rows to be tokenised, if known."""
    waits: Callable[[str], None] = field(default=lambda text: None)
    """Called with a sentence when waiting for another process."""
    shard_rows: int = SHARD_ROWS
    records: Mapping[str, str] = field(default_factory=dict)
    """Additional files of the folder, by name."""
    expected_bytes: int | None = None
    """Estimated size on disk, if known."""
    with_helper: bool = False
    """Let a second process encode every other piece, if forking is possible."""


@dataclass(frozen=True)
class Blocks:
    """How rows are distributed: blocks are assigned to the parts in turn. `part` selects one."""

    parts: int = 1
    rows: int = sys.maxsize
    """Rows per block."""
    part: int | None = None
    """From 0; None: all."""

    @classmethod
    def for_parts(cls, parts: int, work: TokeniseJob) -> Blocks:
        """Blocks as long as shards, which then need no copying; shorter ones for few rows."""
        share = -(-(work.row_count or sys.maxsize) // (parts * BLOCKS_OF_A_PART))
        return cls(parts, max(1, min(work.shard_rows, share)))

    def has(self, row: int) -> bool:
        return self.part is None or row // self.rows % self.parts == self.part

    def end(self, row: int) -> int:
        """The first row after the block of a row."""
        return (row // self.rows + 1) * self.rows

    def count(self, rows: int) -> int:
        """How many of `rows` rows belong to the part."""
        if self.part is None:
            return rows
        whole, rest = divmod(rows, self.rows)
        blocks = len(range(self.part, whole, self.parts))
        return blocks * self.rows + (rest if whole % self.parts == self.part else 0)


@dataclass
class Piece:
    """A range of rows: the outcome of each, and the documents to tokenise."""

    first: int
    index: int = 0
    """Number among the pieces of this process."""
    sizes: array[int] = field(default_factory=lambda: array("q"))
    """Characters of each row; 0 if it is bad or left out."""
    left_out: dict[int, Dropped | BadRow] = field(default_factory=dict)
    """By row number."""
    numbers: list[int] = field(default_factory=list)
    documents: list[list[Segment]] = field(default_factory=list)
    characters: int = 0
    statistics: DocumentStatistics = field(default_factory=DocumentStatistics)
    file: tuple[int, str] = (0, "")
    """Size and hash of its tokens, once written."""

    @property
    def name(self) -> str:
        return f"data-{self.first:010d}.arrow"

    @property
    def end(self) -> int:
        return self.first + len(self.sizes)

    def add(self, made: RowOutcome) -> None:
        if isinstance(made, list):
            self.numbers.append(self.end)
            self.documents.append(made)
            self.sizes.append(sum(segment.size for segment in made))
            self.characters += self.sizes[-1]
        else:
            self.left_out[self.end] = made
            self.sizes.append(0)

    def dropped(self, start: int, stop: int) -> Counter[str]:
        """How many of some rows the checks left out, by reason."""
        outcomes = (outcome for row, outcome in self.left_out.items() if start <= row < stop)
        return Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Dropped))

    def bad(self) -> list[BadRow]:
        return [outcome for outcome in self.left_out.values() if isinstance(outcome, BadRow)]

    def write(self, place: Path, encoder: Encoder) -> int:
        """Encode and write it, metadata last, unless it exists. Returns its number of tokens."""
        there = written(place, self.first)
        if there is not None:
            return there.statistics.tokens
        batch = encoder.encode(self.documents)
        facts = DocumentStatistics.of(
            batch, rows_in=len(self.sizes), dropped=self.dropped(self.first, self.end)
        )
        # Processes on several machines may write the same piece and have the same pid.
        temporary = place / f".{self.name}.{uuid.uuid4().hex}"
        try:
            write_shard(temporary, batch, np.array(self.numbers, np.int32))
            sync_file(temporary)
            size, sha256 = temporary.stat().st_size, sha256_of(temporary)
            os.replace(temporary, place / self.name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        metadata = {
            "sizes": self.sizes.tolist(),
            "left_out": [(row, asdict(outcome)) for row, outcome in self.left_out.items()],
            "statistics": facts.to_json(),
            "file": [size, sha256],
        }
        write_hashed(place / f"{self.name}.json", json.dumps(metadata))
        return facts.tokens


def written(place: Path, first: int) -> Piece | None:
    """The piece that begins at a row, if it is complete; its documents stay on disk."""
    piece = Piece(first)
    facts = place / f"{piece.name}.json"
    if file_integrity(facts) != "sound":  # damaged, or from an earlier version: made again
        return None
    try:
        metadata = read_json(facts)
        for row, outcome in metadata["left_out"]:
            piece.left_out[row] = BadRow(**outcome) if "file" in outcome else Dropped(**outcome)
        piece.sizes = array("q", metadata["sizes"])
        piece.statistics = DocumentStatistics.from_json(metadata["statistics"])
        piece.file = (metadata["file"][0], metadata["file"][1])
        whole = (place / piece.name).stat().st_size == piece.file[0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return piece if whole and piece.sizes else None


def pieces_of(place: Path, blocks: Blocks, rows: int, *, check: bool = False) -> list[Piece] | None:
    """All pieces of a part; None if one is missing. `check`: remove one with the wrong hash."""
    pieces, first = [], 0
    while first < rows:
        if not blocks.has(first):
            first = blocks.end(first)
            continue
        piece = written(place, first)
        if piece is None:
            return None
        if check and sha256_of(place / piece.name) != piece.file[1]:
            (place / piece.name).unlink(missing_ok=True)
            return None
        pieces.append(piece)
        first = piece.end
    return pieces


def make_pieces(
    work: TokeniseJob, place: Path, blocks: Blocks, published: Callable[[], bool]
) -> int:
    """Finish the pieces of a part and return the number of rows of the source; stops early if
    another process publishes the folder.

    Pieces that a helper did not finish, because it was killed, are made here.
    """
    if work.row_count is not None:
        work.expect(blocks.count(work.row_count))
    this, other = _Pass(work, place, blocks), _Pass(work, place, blocks)
    with helper_process(
        lambda: _run_helper(other, published), wanted=work.with_helper
    ) as is_helped:
        rows = _pass_over(this, published, every_other=is_helped)
    if is_helped and not published() and pieces_of(place, blocks, rows) is None:
        _pass_over(_Pass(work, place, blocks), published)
    return rows


class _Pass:
    """One pass over the rows, in pieces; skips pieces that exist or belong to other parts."""

    def __init__(self, work: TokeniseJob, place: Path, blocks: Blocks) -> None:
        self.work, self.place, self.blocks = work, place, blocks
        self.bad: list[BadRow] = []
        self.most_bad = work.max_bad_rows
        self.rows = self.own_rows = self.tokens = self._pieces = 0

    def pieces(self) -> Iterator[Piece]:
        work, segments_of = self.work, self.work.formatter()
        piece: Piece | None = None
        until = 0

        def rows_to_skip() -> int:
            return 0 if work.in_order or piece is not None else max(0, until - self.rows)

        coming = work.rows(rows_to_skip)
        for number, row in enumerate(coming):
            self.rows += 1
            if piece is None and number >= until:
                piece, until = self._at(number)
            if piece is None:
                if work.in_order and isinstance(row, Row):
                    segments_of(row)
                continue
            outcome = row if isinstance(row, BadRow) else segments_of(row)
            piece.add(outcome)
            if isinstance(outcome, BadRow):
                self.bad.append(outcome)
                if len(self.bad) > self.most_bad:
                    # The rows that follow are parsed, since there is a piece.
                    rest = (r if isinstance(r, BadRow) else segments_of(r) for r in coming)
                    raise too_many_bad_rows(
                        self.bad, number + 1, rest, work, some=self.blocks.parts > 1
                    )
            full = len(piece.sizes) >= work.shard_rows or piece.characters >= SHARD_CHARACTERS
            if full or piece.end == until:
                self.own_rows += len(piece.sizes)
                yield piece
                piece, until = None, 0
        if piece is not None:
            self.own_rows += len(piece.sizes)
            yield piece

    def _at(self, row: int) -> tuple[Piece | None, int]:
        """The piece to make from a row on and its latest end; or None and the next row to do."""
        if not self.blocks.has(row):
            return None, self.blocks.end(row)
        self._pieces += 1
        there = written(self.place, row)
        if there is None:
            return Piece(row, self._pieces - 1), self.blocks.end(row)
        self.bad += there.bad()
        self.own_rows += len(there.sizes)
        self.tokens += there.statistics.tokens
        return None, there.end


def _pass_over(this: _Pass, published: Callable[[], bool], *, every_other: bool = False) -> int:
    """Read and format the rows and finish the pieces, or every other one; returns the rows.

    A thread encodes, so that the next piece can be read and formatted meanwhile: the tokenizer runs
    on all cores without Python's lock.
    """
    with ThreadPoolExecutor(1) as encoder_thread:
        waiting: Future[int] | None = None
        for piece in this.pieces():
            if published():
                return this.rows
            if not (every_other and piece.index % 2):
                this.tokens += waiting.result() if waiting is not None else 0
                waiting = encoder_thread.submit(piece.write, this.place, this.work.encoder)
            this.work.tell(this.own_rows, this.tokens)
        if waiting is not None:
            this.tokens += waiting.result()
            this.work.tell(this.own_rows, this.tokens)
    return this.rows


def _run_helper(this: _Pass, published: Callable[[], bool]) -> None:
    """In the helper: every other piece. Bad rows are reported by the main process."""
    began_under = os.getppid()
    this.most_bad = sys.maxsize
    for piece in this.pieces():
        if published() or os.getppid() != began_under:
            return
        if piece.index % 2:
            piece.write(this.place, this.work.encoder)


def too_many_bad_rows(
    bad: list[BadRow],
    seen: int,
    coming: Iterable[RowOutcome],
    work: TokeniseJob,
    *,
    some: bool = False,
) -> DataError:
    """The error for too many bad rows after `seen` rows: the first ones and how many there are.
    Counts later rows too, so that not each bad row costs another attempt. `some`: not all earlier
    rows were examined."""
    every, looked_at = [*bad], 0
    for outcome in islice(coming, LOOKED_AT_FURTHER):
        looked_at += 1
        every += [outcome] if isinstance(outcome, BadRow) else []
    least = "at least " if some or looked_at == LOOKED_AT_FURTHER else ""
    words = "a row" if len(every) == 1 else f"{least}{len(every):,} rows"
    lines = [f"  - {row}" for row in every[:SHOWN_BAD_ROWS]]
    if rest := len(every) - len(lines):
        lines.append(
            f"  … and {rest:,} more" + (f": {work.list_command}" if work.list_command else "")
        )
    fix = "fix the data"
    if len(every) < seen + looked_at:  # else nothing would be left to train on
        fix += f", or leave them out: --set training.dataset.max_bad_rows={len(every)}"
    shown = "\n".join(lines)
    return DataError(f"{words} cannot be used\n{shown}\n  ({fix})")


# --- pieces to shards ----------------------------------------------------------------------------

Stretch = tuple[Piece, int, int]
"""Rows of a piece: the first, and the one after the last."""


def write_shards(
    place: Path, pieces: Sequence[Piece], to: Path, shard_rows: int
) -> tuple[list[str], DocumentStatistics]:
    """Write the shards made of the rows of all pieces; returns their names and statistics. A piece
    that is exactly a shard is hard-linked if possible."""
    names: list[str] = []
    total = DocumentStatistics()
    for stretches in _cut(pieces, shard_rows):
        names.append(f"data-{len(names):05d}.arrow")
        piece, start, stop = stretches[0]
        if len(stretches) == 1 and (start, stop) == (piece.first, piece.end):
            total = total.plus(piece.statistics)
            _link(place / piece.name, to / names[-1])
            continue
        batch, numbers = _joined(place, stretches)
        write_shard(to / names[-1], batch, numbers)
        rows, dropped = 0, Counter[str]()
        for piece, start, stop in stretches:
            rows += stop - start
            dropped.update(piece.dropped(start, stop))
        total = total.plus(DocumentStatistics.of(batch, rows_in=rows, dropped=dropped))
    return names, total


def _cut(pieces: Sequence[Piece], shard_rows: int) -> Iterator[list[Stretch]]:
    """The rows of every shard: `shard_rows`, or fewer if they have enough characters."""
    stretches: list[Stretch] = []
    rows = characters = 0
    for piece in pieces:
        start = piece.first
        for row, size in enumerate(piece.sizes, piece.first):
            rows += 1
            characters += size
            if rows >= shard_rows or characters >= SHARD_CHARACTERS:
                yield [*stretches, (piece, start, row + 1)]
                stretches, start, rows, characters = [], row + 1, 0, 0
        if start < piece.end:
            stretches.append((piece, start, piece.end))
    if stretches:
        yield stretches


def _joined(place: Path, stretches: Sequence[Stretch]) -> tuple[EncodedBatch, Ids]:
    """The documents of some rows, end to end, and their row numbers."""
    parts: list[tuple[Ids, ...]] = [(np.zeros(0, np.int32),) * 5]
    for piece, start, stop in stretches:
        if not piece.statistics.documents:
            continue
        [(shard, numbers)] = open_shards(place / piece.name)
        a, b = np.searchsorted(numbers, [start, stop])
        tokens, spans = shard.offsets[a : b + 1], shard.span_offsets[a : b + 1]
        parts.append(
            (
                shard.tokens[tokens[0] : tokens[-1]],
                np.diff(tokens).astype(np.int32),
                shard.spans[spans[0] : spans[-1]],
                np.diff(spans).astype(np.int32),
                numbers[a:b],
            )
        )
    *columns, rows = (np.concatenate(each) for each in zip(*parts, strict=True))
    return EncodedBatch(*columns), rows


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(file, to)


# --- a second process ----------------------------------------------------------------------------


@contextlib.contextmanager
def helper_process(work: Callable[[], None], *, wanted: bool) -> Iterator[bool]:
    """Context with a forked process that does `work`; leaving it waits for the process, or kills it
    after an exception. Unfinished work is left undone: the caller checks the results. Yields
    whether there is a helper.

    The helper shuts down nothing of the main process and writes nothing to the terminal.
    """
    pid = _forked(work) if wanted and hasattr(os, "fork") else None
    try:
        yield pid is not None
    except BaseException:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        if pid is not None:
            os.waitpid(pid, 0)


def _forked(work: Callable[[], None]) -> int | None:
    try:
        with warnings.catch_warnings():
            # There may be a thread that draws progress; the helper never draws.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError:  # no resources for another process
        return None
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)  # no exit handlers, buffers or traceback of the main process
    return pid
