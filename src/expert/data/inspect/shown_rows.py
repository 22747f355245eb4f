"""Rows as the model sees them: which are shown, and each read back from the arrays of a batch.

A row is rendered, tokenised, cut and put into a batch by the functions that training uses, with the
plan of the run. The ids and labels shown are those of the batch; this module only decodes them and
marks which tokens are trained on, which are context and which are lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.data.feed.batches import IGNORED, BatchArrays, BatchShape, fill_batch
from expert.data.pack.pack_index import PackIndex
from expert.data.pack.packing import packed, rows_to_pack
from expert.data.pipeline import DataPipeline, reader_for
from expert.data.records import BadRow, Dropped, Row, RowOutcome, Segment, place_of
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
"""Of a longer row, shown from its beginning and its end."""
MIN_SHOWN_TOKENS = 24
"""Tokens of a segment that are always shown."""
BINS_TOGETHER = 64
_REPLACEMENT_CHARACTER = "\ufffd"


class RowNotFound(ExpertError):
    """A requested row that is not in the files."""


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
    tokens: int | None
    """None without a tokenizer."""
    seen: bool = True
    """False: cut off; the model never sees them."""
    piece: int = 0
    """Part of a split row; each part is a sequence."""
    special: bool = False
    """A special token of the tokenizer."""
    not_shown: int = 0
    """Tokens between `text` and `after` that are not displayed."""
    after: str = ""
    is_gap: bool = False
    """Stands for the middle of very many segments, which is not displayed."""


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
    notes: tuple[str, ...] = ()
    special_tokens: dict[str, int] = field(default_factory=dict)
    """How often each special token occurs, in order of appearance."""
    segments: tuple[ShownSegment, ...] = ()


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
        self._longest: list[_Candidate] = []
        self._first: list[_Candidate] = []
        self._drawn: list[_Candidate] = []
        self._random = random.Random(0)  # the same file shows the same rows
        self._named = [_line_named(text) for text in asked.lines]
        self._found: dict[int, list[tuple[str, _Candidate]]] = {}

    def add(self, row: Row, segments: list[Segment], tokens: int) -> None:
        """Offer the next good training row with its segments and token count."""
        candidate = _Candidate(row, segments, self._seen, tokens)
        self._seen += 1
        self._first = self._first or [candidate]
        if not self._longest or tokens > self._longest[0].tokens:
            self._longest = [candidate]
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
            # The path of the file, or the end of it.
            end = PurePath(file.replace("\\", "/")).parts
            same = row.file == file or PurePath(row.file).parts[-len(end) :] == end
            if abs(row.line) == line and (same if file else split == "train"):
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
        """The longest row, the first and random ones, up to the count asked for, in order."""
        chosen: dict[int, tuple[_Candidate, list[str]]] = {}
        kinds = {LONGEST: self._longest, FIRST: self._first, DRAWN: self._drawn}
        for because, rows in kinds.items():
            for one in rows:
                if one.number in chosen and because != DRAWN:
                    chosen[one.number][1].insert(0, because)
                elif len(chosen) < self.asked.count:
                    chosen.setdefault(one.number, (one, [because]))
        for _, (one, reasons) in sorted(chosen.items(), key=lambda each: each[0]):
            yield one, " and ".join(reasons)


def _line_named(text: str) -> tuple[str, int]:
    """Parse `17`, `train.jsonl:17` or `rows.json: row 17`, the forms used in messages."""
    file, _, line = text.rpartition(":")
    line = line.strip().removeprefix("row").strip()
    if not line.isdecimal() or not int(line):
        raise RowNotFound(
            f"--row {text}: not a row  (give its line, as 17, or file and line, as train.jsonl:17)"
        )
    return file.strip(), int(line)


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
    if not line.has_tokenizer:
        room = None if most_tokens is None else 4 * most_tokens // max(1, len(made))
        model = line.plan.model
        note = f"the tokenizer of {model.name} is not on this machine: text, no tokens"
        if (model.prompt_template or "tokenizer") == "tokenizer":
            note += "; written as ChatML, since the model's own template is not known either"
        return ShownRow(place, split, because, notes=(note,), segments=_as_text(made, room))
    encoder = line.encoder
    store = FlatDocuments([shard_of(encoder.encode([made]))])
    index = _index(line, store, split)
    seen = _seen_tokens(store, index)
    lost, special = seen.piece < 0, encoder.special_ids
    because_lost = f"cut at max_seq_length {line.plan.data.max_seq_length}"
    if not line.is_text:
        because_lost = "after the last whole block of this epoch"
    return ShownRow(
        place,
        split,
        because,
        tokens=len(seen.ids),
        trained_tokens=int(seen.trained.sum()),
        lost_tokens=int(lost.sum()),
        lost_answer_tokens=int((lost & seen.answer).sum()),
        lost_because=because_lost if lost.any() else "",
        pieces=len(index.piece_start),
        left_out=_left_out(line, index, seen),
        notes=tuple(_notes(line, index, split)),
        special_tokens=dict(Counter(special[id] for id in seen.ids.tolist() if id in special)),
        segments=_shown_segments(seen, encoder, most_tokens),
    )


def _index(line: DataPipeline, store: FlatDocuments, split: str) -> PackIndex:
    """How the run would pack this row alone."""
    plan = line.plan
    rows = rows_to_pack(plan, store, np.arange(1), is_text=line.is_text)
    length = plan.data.max_seq_length
    if line.is_text and plan.data.packing == "concat":
        # Among other rows it is cut wherever a sequence ends; alone it is shown whole.
        length = max(length, int(store.lengths[0]) + plan.soft_tokens)
    packing = Packing(1, length, None)
    return packed(plan, split, rows, plan.optim.seed, packing, is_text=line.is_text)


def _left_out(line: DataPipeline, index: PackIndex, seen: SeenTokens) -> str:
    if index.bins:
        return ""
    limit = f"max_seq_length {line.plan.data.max_seq_length}"
    if index.overlong.dropped:
        return f"{len(seen.ids):,} tokens, longer than {limit}, and overlong: drop leaves it out"
    if not seen.answer.any():
        return "no token of it is trained on"
    return f"the answer starts after {limit}"


def _notes(line: DataPipeline, index: PackIndex, split: str) -> Iterator[str]:
    soft, length = line.plan.soft_tokens, line.plan.data.max_seq_length
    if soft:
        yield f"{counted(soft, 'token')} of soft prompts come before it"
    if not line.is_text and split == "train" and index.bins > 1:
        yield f"cut into blocks of {length} characters, in each epoch elsewhere"
    if line.is_text and line.plan.data.packing == "concat":
        yield f"packing: concat may cut it anywhere: sequences of {length} tokens hold rows on end"


@dataclass(frozen=True, eq=False)
class SeenTokens:
    """A document and what training does with each of its tokens."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    """The token is the label of the place before it."""
    answer: NDArray[np.bool_]
    """The token is marked for training, even if it is cut off."""
    piece: NDArray[np.int32]
    """The part that contains the token; -1: lost."""


def _seen_tokens(store: FlatDocuments, index: PackIndex) -> SeenTokens:
    """The only document of a store, from the batches of its index."""
    size = int(store.lengths[0])
    trained, answer = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    piece = np.full(size, -1, np.int32)
    for start, stop in store.spans(0):
        answer[start:stop] = True
    ids = np.array(store.tokens(0))
    order = np.argsort(index.piece_start, kind="stable")
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    together = max(1, min(BINS_TOGETHER, index.bins))
    out = BatchArrays.allocate(BatchShape.for_index(index, together))
    for first_bin in range(0, index.bins, together):
        bins = range(first_bin, min(index.bins, first_bin + together))
        fill_batch(out, index, bins, store)
        for at, place in _places(index, bins, out.shape.length):
            first, last = int(index.piece_start[at]), int(index.piece_stop[at])
            end = place + last - first
            # Show what the batch holds, even if it differed from what was tokenised.
            ids[first:last] = out.tokens[place:end]
            trained[first + 1 : last] = out.labels[place : end - 1] != IGNORED
            piece[first:last] = number[at]
    return SeenTokens(ids, trained, answer, piece)


def _places(index: PackIndex, bins: range, row: int) -> Iterator[tuple[int, int]]:
    """The pieces of bins in a batch with one bin per row, and where each begins."""
    for number, bin_number in enumerate(bins):
        place = number * row
        for at in range(int(index.bin_offsets[bin_number]), int(index.bin_offsets[bin_number + 1])):
            place += index.soft_tokens
            yield at, place
            place += int(index.piece_stop[at] - index.piece_start[at])


def _shown_segments(
    seen: SeenTokens, encoder: Encoder, most_tokens: int | None
) -> tuple[ShownSegment, ...]:
    """The segments of a document as text; long ones without their middle."""
    is_special = np.isin(seen.ids, np.asarray(list(encoder.special_ids), np.int64))
    # Every special token is a segment of its own, even next to another.
    state = seen.piece.astype(np.int64) * 4 + seen.trained * 2 + is_special
    changes = np.flatnonzero((np.diff(state) != 0) | is_special[1:]) + 1
    edges = [0, *changes.tolist(), len(state)] if len(state) else [0]
    stretches = list(pairwise(edges))
    middle = range(0)
    room = None
    if most_tokens is not None and len(state) > most_tokens:
        middle = range(MAX_SEGMENTS // 2, len(stretches) - MAX_SEGMENTS // 2)
        room = max(MIN_SHOWN_TOKENS, most_tokens // (len(stretches) - len(middle)))
    segments: list[ShownSegment] = []
    for number, (start, stop) in enumerate(stretches):
        if number in middle:
            if number == middle[0]:
                hidden = stretches[middle[-1]][1] - start
                segments.append(ShownSegment("", False, hidden, not_shown=hidden, is_gap=True))
            continue
        after, hidden = "", 0
        if room is None or stop - start <= room:
            text = _decoded(seen.ids, start, stop, encoder)
        else:
            head, tail = start + room // 2, stop - room // 2
            hidden = tail - head
            # A cut within a character leaves half of it.
            text = _decoded(seen.ids, start, head, encoder).rstrip(_REPLACEMENT_CHARACTER)
            after = _decoded(seen.ids, tail, stop, encoder).lstrip(_REPLACEMENT_CHARACTER)
        segments.append(
            ShownSegment(
                text=text,
                trained=bool(seen.trained[start]),
                tokens=stop - start,
                seen=bool(seen.piece[start] >= 0),
                piece=max(0, int(seen.piece[start])),
                special=bool(is_special[start]),
                not_shown=hidden,
                after=after,
            )
        )
    return tuple(segments)


def _as_text(segments: Sequence[Segment], most: int | None) -> tuple[ShownSegment, ...]:
    """Segments without a tokenizer: their text, and whether they are trained on."""
    shown = []
    for segment in segments:
        text, hidden, after = segment.text, 0, ""
        if most is not None and len(text) > most:
            hidden = len(text) - most
            text, after = text[: most // 2], text[most // 2 + hidden :]
        shown.append(ShownSegment(text, segment.learn, None, not_shown=hidden, after=after))
    return tuple(shown)


def _decoded(ids: NDArray[np.int32], start: int, stop: int, encoder: Encoder) -> str:
    before = max(0, start - CONTEXT_TOKENS)
    lead = encoder.decode(ids[before:start].tolist()) if before < start else ""
    whole = encoder.decode(ids[before:stop].tolist())
    if whole.startswith(lead):
        return whole[len(lead) :]
    return encoder.decode(ids[start:stop].tolist())
