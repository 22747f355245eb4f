"""Rows to tokens, in order, on all cores.

This process reads the rows and hands them out in portions. Forked processes, which have limits on
memory and time, render and encode them: a chat template is a foreign program.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from expert.data.limits import MEMORY_BYTES, limit_this_process
from expert.data.records import BadRow, DataError, Dropped, Row, RowOutcome, Segment
from expert.data.tokens.encoder import EncodedBatch, Encoder, Ids

PORTION_ROWS = 512
# A tokenizer needs about 150 bytes per token while encoding: this limits it to 0.15 GB a process.
PORTION_CHARACTERS = 4_000_000
PORTION_SECONDS = 600.0
PORTIONS_AHEAD = 2
"""Portions that wait for each process, so that none is idle while this one reads."""


@dataclass(frozen=True, kw_only=True)
class TokeniseJob:
    """How to tokenise a source: its rows, a formatter and an encoder."""

    rows: Callable[[], Iterator[Row | BadRow]]
    """Start a new pass over all rows."""
    formatter: Callable[[], Callable[[Row], RowOutcome]]
    """Turns the rows of one pass into segments."""
    encoder: Encoder
    processes: int = 0
    """Most processes that render and encode; 0: this one does."""
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
    records: Mapping[str, str] = field(default_factory=dict)
    """Additional files of the folder, by name."""
    expected_bytes: int | None = None
    """Estimated size on disk, if known."""
    portion_rows: int = PORTION_ROWS


class TokenisedRows(NamedTuple):
    """Consecutive rows: the documents, and what became of the other rows."""

    rows: int
    batch: EncodedBatch
    numbers: Ids
    """The row of each document, counted from the first row of the portion."""
    bad: list[BadRow]
    dropped: Counter[str]


def tokenise_rows(
    rows: Iterable[Row | BadRow], segments_of: Callable[[Row], RowOutcome], encoder: Encoder
) -> TokenisedRows:
    """Render and encode rows in this process."""
    documents: list[list[Segment]] = []
    numbers, bad, dropped = [], [], Counter[str]()
    number = -1
    for number, row in enumerate(rows):
        outcome = row if isinstance(row, BadRow) else segments_of(row)
        if isinstance(outcome, BadRow):
            bad.append(outcome)
        elif isinstance(outcome, Dropped):
            dropped[outcome.reason] += 1
        else:
            numbers.append(number)
            documents.append(outcome)
    batch = encoder.encode(documents)
    return TokenisedRows(number + 1, batch, np.array(numbers, np.int32), bad, dropped)


def in_portions(
    rows: Iterable[Row | BadRow], most_rows: int, most_characters: int
) -> Iterator[list[Row | BadRow]]:
    """Consecutive rows, so many at a time, or fewer if they are long."""
    portion: list[Row | BadRow] = []
    characters = 0
    for row in rows:
        portion.append(row)
        characters += _characters(row.values) if isinstance(row, Row) else 0
        if len(portion) >= most_rows or characters >= most_characters:
            yield portion
            portion, characters = [], 0
    if portion:
        yield portion


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum([_characters(part) for part in value.values()])
    return sum([_characters(part) for part in value]) if isinstance(value, list) else 8


def tokenised_portions(work: TokeniseJob) -> Iterator[TokenisedRows]:
    """All rows of a source, tokenised, in order."""
    portions = in_portions(work.rows(), work.portion_rows, PORTION_CHARACTERS)
    wanted = min(work.processes, -(-(work.row_count or 1) // work.portion_rows))
    if work.processes == 0:
        segments_of = work.formatter()
        for portion in portions:
            yield tokenise_rows(portion, segments_of, work.encoder)
        return
    with _pool(work, max(1, wanted)) as pool:
        waiting: deque[Future[TokenisedRows]] = deque()
        for portion in portions:
            waiting.append(pool.submit(_tokenise, portion))
            if len(waiting) > wanted * PORTIONS_AHEAD:
                yield waiting.popleft().result(PORTION_SECONDS)
        while waiting:
            yield waiting.popleft().result(PORTION_SECONDS)


@contextmanager
def _pool(work: TokeniseJob, processes: int) -> Iterator[ProcessPoolExecutor]:
    """Forked processes, which share the tokenizer's memory; killed if anything goes wrong."""
    getattr(work.encoder, "prefix", None)  # loads the tokenizer once, before it is shared
    before = set(multiprocessing.active_children())
    # Every process encodes on one core; without this, the tokenizer warns of being forked.
    outer = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pool = ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(work.formatter, work.encoder),
    )
    try:
        yield pool
        pool.shutdown()
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool | TimeoutError):
            what = "died" if isinstance(error, BrokenProcessPool) else "makes no progress"
            raise DataError(
                f"a process that tokenises {work.made_for or 'rows'} {what}: rows may need more "
                f"than {MEMORY_BYTES // 2**30} GiB or the memory of this machine  (shorten the "
                "longest rows, or set base_models[0].prompt_template: chatml)"
            ) from error
        raise
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if outer is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = outer


_own: tuple[Callable[[Row], RowOutcome], Encoder]
"""In a process of the pool: how it tokenises."""


def _begin(formatter: Callable[[], Callable[[Row], RowOutcome]], encoder: Encoder) -> None:
    global _own
    limit_this_process()
    _own = formatter(), encoder


def _tokenise(portion: list[Row | BadRow]) -> TokenisedRows:
    return tokenise_rows(portion, *_own)
