"""Checks over all examples: duplicates, overlap between splits, leftovers of templates.

Each example is stored as three keys, its file and line, and its token counts: 44 bytes, whatever
its length.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from expert.core.text import counted
from expert.data.examples.text_warnings import TextWarnings
from expert.data.records import BadRow, Example, Row, place_of
from expert.data.tokens.encoder import EncodedBatch
from expert.data.tokens.row_keys import RowKeys, keys_of_batch
from expert.data.tokens.statistics import percentiles

SHOWN_ROWS = 20
SHOWN_KINDS = 20
SHOWN_PAIRS = 5

# How an example occurs in another split, worst first.
SAME = "same prompt and answer"
NEARLY = "same request and answer; system text, case or spacing differ"
SAME_PROMPT = "same prompt, another answer"
LEAKS = {SAME: "whole", NEARLY: "near", SAME_PROMPT: "prompt"}

# Numbers and quoted values: "turn 3", "unknown role 'narrator'".
_DIFFERS = re.compile(r"0x[0-9a-f]+|[0-9][0-9.,]*|'[^']*'")

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int32]


def near_key(example: Example) -> int:
    """A key that nearly equal examples share: ignores the system text, case and spacing."""
    turns = [("", example.text), *((turn.role, turn.text) for turn in example.turns)]
    said = [(role, " ".join(text.split()).casefold()) for role, text in turns if role != "system"]
    # Include lengths: ["ab", "c"] and ["a", "bc"] are different examples.
    text = "".join(f"{role}\0{len(part)}\0{part}" for role, part in said)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def learnt_tokens(batch: EncodedBatch, first: int | None = None) -> Numbers:
    """Tokens trained on in every document; with `first`, only among its first tokens, excluding a
    document's very first token, which nothing predicts."""
    spans = batch.spans.reshape(-1, 2)
    if first is not None:
        spans = np.clip(spans, 1, max(1, first))
    owners = np.repeat(np.arange(len(batch.lengths)), batch.span_counts // 2)
    sums = np.bincount(owners, weights=spans[:, 1] - spans[:, 0], minlength=len(batch.lengths))
    return sums.astype(np.int32)


@dataclass(frozen=True)
class ExampleTable:
    """The examples of a split as columns."""

    files: dict[str, int]
    """The number of each file; shared by all parts of a split."""
    whole: Keys
    near: Keys
    prompt: Keys
    file: Numbers
    line: Numbers
    length: Numbers
    trained: Numbers
    """Tokens that are trained on."""
    kept: Numbers
    """Those left if overlong rows are cut."""

    def __len__(self) -> int:
        return len(self.length)

    @property
    def keys(self) -> RowKeys:
        return RowKeys(self.prompt, self.whole)

    def place(self, number: int) -> str:
        return place_of(list(self.files)[self.file[number]], int(self.line[number]))

    def take(self, numbers: npt.NDArray[np.integer[Any]]) -> ExampleTable:
        return replace(self, **{name: getattr(self, name)[numbers] for name in COLUMNS})


COLUMNS = tuple(each.name for each in fields(ExampleTable) if each.name != "files")


def table_of(
    rows: Sequence[Row],
    near: Sequence[int],
    batch: EncodedBatch,
    files: dict[str, int],
    room: int | None = None,
) -> ExampleTable:
    """The examples of some rows as encoded; `files` is added to. `near`: their near keys, 0 for
    tokens without text; `room`: where rows are cut."""
    keys, trained = keys_of_batch(batch), learnt_tokens(batch)
    of_file = [files.setdefault(row.file, len(files)) for row in rows]
    longest = int(batch.lengths.max(initial=0))
    kept = learnt_tokens(batch, longest if room is None else room)
    numbers = (of_file, [row.line for row in rows], batch.lengths, trained, kept)
    columns = (np.asarray(each, np.int32) for each in numbers)
    almost = np.array(near, np.uint64)
    almost = np.where(almost == 0, keys.whole, almost)
    return ExampleTable(files, keys.whole, almost, keys.prompt, *columns)


def joined_tables(parts: Sequence[ExampleTable]) -> ExampleTable:
    """All examples of several parts, of which there is at least one."""
    columns = (np.concatenate([getattr(each, name) for each in parts]) for name in COLUMNS)
    return ExampleTable(parts[0].files, *columns)


@dataclass(frozen=True)
class Pairs:
    """How many examples occur twice, and where the first few are."""

    count: int
    shown: tuple[tuple[str, str], ...]
    """(the example, what it repeats), as file:line."""


def duplicates(examples: ExampleTable) -> Pairs:
    """Examples that occurred before in the same split."""
    first = _first_places(examples.whole, examples.whole)
    repeats = np.flatnonzero(first != np.arange(len(first)))
    shown = [(examples.place(n), examples.place(int(first[n]))) for n in repeats[:SHOWN_PAIRS]]
    return Pairs(len(repeats), tuple(shown))


def leaks(train: ExampleTable, other: ExampleTable) -> dict[str, Pairs]:
    """Examples of another split that are also trained on, each once under its worst kind."""
    pairs = {}
    left = np.ones(len(other), np.bool_)
    for kind, column in LEAKS.items():
        first = _first_places(getattr(train, column), getattr(other, column))
        hit = left & (first >= 0)
        numbers = np.flatnonzero(hit)
        shown = [(other.place(n), train.place(int(first[n]))) for n in numbers[:SHOWN_PAIRS]]
        pairs[kind] = Pairs(len(numbers), tuple(shown))
        left &= ~hit
    return pairs


def _first_places(known: Keys, asked: Keys) -> npt.NDArray[np.int64]:
    """The first position of each key among the known ones; -1 if missing."""
    if not len(known):
        return np.full(len(asked), -1, np.int64)
    order = np.argsort(known, kind="stable")
    at = np.minimum(np.searchsorted(known, asked, sorter=order), len(known) - 1)
    places = order[at]
    return np.where(known[places] == asked, places, -1)


def length_summary(
    examples: ExampleTable, room: int | None, overlong: str = "cut"
) -> dict[str, Any]:
    """Counts of examples and tokens, the share trained on, percentiles, the share longer than
    `room`, and what those lose."""
    lengths = examples.length
    tokens, trained = (int(n.sum(dtype=np.int64)) for n in (lengths, examples.trained))
    longer = lengths > room if room is not None else np.zeros(len(lengths), np.bool_)
    over = None if room is None else int(longer.sum())
    beyond = lengths[longer].astype(np.int64) - (room or 0 if overlong == "cut" else 0)
    stays = ~longer if overlong == "drop" else np.ones(len(lengths), np.bool_)
    unlearnt = int((stays & (examples.kept == 0)).sum())
    return {
        "examples": len(examples),
        "tokens": tokens,
        "learnt_tokens": trained,
        "learnt_share": trained / tokens if tokens else 0.0,
        **dict(zip(("p50", "p90", "p95", "p99"), percentiles(lengths), strict=True)),
        "longest": int(lengths.max(initial=0)),
        "over_long": over,
        "over_long_share": over / max(1, len(examples)) if over is not None else None,
        "tokens_lost": int(beyond.sum()) if overlong != "split" else 0,
        "unlearnt": unlearnt,
        "left": int(stays.sum()) - unlearnt,
    }


@dataclass
class SplitReport:
    """The counts and findings of a split."""

    name: str
    rows: int = 0
    bad_rows: int = 0
    kinds_of_bad_rows: dict[str, list[str]] = field(default_factory=dict)
    """The first bad rows by reason, with the parts that vary between rows removed."""
    dropped: dict[str, int] = field(default_factory=dict)
    texts: TextWarnings = field(default_factory=TextWarnings)
    lengths: dict[str, Any] = field(default_factory=dict)
    duplicates: Pairs | None = None
    leaks: dict[str, Pairs] = field(default_factory=dict)
    not_learnt: str = ""
    """A warning about examples without anything to train on; "" if there are none."""
    split_off: bool = False
    """Drawn from the training rows, so its rows were counted there."""

    def note_bad(self, bad: BadRow) -> None:
        self.bad_rows += 1
        same = self.kinds_of_bad_rows.setdefault(_DIFFERS.sub("…", bad.reason), [])
        if len(same) < SHOWN_ROWS:
            same.append(str(bad))

    def bad_row_lines(self) -> list[str]:
        """Bad rows for display: the first rows of every kind, the most frequent kind first."""
        kinds = sorted(self.kinds_of_bad_rows.values(), key=len, reverse=True)[:SHOWN_KINDS]
        lines = [line for same in kinds for line in same[: max(1, SHOWN_ROWS // len(kinds))]]
        rest = self.bad_rows - len(lines)
        return [*lines, *([f"… and {rest:,} more"] if rest else [])]

    def warnings(self) -> list[str]:
        """Warnings; lines that begin with spaces belong to the line before."""
        warnings = self.texts.lines(self.name)
        repeats = {"earlier in the split": self.duplicates}
        repeats |= {f"in train ({kind})": pairs for kind, pairs in self.leaks.items()}
        for where, pairs in repeats.items():
            if pairs is not None and pairs.count:
                warnings.append(f"{self.name}: {counted(pairs.count, 'example')} also {where}")
                warnings += [f"  {place} repeats {known}" for place, known in pairs.shown]
        lost = self.lengths.get("tokens_lost")
        if lost:
            over, share = self.lengths["over_long"], lost / self.lengths["tokens"]
            what = f"{counted(over, 'example')} longer than max_seq_length: {lost:,} tokens"
            warnings.append(f"{self.name}: {what} ({share:.1%}) are lost")
        return [*warnings, *([self.not_learnt] if self.not_learnt else [])]
