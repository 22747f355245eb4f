"""Rows as the model sees them, for `dataset check` and `train --dry-run`: which, and how.

A row is formatted, tokenised, cut and laid into a batch by the functions that training uses, with
the run's own plan; what is shown is read back from that batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.data.pack.packing import packed, rows_to_pack, soft_tokens

if TYPE_CHECKING:
    from expert.data.inspect.shown_rows import SeenTokens, ShownRow
    from expert.data.line import Line
    from expert.data.pack.pack_index import PackIndex
    from expert.data.records import BadRow, Dropped, Row, Segment
    from expert.data.tokens.documents import FlatDocuments
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened

DEFAULT_ROWS = 3
SCREEN_TOKENS = 400
"""About as many tokens of a row are shown: a screen full."""
JSON_TOKENS = 20_000
"""Of a row in JSON: a row may be a text of a hundred megabytes."""
FIRST, LONGEST, DRAWN, ASKED = "the first", "the longest", "drawn", "asked for"


class NoSuchRow(ExpertError):
    """A row that was asked for and is not in the files."""


@dataclass(frozen=True)
class RowsToShow:
    """What was asked for: so many rows, and those at these lines (`17` or `train.jsonl:17`)."""

    count: int = DEFAULT_ROWS
    lines: tuple[str, ...] = ()
    most_tokens: int | None = SCREEN_TOKENS
    """About as many tokens of each; None: all."""


@dataclass
class _Candidate:
    row: Row
    segments: Sequence[Segment]
    number: int
    """Of the document among those of its split."""
    tokens: int = 0


class RowPicker:
    """Sees every row of a check once, and keeps those that will be shown."""

    def __init__(self, asked: RowsToShow) -> None:
        self.asked = asked
        self._seen = self._good = 0
        self._first: _Candidate | None = None
        self._longest: _Candidate | None = None
        self._drawn: list[_Candidate] = []
        self._chance = random.Random(0)  # the same file shows the same rows
        self._named = [_line_named(text) for text in asked.lines]
        self._found: dict[int, list[tuple[str, _Candidate | BadRow | tuple[Row, Dropped]]]] = {}

    def add(self, rows: Sequence[Row], documents: Sequence[Any], lengths: Sequence[int]) -> None:
        """Good training rows with their segments and their tokens, in the order of the files."""
        for row, segments, tokens in zip(rows, documents, lengths, strict=True):
            self._offer(_Candidate(row, segments, self._seen, int(tokens)))
            self._seen += 1

    def _offer(self, one: _Candidate) -> None:
        if self.asked.count <= 0:
            return
        self._first = self._first or one
        if self._longest is None or one.tokens > self._longest.tokens:
            self._longest = one
        # One in so many that were seen stays: each row is as likely as any other.
        if len(self._drawn) < self.asked.count:
            self._drawn.append(one)
        else:
            place = self._chance.randrange(self._seen + 1)
            if place < len(self._drawn):
                self._drawn[place] = one

    def look_at(self, split: str, row: Row | BadRow, made: Any) -> None:
        """Any row of any split, to find those that were asked for by their line."""
        from expert.data.records import BadRow, Dropped

        good = split == "train" and isinstance(made, list)
        self._good += good
        for number, (file, line) in enumerate(self._named):
            if abs(row.line) != line or (file and not _same_file(row.file, file)):
                continue
            if not file and split != "train":
                continue
            held: Any = made
            if isinstance(made, Dropped):
                held = (row, made)
            elif not isinstance(row, BadRow) and not isinstance(made, BadRow):
                held = _Candidate(row, made, self._good - 1 if good else -1)
            self._found.setdefault(number, []).append((split, held))

    def refuse_missing(self) -> None:
        """All lines that were asked for and are in no file."""
        missing = [text for n, text in enumerate(self.asked.lines) if n not in self._found]
        if missing:
            where = "a bare number is a line of the training files; FILE:LINE one of any file"
            told = [f"--row {text}: there is no such row" for text in missing]
            raise NoSuchRow("\n".join([*told, f"  ({where})"]))

    def shown(self, line: Line, held_out: Sequence[int] = ()) -> list[ShownRow]:
        """The rows, asked for first; `held_out`: documents that validation was drawn from."""
        validation = set(held_out)
        named = [
            self._named_row(line, split, held, validation)
            for number in sorted(self._found)
            for split, held in self._found[number]
        ]
        return [
            *named,
            *(
                show_row(
                    line,
                    one.row.place,
                    one.segments,
                    split="validation" if one.number in validation else "train",
                    because=because,
                    most_tokens=self.asked.most_tokens,
                )
                for one, because in self._chosen()
            ),
        ]

    def _named_row(self, line: Line, split: str, held: Any, validation: set[int]) -> ShownRow:
        from expert.data.inspect.shown_rows import ShownRow
        from expert.data.records import BadRow

        if isinstance(held, BadRow):
            text = f"a bad row: {held.reason}"
            place = str(held).removesuffix(f": {held.reason}")
            return ShownRow(place, split, ASKED, left_out=text)
        if isinstance(held, tuple):
            row, dropped = held
            return ShownRow(row.place, split, ASKED, left_out=dropped.reason)
        return show_row(
            line,
            held.row.place,
            held.segments,
            split="validation" if held.number in validation else split,
            because=ASKED,
            most_tokens=self.asked.most_tokens,
        )

    def _chosen(self) -> Iterator[tuple[_Candidate, str]]:
        if self._first is None or self._longest is None:
            return
        ends = {self._longest.number} if self.asked.count == 1 else set()
        ends = ends or {self._first.number, self._longest.number}
        others = [one for one in self._drawn if one.number not in ends]
        room = self.asked.count - len(ends)
        chosen = sorted(others[: max(0, room)], key=lambda one: one.number)
        if self._first.number in ends and self._first is not self._longest:
            yield self._first, FIRST
        yield from ((one, DRAWN) for one in chosen)
        both = self._first is self._longest and self._seen > 1
        yield self._longest, f"{FIRST} and {LONGEST}" if both else LONGEST


def _line_named(text: str) -> tuple[str, int]:
    """`17`, `train.jsonl:17` or `rows.json: row 17`, as messages name a row."""
    file, _, line = text.rpartition(":")
    line = line.strip().removeprefix("row").strip()
    if not line.isdecimal() or not int(line):
        raise NoSuchRow(
            f"--row {text}: is not a row  (its line, as 17, or with its file, as train.jsonl:17)"
        )
    return file.strip(), int(line)


def _same_file(file: str, named: str) -> bool:
    """Whether a file is the one that is meant: by its path, or by the end of it."""
    parts, end = PurePath(file).parts, PurePath(named.replace("\\", "/")).parts
    return file == named or parts[-len(end) :] == end


# --- one row -------------------------------------------------------------------------------------


def show_row(
    line: Line,
    place: str,
    segments: Sequence[Segment],
    *,
    split: str,
    because: str,
    most_tokens: int | None,
) -> ShownRow:
    """One good row of a run."""
    from expert.data.inspect.shown_rows import (
        ShownRow,
        seen_tokens,
        shown_segments,
        special_counts,
        text_segments,
    )
    from expert.data.tokens.documents import FlatDocuments, shard_of

    if not line.has_tokenizer:
        room = None if most_tokens is None else 4 * most_tokens // max(1, len(segments))
        return ShownRow(
            place, split, because, notes=_notes_without_tokenizer(line.plan),
            segments=text_segments(segments, most_characters=room),
        )  # fmt: skip
    encoder = line.encoder
    store = FlatDocuments([shard_of(encoder.encode([segments]))])
    index = _index(line, store, split)
    seen = seen_tokens(store, index)
    lost = seen.piece < 0
    return ShownRow(
        place,
        split,
        because,
        tokens=len(seen.ids),
        trained_tokens=int(seen.trained.sum()),
        lost_tokens=int(lost.sum()),
        lost_answer_tokens=int((lost & seen.answer).sum()),
        lost_because=_lost_because(line) if lost.any() else "",
        pieces=len(index.piece_start),
        left_out=_left_out(line.plan, index, seen),
        notes=tuple(_notes(line, index, split)),
        special_tokens=special_counts(seen.ids, encoder.special_ids),
        segments=shown_segments(
            seen, encoder, tuple(encoder.special_ids), most_tokens=most_tokens
        ),
    )  # fmt: skip


def _index(line: Line, store: FlatDocuments, split: str) -> PackIndex:
    """How this row alone is laid into sequences by the rule of the run."""
    import numpy as np

    from expert.planning.choose.sequences import Packing

    plan, is_text = line.plan, line.template is not None
    rows = rows_to_pack(plan, store, np.arange(1), is_text=is_text)
    length = plan.data.max_seq_length
    if is_text and plan.data.packing == "concat":
        # Among other rows it is cut where a sequence ends by chance; alone it is shown whole.
        length = max(length, int(store.lengths[0]) + soft_tokens(plan))
    packing = Packing(1, length, None)
    return packed(plan, split, rows, plan.optim.seed, packing, is_text=is_text)


def _lost_because(line: Line) -> str:
    if line.template is None:
        return "behind the last whole block of this epoch"
    return f"cut at max_seq_length {line.plan.data.max_seq_length}"


def _left_out(plan: RunPlan, index: PackIndex, seen: SeenTokens) -> str:
    if index.bins:
        return ""
    limit = f"max_seq_length {plan.data.max_seq_length}"
    if index.overlong.dropped:
        return f"{len(seen.ids):,} tokens, longer than {limit}, and overlong: drop leaves it out"
    if not seen.answer.any():
        return "no token of it is trained on"
    return f"nothing that is trained on comes before {limit}"


def _notes(line: Line, index: PackIndex, split: str) -> Iterator[str]:
    plan = line.plan
    soft = soft_tokens(plan)
    if soft:
        yield f"{counted(soft, 'token')} of soft prompts come before it"
    if line.template is None and split == "train" and index.bins > 1:
        yield (
            f"a text is cut into blocks of {plan.data.max_seq_length} characters; shown as in the "
            "first epoch, in later ones they begin elsewhere"
        )
    if line.template is not None and plan.data.packing == "concat":
        yield (
            f"packing: concat lays rows end to end in sequences of {plan.data.max_seq_length} "
            "tokens: the end of one may cut it anywhere"
        )


# --- without a tokenizer -------------------------------------------------------------------------


def _notes_without_tokenizer(plan: RunPlan) -> tuple[str, ...]:
    told = f"the tokenizer of {plan.model.name} is not on this machine: text, no tokens"
    if (plan.model.prompt_template or "tokenizer") == "tokenizer":
        told += "; written as ChatML, since the model's own template is not known either"
    return (told,)


def rows_as_text(line: Line, asked: RowsToShow) -> list[ShownRow]:
    """Rows as a check shows them, the longest by its characters."""
    from expert.data.line import reading_of
    from expert.data.records import Row

    picker = RowPicker(asked)
    for split in ("train", "validation", "test"):
        for source in line.sources_of(split):
            for row, made in reading_of(line, source).formatted():
                picker.look_at(split, row, made)
                if split == "train" and isinstance(row, Row) and isinstance(made, list):
                    picker.add([row], [made], [sum(len(each.text) for each in made)])
    picker.refuse_missing()
    return picker.shown(line)


# --- before a run --------------------------------------------------------------------------------


def first_row_of(
    opened: Opened, *, most_tokens: int | None = SCREEN_TOKENS
) -> tuple[ShownRow | None, str]:
    """The first good training row under a plan; None with the reason where it is not here."""
    from expert.data.line import open_line, reading_of
    from expert.manifest.schema.manifest import CHAR_GPT

    plan = opened.plan
    has_tokenizer = plan.model.name == CHAR_GPT or (
        plan.model.place != "hub" and Path(plan.model.location).is_dir()
    )
    try:
        named = opened.named
        source = named.first.trains[0]
        absent = source.kind == "corpus" and not source.files and source.name != "python-stdlib"
        if source.kind == "hub" or absent:
            return None, f"the rows of {source.name} are not fetched for it"
        line = open_line(plan, opened.read, named, writes=False, has_tokenizer=has_tokenizer)
        for row, made in reading_of(line, line.sources_of("train")[0]).formatted():
            if isinstance(made, list):
                shown = show_row(
                    line,
                    row.place,  # type: ignore[union-attr]
                    made,
                    split="train",
                    because=FIRST,
                    most_tokens=most_tokens,
                )
                return shown, ""
        return None, "no row can be used"
    except (ExpertError, OSError) as error:  # whoever reads the rows next says it again
        return None, str(error)
