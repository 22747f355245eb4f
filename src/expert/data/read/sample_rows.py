"""Samples rows evenly over the files of a source, and estimates totals from them.

Only for JSON Lines and CSV, where a row can be read without the rows before it.
"""

from __future__ import annotations

import codecs
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expert.data.read.rows import file_format, rows_of_lines
from expert.data.read.streams import open_text
from expert.data.records import BadRow, Row
from expert.planning.survey import (
    count_lines,
    describe_line_count,
    has_one_row_per_line,
    sample_ranges,
    whole_lines,
)

SEED = 0
"""The same files give the same plan."""


@dataclass(frozen=True)
class SampledLine:
    """A sampled line and its row."""

    row: Row | BadRow | None
    """None: a blank line."""
    size: int
    """Bytes, including the line break."""
    times: int
    """How often it was drawn; the probability is proportional to its bytes."""


@dataclass(frozen=True)
class SampledRows:
    """Lines sampled over files, with the number and the bytes of all lines."""

    drawn: tuple[SampledLine, ...]
    whole: bool
    """All lines are included, once."""
    lines: float
    """In all files: counted, or estimated from the parts that were read."""
    all_bytes: float
    because: str
    """How the lines were counted."""

    def total(self, values: Sequence[float]) -> float:
        """The estimated sum over all lines of a value known for the drawn ones: the mean per byte,
        times all bytes.

        Lines are drawn by bytes because in some data sets a few long rows hold most tokens: with
        rows drawn by number, the error of the same sample was two to three times as large.
        """
        if self.whole:
            return sum(values)
        pairs = list(zip(self.drawn, values, strict=True))
        draws = sum(line.times for line in self.drawn)
        return self.all_bytes * sum(line.times * value / line.size for line, value in pairs) / draws

    def share(self, chosen: Sequence[bool]) -> float:
        """The estimated share of all lines that are like the chosen ones, corrected for long lines
        being drawn more often."""
        weights = [1.0 if self.whole else line.times / line.size for line in self.drawn]
        like = sum(weight for weight, is_one in zip(weights, chosen, strict=True) if is_one)
        return 1.0 if all(chosen) else like / sum(weights)


def sample_rows(files: Sequence[Path], *, format: str | None, most: int) -> SampledRows | None:
    """Every row if there are at most `most`, else that many draws; None if rows are not lines."""
    kinds = [file_format(path, format) if has_one_row_per_line(path) else "" for path in files]
    if not all(kind in ("jsonl", "json", "csv") for kind in kinds):
        return None
    sizes = [path.stat().st_size for path in files]
    texts: list[tuple[int, bytes]] = []
    looked_at = 0
    for part in sample_ranges(sizes):
        text = whole_lines(files[part.file], part)
        looked_at += len(text)
        if part.start == 0:
            text = text.removeprefix(codecs.BOM_UTF8)
            text = text.partition(b"\n")[2] if kinds[part.file] == "csv" else text
        texts.append((part.file, text))
    lines = sum(count_lines(text) for _, text in texts)
    if not lines:
        return None
    exact = looked_at == sum(sizes)
    whole = exact and lines <= most
    chosen = [_every_line(text) for _, text in texts] if whole else _draw(texts, most)
    drawn: list[SampledLine] = []
    for (file, text), starts in zip(texts, chosen, strict=True):
        own = [text[start : _end_of_line(text, start)] for start in starts]
        rows = _rows_of(own, files[file], kinds[file])
        if rows is None:
            return None
        for row, line, times in zip(rows, own, starts.values(), strict=True):
            drawn.append(SampledLine(row, len(line), times))
    share = looked_at / sum(sizes)
    return SampledRows(
        drawn=tuple(drawn),
        whole=whole,
        lines=lines / share,
        all_bytes=sum(len(text) for _, text in texts) / share,
        because=describe_line_count(files, exact=exact),
    )


def _end_of_line(text: bytes, place: int) -> int:
    return text.find(b"\n", place) + 1 or len(text)


def _every_line(text: bytes) -> Counter[int]:
    """Where the lines of a text begin."""
    starts: Counter[int] = Counter()
    start = 0
    while start < len(text):
        starts[start] = 1
        start = _end_of_line(text, start)
    return starts


def _draw(texts: Sequence[tuple[int, bytes]], draws: int) -> list[Counter[int]]:
    """Where the drawn lines of each text begin, and how often each was drawn. All texts together
    are divided into equal ranges, and the line around one random byte of each is drawn."""
    total = sum(len(text) for _, text in texts)
    chance = random.Random(SEED)
    places = [int((number + chance.random()) * total / draws) for number in range(draws)]
    starts, before = [], 0
    for _, text in texts:
        own = [place - before for place in places if before <= place < before + len(text)]
        before += len(text)
        starts.append(Counter(text.rfind(b"\n", 0, place) + 1 for place in own))
    return starts


def _rows_of(lines: list[bytes], path: Path, kind: str) -> list[Row | BadRow | None] | None:
    """The row of each line; None if a CSV record spans several lines."""
    header: list[bytes] = []
    if kind == "csv":
        with open_text(path) as stream:
            header = [stream.readline()]
    text = b"".join(line.removesuffix(b"\n") + b"\n" for line in [*header, *lines])
    by_line = {row.line: row for row in rows_of_lines(text, path, format=kind)}
    if header and any(isinstance(row, BadRow) for row in by_line.values()):
        return None
    return [by_line.get(number) for number in range(1 + len(header), 1 + len(header) + len(lines))]
