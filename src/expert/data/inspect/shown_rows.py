"""Rows as the model sees them: which are shown, and what happens to each of their tokens.

A row is rendered, tokenised, cut and packed by the functions that training uses, with the plan of
the run. This module only decodes its tokens and marks which are trained on, which are context and
which are lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expert.core.errors import ExpertError
from expert.data.pack.pack_index import PackIndex
from expert.data.pack.packing import packed, rows_to_pack
from expert.data.pipeline import DataPipeline
from expert.data.records import BadRow, Dropped, Row, RowOutcome, place_of
from expert.data.tokens.documents import FlatDocuments, shard_of
from expert.data.tokens.encoder import Encoder
from expert.planning.choose.sequences import Packing

DEFAULT_ROWS = 3
SCREEN_TOKENS = 400
"""About how many tokens of a row are displayed: a screenful."""
JSON_TOKENS = 20_000
"""The same in JSON output; a row may be a text of a hundred megabytes."""
FIRST, LONGEST, DRAWN, ASKED = "the first", "the longest", "random", "asked for"
CONTEXT_TOKENS = 8
"""Decoded before a segment and removed again: some tokenizers drop the space of a first word."""
MAX_SEGMENTS = 40
"""Of a longer row only these are shown, the first."""
MIN_SHOWN_TOKENS = 24
"""Tokens of a segment that are always shown."""
_REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class RowsToShow:
    """How many rows to show, and at which lines (`17` or `train.jsonl:17`)."""

    count: int = DEFAULT_ROWS
    lines: tuple[str, ...] = ()
    most_tokens: int | None = SCREEN_TOKENS
    """About how many tokens of each are displayed; None: all."""


@dataclass(frozen=True)
class ShownSegment:
    """Consecutive tokens that are treated the same."""

    text: str
    trained: bool
    tokens: int
    seen: bool = True
    """False: cut off; the model never sees them."""
    piece: int = 0
    """Part of a split row; each part is a sequence."""
    special: bool = False
    """A special token of the tokenizer."""
    not_shown: int = 0
    """Tokens between `text` and `after` that are not displayed."""
    after: str = ""


@dataclass(frozen=True)
class ShownRow:
    """One row, and what happens to its tokens."""

    place: str
    split: str
    because: str
    """Why this row is shown: first, longest, random or asked for."""
    tokens: int | None = None
    trained_tokens: int | None = None
    lost_tokens: int = 0
    lost_answer_tokens: int = 0
    """Lost tokens that would have been trained on."""
    lost_because: str = ""
    pieces: int = 1
    left_out: str = ""
    """Why the model never sees the row; "" if it does."""
    special_tokens: dict[str, int] = field(default_factory=dict)
    """How often each special token occurs, in order of appearance."""
    segments: tuple[ShownSegment, ...] = ()


class _Candidate(NamedTuple):
    row: Row | BadRow
    made: RowOutcome
    number: int
    """The document number within its split; -1 if it is not a document."""
    tokens: int


class RowPicker:
    """Sees every row of a check once, and keeps those to show."""

    def __init__(self, asked: RowsToShow) -> None:
        self.asked = asked
        self._good = 0
        self._first: _Candidate | None = None
        self._longest: _Candidate | None = None
        self._drawn: list[_Candidate] = []
        self._random = random.Random(0)  # the same file shows the same rows
        self._named = [_line_named(text) for text in asked.lines]
        self._found: dict[int, list[tuple[str, _Candidate]]] = {}

    def add(self, split: str, row: Row | BadRow, made: RowOutcome, tokens: int) -> None:
        """Offer the next row of a split, what became of it, and its tokens."""
        good = split == "train" and isinstance(made, list)
        candidate = _Candidate(row, made, self._good if good else -1, tokens)
        if good:
            self._good += 1
            self._first = self._first or candidate
            if self._longest is None or tokens > self._longest.tokens:
                self._longest = candidate
            # Reservoir sampling: each row is equally likely to be kept.
            if len(self._drawn) < self.asked.count:
                self._drawn.append(candidate)
            elif (place := self._random.randrange(self._good)) < len(self._drawn):
                self._drawn[place] = candidate
        for number, (file, line) in enumerate(self._named):
            # The path of the file, or the end of it.
            end = PurePath(file.replace("\\", "/")).parts
            same = row.file == file or PurePath(row.file).parts[-len(end) :] == end
            if abs(row.line) == line and (same if file else split == "train"):
                self._found.setdefault(number, []).append((split, candidate))

    def shown(self, line: DataPipeline, held_out: Sequence[int] = ()) -> list[ShownRow]:
        """The rows to show, requested ones first; `held_out`: documents drawn for validation."""
        missing = [text for n, text in enumerate(self.asked.lines) if n not in self._found]
        if missing:
            where = "a bare number is a line of the training files; FILE:LINE one of any file"
            absent = [f"--row {text}: there is no such row" for text in missing]
            raise ExpertError("\n".join([*absent, f"  ({where})"]))
        wanted = [(*pair, ASKED) for _, pairs in sorted(self._found.items()) for pair in pairs]
        # The longest row, the first and random ones, up to the count asked for.
        chosen: dict[int, tuple[str, _Candidate, str]] = {}
        offered = [(LONGEST, self._longest), (FIRST, self._first)]
        for because, one in [*offered, *((DRAWN, one) for one in self._drawn)]:
            if one is not None and len(chosen) < self.asked.count:
                chosen.setdefault(one.number, ("train", one, because))
        wanted += [chosen[number] for number in sorted(chosen)]
        validation, most = set(held_out), self.asked.most_tokens
        return [
            show_row(
                *(line, one.row, one.made, "validation" if one.number in validation else split),
                because,
                most_tokens=most,
            )
            for split, one, because in wanted
        ]


def _line_named(text: str) -> tuple[str, int]:
    """Parse `17`, `train.jsonl:17` or `rows.json: row 17`, the forms used in messages."""
    file, _, line = text.rpartition(":")
    line = line.strip().removeprefix("row").strip()
    if not line.isdecimal() or not int(line):
        raise ExpertError(f"--row {text}: not a row  (give its line: 17, or train.jsonl:17)")
    return file.strip(), int(line)


def show_row(
    line: DataPipeline,
    row: Row | BadRow,
    made: RowOutcome,
    split: str,
    because: str,
    *,
    most_tokens: int | None,
) -> ShownRow:
    """A row and what happens to it; `most_tokens`: about how many are displayed, None: all."""
    place = place_of(row.file, row.line)
    if isinstance(made, BadRow | Dropped):
        bad = "a bad row: " if isinstance(made, BadRow) else ""
        return ShownRow(place, split, because, left_out=f"{bad}{made.reason}")
    store = FlatDocuments([shard_of(line.encoder.encode([made]))])
    # How the run would pack this row alone.
    plan = line.plan
    rows = rows_to_pack(plan, store, np.arange(1), is_text=line.is_text)
    length = plan.data.max_seq_length
    if line.is_text and plan.data.packing == "concat":
        # Among other rows it is cut wherever a sequence ends; alone it is shown whole.
        length = max(length, int(store.lengths[0]) + plan.soft_tokens)
    packing = Packing(1, length, None)
    index = packed(plan, split, rows, plan.optim.seed, packing, is_text=line.is_text)
    ids = np.array(store.tokens(0))
    answer, trained = np.zeros((2, len(ids)), np.bool_)
    """What is marked for training, and what is the label of the token before it."""
    piece = np.full(len(ids), -1, np.int32)
    """The part of a split row; -1: lost."""
    for start, stop in store.spans(0):
        answer[start:stop] = True
    pieces = sorted(zip(index.piece_start.tolist(), index.piece_stop.tolist(), strict=True))
    for number, (start, stop) in enumerate(pieces):
        trained[start + 1 : stop] = answer[start + 1 : stop]
        piece[start:stop] = number
    lost, special = piece < 0, line.encoder.special_ids
    because_lost = f"cut at max_seq_length {line.plan.data.max_seq_length}"
    if not line.is_text:
        because_lost = "after the last whole block of this epoch"
    return ShownRow(
        place,
        split,
        because,
        tokens=len(ids),
        trained_tokens=int(trained.sum()),
        lost_tokens=int(lost.sum()),
        lost_answer_tokens=int((lost & answer).sum()),
        lost_because=because_lost if lost.any() else "",
        pieces=len(pieces),
        left_out=_left_out(line, index, len(ids), bool(answer.any())),
        special_tokens=dict(Counter(special[id] for id in ids.tolist() if id in special)),
        segments=_shown_segments(ids, trained, piece, line.encoder, most_tokens),
    )


def _left_out(line: DataPipeline, index: PackIndex, tokens: int, has_answer: bool) -> str:
    if index.bins:
        return ""
    limit = f"max_seq_length {line.plan.data.max_seq_length}"
    if index.overlong.dropped:
        return f"{tokens:,} tokens, longer than {limit}, and overlong: drop leaves it out"
    return f"the answer starts after {limit}" if has_answer else "no token of it is trained on"


def _shown_segments(
    ids: NDArray[np.int32],
    trained: NDArray[np.bool_],
    piece: NDArray[np.int32],
    encoder: Encoder,
    most_tokens: int | None,
) -> tuple[ShownSegment, ...]:
    """The segments of a document as text; long ones without their middle."""
    is_special = np.isin(ids, np.asarray(list(encoder.special_ids), np.int64))
    # Every special token is a segment of its own, even next to another.
    state = piece.astype(np.int64) * 4 + trained * 2 + is_special
    changes = np.flatnonzero((np.diff(state) != 0) | is_special[1:]) + 1
    edges = [0, *changes.tolist(), len(state)] if len(state) else [0]
    stretches, room, left = list(pairwise(edges)), len(ids), 0
    if most_tokens is not None and len(ids) > most_tokens:
        left = len(ids) - stretches[:MAX_SEGMENTS][-1][1]
        stretches = stretches[:MAX_SEGMENTS]
        room = max(MIN_SHOWN_TOKENS, most_tokens // len(stretches))
    segments: list[ShownSegment] = []
    for start, stop in stretches:
        text, after, hidden = "", "", max(0, stop - start - room)
        if hidden:
            head = start + room // 2
            # A cut within a character leaves half of it.
            text = _decoded(ids, start, head, encoder).rstrip(_REPLACEMENT_CHARACTER)
            after = _decoded(ids, head + hidden, stop, encoder).lstrip(_REPLACEMENT_CHARACTER)
        segments.append(
            ShownSegment(
                text=text if hidden else _decoded(ids, start, stop, encoder),
                trained=bool(trained[start]),
                tokens=stop - start,
                seen=bool(piece[start] >= 0),
                piece=max(0, int(piece[start])),
                special=bool(is_special[start]),
                not_shown=hidden,
                after=after,
            )
        )
    if left:
        last = replace(segments[-1], text="", trained=False, special=False, after="")
        segments.append(replace(last, tokens=left, not_shown=left))
    return tuple(segments)


def _decoded(ids: NDArray[np.int32], start: int, stop: int, encoder: Encoder) -> str:
    before = max(0, start - CONTEXT_TOKENS)
    lead = encoder.decode(ids[before:start].tolist()) if before < start else ""
    whole = encoder.decode(ids[before:stop].tolist())
    if whole.startswith(lead):
        return whole[len(lead) :]
    return encoder.decode(ids[start:stop].tolist())
