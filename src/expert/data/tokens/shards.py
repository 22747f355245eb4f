"""Rows made into shards of documents, one file after the other, by one process or by two.

A shard has its final name only when it is complete, so a crash loses at most one of them, and
whoever comes later makes only what is missing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType

import numpy as np

from expert.core.files import sync_file, write_text_atomically
from expert.data.records import BadRow, DataError, Dropped, Row, Segment
from expert.data.tokens.documents import write_shard
from expert.data.tokens.encoder import Encoder
from expert.data.tokens.statistics import DocumentStatistics

Formatted = tuple[Row | BadRow, list[Segment] | BadRow | Dropped]
SHARD_ROWS = 4096
# A tokenizer holds about 150 bytes for each token while it encodes: this bounds it at 0.15 GB.
SHARD_CHARACTERS = 4_000_000
SHOWN_BAD_ROWS = 5
LOOKED_AT_FURTHER = 100_000
"""Rows behind the first bad one that are looked at, to tell how many are: some seconds."""


@dataclass(frozen=True, kw_only=True)
class Tokenising:
    """What it takes to tokenise a source: its rows as segments, an encoder, a progress report."""

    formatted: Callable[[], Iterator[Formatted]]
    """A new pass over all rows, each with what became of it."""
    encoder: Encoder
    made_for: str = ""
    """The split and its source, as people name them; a miss is explained by others of the same."""
    max_bad_rows: int = 0
    listed_by: str = ""
    """The command that lists all bad rows."""
    tell: Callable[[int, int], None] = field(default=lambda rows, tokens: None)
    shard_rows: int = SHARD_ROWS
    records: Mapping[str, str] = field(default_factory=dict)
    """Further files of the folder, by name: what else is to be known of the tokens."""
    with_helper: bool = False
    """Let a second process encode every other shard, where processes can be forked."""


def make_shards(
    work: Tokenising, bad: Rejects, parts: Path, *, published: Callable[[], bool]
) -> int:
    """Finish shard after shard in `parts`, and say how many there are; stops early where another
    process has published the folder.

    What a helper was to make and has not, because it was killed, is made here after all.
    """
    helper = Helper(lambda: _help(work, parts, published), wanted=work.with_helper)
    try:
        with helper:
            shards = _pass_over(work, bad, parts, published, others=helper.is_there)
    finally:
        for half in parts.glob(f".*.{helper.pid}"):  # it may have been ended while it wrote
            half.unlink(missing_ok=True)
    names = [shard_name(index) for index in range(shards)]
    if not published() and not all((parts / f"{name}.json").is_file() for name in names):
        _pass_over(work, Rejects(work.max_bad_rows), parts, published, others=False)
    return shards


def _pass_over(
    work: Tokenising, bad: Rejects, parts: Path, published: Callable[[], bool], *, others: bool
) -> int:
    """Read and format every row and finish the shards, or every other one; returns how many.

    A thread encodes: where the tokenizer does it, on every core and outside the interpreter's lock,
    the next shard is read and formatted meanwhile.
    """
    shards = rows = tokens = 0
    with ThreadPoolExecutor(1) as encoder_thread:
        waiting: Future[tuple[int, int]] | None = None
        for shard in _shards(work, bad):
            if published():
                return shards
            rows += shard.rows_in
            if not (others and shards % 2):
                tokens += waiting.result()[1] if waiting is not None else 0
                waiting = encoder_thread.submit(_finish_shard, parts, shards, shard, work.encoder)
            work.tell(rows, tokens)
            shards += 1
        if waiting is not None:
            tokens += waiting.result()[1]
            work.tell(rows, tokens)
    return shards


def _help(work: Tokenising, parts: Path, published: Callable[[], bool]) -> None:
    """In the helper: every other shard. Bad rows are the first process's business."""
    began_under = os.getppid()
    for index, shard in enumerate(_shards(work, Rejects(sys.maxsize))):
        if published() or os.getppid() != began_under:
            return
        if index % 2:
            _finish_shard(parts, index, shard, work.encoder)


@dataclass
class _Shard:
    """Rows of one shard: their numbers and their segments, and what was left out of it."""

    numbers: list[int] = field(default_factory=list)
    documents: list[list[Segment]] = field(default_factory=list)
    rows_in: int = 0
    characters: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class Rejects:
    """Bad rows: counted, kept for rejects.jsonl, and refused when there are too many."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.rows: list[BadRow] = []
        self.count = 0

    @property
    def too_many(self) -> bool:
        return self.count > self.allowed

    def add(self, bad: BadRow) -> None:
        self.count += 1
        self.rows.append(bad)

    def refusal(self, seen: int, coming: Iterator[Formatted], work: Tokenising) -> DataError:
        """The error for too many, after `seen` rows: the first bad rows, and how many there are.
        Later rows are counted too, so that not each bad row costs another attempt."""
        looked_at = 0
        for _, made in islice(coming, LOOKED_AT_FURTHER):
            looked_at += 1
            if isinstance(made, BadRow):
                self.add(made)
        least = "at least " if looked_at == LOOKED_AT_FURTHER else ""
        words = "a row" if self.count == 1 else f"{least}{self.count:,} rows"
        lines = [f"  - {row}" for row in self.rows[:SHOWN_BAD_ROWS]]
        rest = self.count - len(lines)
        lines += [f"  … and {rest:,} more" + (f": {work.listed_by}" if work.listed_by else "")]
        shown = "\n".join(lines if rest else lines[:-1])
        leave = f", or leave them out: --set training.dataset.max_bad_rows={self.count}"
        some_good = self.count < seen + looked_at  # else nothing would be left to learn
        fix = "fix the data" + (leave if some_good else "")
        return DataError(f"{words} cannot be used\n{shown}\n  ({fix})")


def _shards(work: Tokenising, bad: Rejects) -> Iterator[_Shard]:
    shard = _Shard()
    coming = work.formatted()
    for number, (_, made) in enumerate(coming):
        shard.rows_in += 1
        if isinstance(made, BadRow):
            bad.add(made)
            if bad.too_many:
                raise bad.refusal(number + 1, coming, work)
        elif isinstance(made, Dropped):
            shard.dropped[made.reason] = shard.dropped.get(made.reason, 0) + 1
        else:
            shard.numbers.append(number)
            shard.documents.append(made)
            shard.characters += sum(segment.size for segment in made)
        if shard.rows_in >= work.shard_rows or shard.characters >= SHARD_CHARACTERS:
            yield shard
            shard = _Shard()
    if shard.rows_in:
        yield shard


def _finish_shard(parts: Path, index: int, shard: _Shard, encoder: Encoder) -> tuple[int, int]:
    """Encode and write a shard, unless an earlier run or another process has finished it."""
    final, facts_file = parts / shard_name(index), parts / f"{shard_name(index)}.json"
    if final.is_file() and facts_file.is_file():
        facts = json.loads(facts_file.read_text(encoding="utf-8"))
        return facts["rows_in"], facts["tokens"]
    batch = encoder.encode(shard.documents)
    facts = DocumentStatistics.of(batch, rows_in=shard.rows_in, dropped=shard.dropped)
    temporary = parts / f".{final.name}.{os.getpid()}"
    write_shard(temporary, batch, np.array(shard.numbers, np.int32))
    sync_file(temporary)
    os.replace(temporary, final)
    write_text_atomically(facts_file, json.dumps(facts.to_json()))
    return facts.rows_in, facts.tokens


def shard_name(index: int) -> str:
    return f"data-{index:05d}.arrow"


class Helper:
    """While it is entered, a forked process does its work; leaving waits for it, or ends it where
    something was raised. What it did not do is left undone: whoever needs it looks for the result.

    Nothing of the first process is shut down in it, and it writes nothing to the terminal.
    """

    def __init__(self, work: Callable[[], None], *, wanted: bool) -> None:
        self._work = work
        self._wanted = wanted and hasattr(os, "fork")
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def is_there(self) -> bool:
        return self._pid is not None

    def __enter__(self) -> Helper:
        if not self._wanted:
            return self
        try:
            with warnings.catch_warnings():
                # A thread that draws progress may be there; the helper never draws.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except OSError:  # no room for another process
            return self
        if self._pid == 0:
            self._be_the_helper()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pid is None:
            return
        if kind is not None:
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _be_the_helper(self) -> None:
        code = 1
        try:
            self._work()
            code = 0
        finally:
            os._exit(code)  # no handler, no buffer and no traceback of the first process
