"""Rows drawn from all over the files of a source, and estimates of all rows from them.

Files of JSON lines and of CSV only: there a row can be read without those before it.
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
    has_a_row_a_line,
    how_lines_were_counted,
    parts_to_look_at,
    whole_lines,
)

SEED = 0
"""The same files give the same plan."""


@dataclass(frozen=True)
class DrawnLine:
    """A line that was drawn, with what it holds."""

    row: Row | BadRow | None
    """None: a blank line."""
    size: int
    """Bytes, line break included."""
    times: int
    """How often it was drawn: a line is, in proportion to its bytes."""


@dataclass(frozen=True)
class SpreadRows:
    """Lines from all over some files, beside the number and the bytes of all lines."""

    drawn: tuple[DrawnLine, ...]
    whole: bool
    """Every line is there, once."""
    lines: float
    """Of all files: counted, or estimated from the parts that were looked at."""
    all_bytes: float
    because: str
    """How the lines were counted."""

    def total(self, values: Sequence[float]) -> float:
        """The sum over all lines of what is known of the drawn ones: so much a byte, for all bytes.

        Drawn by bytes, for a few long rows hold most tokens of some data sets: by numbers of the
        row the same sample was off by two to three times as much.
        """
        if self.whole:
            return sum(values)
        pairs = list(zip(self.drawn, values, strict=True))
        draws = sum(line.times for line in self.drawn)
        return self.all_bytes * sum(line.times * value / line.size for line, value in pairs) / draws

    def share(self, chosen: Sequence[bool]) -> float:
        """Which part of all lines is like the chosen ones; a long line was drawn more often."""
        weights = [1.0 if self.whole else line.times / line.size for line in self.drawn]
        like = sum(weight for weight, is_one in zip(weights, chosen, strict=True) if is_one)
        return 1.0 if all(chosen) else like / sum(weights)


def spread_rows(files: Sequence[Path], *, format: str | None, most: int) -> SpreadRows | None:
    """Every row where there are at most `most`, else that many draws; None where a row is not a
    line."""
    kinds = [file_format(path, format) if has_a_row_a_line(path) else "" for path in files]
    if not all(kind in ("jsonl", "json", "csv") for kind in kinds):
        return None
    sizes = [path.stat().st_size for path in files]
    texts: list[tuple[int, bytes]] = []
    looked_at = 0
    for part in parts_to_look_at(sizes):
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
    drawn: list[DrawnLine] = []
    for (file, text), starts in zip(texts, chosen, strict=True):
        own = [text[start : _end_of_line(text, start)] for start in starts]
        rows = _rows_of(own, files[file], kinds[file])
        if rows is None:
            return None
        for row, line, times in zip(rows, own, starts.values(), strict=True):
            drawn.append(DrawnLine(row, len(line), times))
    share = looked_at / sum(sizes)
    return SpreadRows(
        drawn=tuple(drawn),
        whole=whole,
        lines=lines / share,
        all_bytes=sum(len(text) for _, text in texts) / share,
        because=how_lines_were_counted(files, exact=exact),
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
    """Where the drawn lines of each text begin, and how often each was drawn: all texts together
    are cut into equal stretches, and the line around one random byte of each is drawn."""
    total = sum(len(text) for _, text in texts)
    chance = random.Random(SEED)
    places = [int((number + chance.random()) * total / draws) for number in range(draws)]
    found, before = [], 0
    for _, text in texts:
        own = [place - before for place in places if before <= place < before + len(text)]
        before += len(text)
        found.append(Counter(text.rfind(b"\n", 0, place) + 1 for place in own))
    return found


def _rows_of(lines: list[bytes], path: Path, kind: str) -> list[Row | BadRow | None] | None:
    """What each line holds; None where a record of CSV goes over several lines."""
    header: list[bytes] = []
    if kind == "csv":
        with open_text(path) as stream:
            header = [stream.readline()]
    text = b"".join(line.removesuffix(b"\n") + b"\n" for line in [*header, *lines])
    by_line = {row.line: row for row in rows_of_lines(text, path, format=kind)}
    if header and any(isinstance(row, BadRow) for row in by_line.values()):
        return None
    return [by_line.get(number) for number in range(1 + len(header), 1 + len(header) + len(lines))]
