"""Chooses the rows to show: the first, the longest, random ones, or those at given lines."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from expert.core.errors import ExpertError
from expert.data.inspect.shown_rows import ShownRow, show_row
from expert.data.pipeline import DataPipeline, reader_for
from expert.data.records import BadRow, Row, RowOutcome, Segment

DEFAULT_ROWS = 3
SCREEN_TOKENS = 400
"""About how many tokens of a row are displayed: a screenful."""
JSON_TOKENS = 20_000
"""The same in JSON output; a row may be a text of a hundred megabytes."""
FIRST, LONGEST, DRAWN, ASKED = "the first", "the longest", "random", "asked for"


class RowNotFound(ExpertError):
    """A requested row that is not in the files."""


@dataclass(frozen=True)
class RowsToShow:
    """How many rows to show, and at which lines (`17` or `train.jsonl:17`)."""

    count: int = DEFAULT_ROWS
    lines: tuple[str, ...] = ()
    most_tokens: int | None = SCREEN_TOKENS
    """About how many tokens of each are displayed; None: all."""


@dataclass
class _Candidate:
    row: Row | BadRow
    made: RowOutcome
    number: int
    """The document number within its split; -1 if it is not a document."""
    tokens: int = 0


class RowPicker:
    """Sees every row of a check once, and keeps those to show."""

    def __init__(self, asked: RowsToShow) -> None:
        self.asked = asked
        self._seen = self._good = 0
        self._first: _Candidate | None = None
        self._longest: _Candidate | None = None
        self._drawn: list[_Candidate] = []
        self._random = random.Random(0)  # the same file shows the same rows
        self._named = [_line_named(text) for text in asked.lines]
        self._found: dict[int, list[tuple[str, _Candidate]]] = {}

    def add(self, row: Row, segments: list[Segment], tokens: int) -> None:
        """Offer the next good training row with its segments and token count."""
        candidate = _Candidate(row, segments, self._seen, tokens)
        self._seen += 1
        if self.asked.count <= 0:
            return
        self._first = self._first or candidate
        if self._longest is None or tokens > self._longest.tokens:
            self._longest = candidate
        # Reservoir sampling: each row is equally likely to be kept.
        if len(self._drawn) < self.asked.count:
            self._drawn.append(candidate)
        elif (place := self._random.randrange(self._seen)) < len(self._drawn):
            self._drawn[place] = candidate

    def look_at(self, split: str, row: Row | BadRow, made: RowOutcome) -> None:
        """Offer any row of any split, to find those requested by line."""
        good = split == "train" and isinstance(made, list)
        self._good += good
        for number, (file, line) in enumerate(self._named):
            meant = _same_file(row.file, file) if file else split == "train"
            if abs(row.line) == line and meant:
                candidate = _Candidate(row, made, self._good - 1 if good else -1)
                self._found.setdefault(number, []).append((split, candidate))

    def shown(self, line: DataPipeline, held_out: Sequence[int] = ()) -> list[ShownRow]:
        """The rows to show, requested ones first; `held_out`: documents drawn for validation."""
        missing = [text for n, text in enumerate(self.asked.lines) if n not in self._found]
        if missing:
            where = "a bare number is a line of the training files; FILE:LINE one of any file"
            absent = [f"--row {text}: there is no such row" for text in missing]
            raise RowNotFound("\n".join([*absent, f"  ({where})"]))
        validation = set(held_out)
        named = (pair for number in sorted(self._found) for pair in self._found[number])
        wanted = [(split, one, ASKED) for split, one in named]
        wanted += [("train", one, because) for one, because in self._chosen()]
        return [
            show_row(
                line,
                one.row,
                one.made,
                "validation" if one.number in validation else split,
                because,
                most_tokens=self.asked.most_tokens,
            )
            for split, one, because in wanted
        ]

    def _chosen(self) -> Iterator[tuple[_Candidate, str]]:
        if self._first is None or self._longest is None:
            return
        ends = {self._longest.number} if self.asked.count == 1 else set()
        ends = ends or {self._first.number, self._longest.number}
        others = [candidate for candidate in self._drawn if candidate.number not in ends]
        room = self.asked.count - len(ends)
        chosen = sorted(others[: max(0, room)], key=lambda candidate: candidate.number)
        if self._first.number in ends and self._first is not self._longest:
            yield self._first, FIRST
        yield from ((candidate, DRAWN) for candidate in chosen)
        both = self._first is self._longest and self._seen > 1
        yield self._longest, f"{FIRST} and {LONGEST}" if both else LONGEST


def _line_named(text: str) -> tuple[str, int]:
    """Parse `17`, `train.jsonl:17` or `rows.json: row 17`, the forms used in messages."""
    file, _, line = text.rpartition(":")
    line = line.strip().removeprefix("row").strip()
    if not line.isdecimal() or not int(line):
        raise RowNotFound(
            f"--row {text}: not a row  (give its line, as 17, or file and line, as train.jsonl:17)"
        )
    return file.strip(), int(line)


def _same_file(file: str, named: str) -> bool:
    """Whether `named` is the path of the file, or the end of it."""
    parts, end = PurePath(file).parts, PurePath(named.replace("\\", "/")).parts
    return file == named or parts[-len(end) :] == end


def rows_as_text(line: DataPipeline, asked: RowsToShow) -> list[ShownRow]:
    """Rows to show without a tokenizer; the longest is by characters."""
    picker = RowPicker(asked)
    for split in ("train", "validation", "test"):
        for source in line.sources_of(split):
            for row, outcome in reader_for(line, source).formatted():
                picker.look_at(split, row, outcome)
                if split == "train" and isinstance(row, Row) and isinstance(outcome, list):
                    picker.add(row, outcome, sum(len(each.text) for each in outcome))
    return picker.shown(line)
