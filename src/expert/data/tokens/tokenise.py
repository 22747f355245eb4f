"""Rows to tokens, in order, on all cores.

This process reads the rows and hands them out in portions; forked processes render and encode them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from expert.data.processes import MEMORY_BYTES, CannotStartWorkers, WorkersFailed, in_workers
from expert.data.records import BadRow, DataError, Dropped, Row, RowOutcome, Segment
from expert.data.tokens.encoder import EncodedBatch, Encoder, Ids

PORTION_ROWS = 512
# A tokenizer needs about 150 bytes per token while encoding: this limits it to 0.15 GB a process.
PORTION_CHARACTERS = 4_000_000
PORTION_SECONDS = 600.0


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
    """The split and its source, for messages."""
    max_bad_rows: int = 0
    list_command: str = ""
    """The command that lists all bad rows."""
    tell: Callable[[int, int], None] = field(default=lambda rows, tokens: None)
    expect: Callable[[int], None] = field(default=lambda rows: None)
    """Called with the number of rows to be tokenised, if known."""
    waits: Callable[[str], None] = field(default=lambda text: None)
    """Called with a sentence when waiting for another process."""
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


def tokenised_portions(work: TokeniseJob) -> Generator[TokenisedRows, None, None]:
    """All rows of a source, tokenised, in order."""
    getattr(work.encoder, "prefix", None)  # loads the tokenizer once, before processes share it
    processes = min(work.processes, -(-max(1, work.row_count or 1) // work.portion_rows))

    def begin() -> Callable[[list[Row | BadRow]], TokenisedRows]:
        return partial(tokenise_rows, segments_of=work.formatter(), encoder=work.encoder)

    def portions(count: int) -> Iterator[list[Row | BadRow]]:
        return in_portions(work.rows(), work.portion_rows, PORTION_CHARACTERS)

    try:
        yield from in_workers(begin, portions, processes, patience=PORTION_SECONDS)
    except (WorkersFailed, CannotStartWorkers) as error:
        most = f"{MEMORY_BYTES // 2**30} GiB or the memory of this machine"
        fix = "shorten the longest rows, or set base_models[0].prompt_template: chatml"
        what = f"cannot be tokenised: {error}; rows may need more than {most}"
        raise DataError(f"{work.made_for or 'the rows'}: {what}  ({fix})") from error
