"""Rows that are already tokenised (`input_ids`, `attention_mask`, `labels`), as saved by other
tools.

They are checked against the model's tokenizer and written once as prepared documents, without
padding, so that they are packed like any others. Their folder is never written to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from expert.core.text import counted
from expert.data.read.sources import Source, first_row, iterate
from expert.data.records import BadRow, DataError, Dropped, Row, RowError, TokenSegment
from expert.data.tokens.encoder import TextEncoder

FORMAT = 1
IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"
SPANS = "answer_spans"
"""As in prepared folders: pairs (start, stop) of tokens to train on."""
# Other masks with 1 for each token to train on; TRL writes the first two.
TRAINED_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
NOT_TRAINED = -100
"""The label of a token that is not trained on, as in torch's losses."""
SAMPLED_ROWS = 64
SAMPLED_TOKENS = 512
# Share of ids that are the same after decoding and encoding: 1.000 with the tokenizer that made
# them, at most 0.89 with another (three tokenizers of 4,096 to 151,669 tokens on JSON, SQL and
# Alpaca rows).
SAME_TOKENIZER_FROM = 0.93
SHOWN_CHARACTERS = 300
PACKED_FROM, PACKED_SHARE = 256, 0.8
"""Tokens of rows that may be packed, and the share of them that is full if they are."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenRows:
    """The rows of one source of tokens: which columns hold them, and the padding of the model."""

    source: Source
    mask: str = ""
    trained: str = ""
    """`labels`, or a mask of what is trained on; "": everything but padding."""
    ignored: tuple[str, ...] = ()
    """Columns that are not read."""
    is_text: bool = True
    """Whether the whole first row is trained on: a text, not a prompt and an answer."""
    pad: int | None = None
    eos: int | None = None

    @property
    def used(self) -> tuple[str, ...]:
        return tuple(name for name in (IDS, self.mask, self.trained) if name)

    def __str__(self) -> str:
        """Everything that decides how rows are read; part of the cache key."""
        kind = "text" if self.is_text else "labels"
        return f"Tokens(kind={kind!r}, used={self.used!r}, read={FORMAT})"

    def segments_of(self, row: Row) -> list[TokenSegment] | BadRow | Dropped:
        """The tokens of a row without padding, in segments that are trained on or not."""
        try:
            ids, kept = self._ids_of(row.values)
            trained = self._trained(row.values, ids, kept)
        except RowError as fault:
            return BadRow(row.file, row.line, str(fault), repr(dict(row.values))[:200])
        tokens, trained = ids[kept].astype(np.int32), trained[kept]
        if not len(tokens):
            return Dropped("only padding")
        edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
        return [
            TokenSegment("", bool(trained[start]), tokens[start:stop])
            for start, stop in pairwise(edges)
        ]

    def _ids_of(self, values: Mapping[str, Any]) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        ids = _numbers(values, IDS)
        if len(ids) and ids.min() < 0:
            raise RowError(f"{IDS} holds {int(ids.min())}, which is not a token")
        if not self.mask:
            return ids, self._without_pads(ids)
        mask = _numbers(values, self.mask)
        _same_length(ids, mask, self.mask)
        if len(mask) and not np.isin(mask, (0, 1)).all():
            what = f"{MASK} holds {int(mask.max())}: only 0 (padding) and 1 are read"
            raise RowError(f"{what}; rows of several documents are to be saved one document a row")
        return ids, mask == 1

    def _without_pads(self, ids: Numbers) -> npt.NDArray[np.bool_]:
        """Without a mask, pad tokens at both ends are padding. One is kept at the end if it is the
        eos."""
        pad = self.pad
        kept = np.ones(len(ids), np.bool_)
        if pad is None or not len(ids) or not (ids == pad).any():
            return kept
        others = np.flatnonzero(ids != pad)
        first, last = (int(others[0]), int(others[-1])) if len(others) else (len(ids), -1)
        kept[:first] = False
        kept[last + 1 + (pad == self.eos and last + 1 < len(ids)) :] = False
        return kept

    def _trained(
        self, values: Mapping[str, Any], ids: Numbers, kept: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        name = self.trained
        if not name:
            return np.ones(len(ids), np.bool_)
        labels = _numbers(values, name)
        if name == SPANS:
            trained = np.zeros(len(ids), np.bool_)
            if len(labels) % 2 or (
                len(labels) and not 0 <= labels.min() <= labels.max() <= len(ids)
            ):
                raise RowError(f"{SPANS} are not pairs of places in the row")
            for start, stop in labels.reshape(-1, 2):
                trained[start:stop] = True
            return trained
        _same_length(ids, labels, name)
        if name != LABELS:
            return np.not_equal(labels, 0)
        trained = np.not_equal(labels, NOT_TRAINED)
        used = trained & kept
        if (labels[used] != ids[used]).any():
            what = f"{LABELS} differ from {IDS} where they are not {NOT_TRAINED}"
            raise RowError(f"{what}; they must not be shifted: the trainer does that")
        return trained


def token_rows_in(source: Source, encoder: TextEncoder | None = None) -> TokenRows | None:
    """The token rows of a source, by its first row; None if it has none, or no rows."""
    try:
        row = first_row(source)
    except DataError:
        return None
    names = list(row.values)
    if IDS not in names:
        return None
    trained = next((name for name in (LABELS, SPANS, *TRAINED_MASKS) if name in names), "")
    mask = MASK if MASK in names else ""
    ignored = tuple(name for name in names if name not in (IDS, mask, trained))
    segments = TokenRows(source, mask, trained).segments_of(row)
    is_text = not isinstance(segments, list) or all(segment.learn for segment in segments)
    pad, eos = (encoder.pad_id, encoder.eos_id) if encoder else (None, None)
    return TokenRows(source, mask, trained, ignored, is_text, pad, eos)


def _numbers(values: Mapping[str, Any], name: str) -> Numbers:
    value = values.get(name)
    if not isinstance(value, list | tuple):
        what = "is null" if value is None else "is not a list of numbers"
        raise RowError(f"column {name!r} {what}")
    if not value:
        return np.zeros(0, np.int64)
    numbers = np.asarray(value) if all(type(each) in (int, bool) for each in value) else None
    if numbers is None or numbers.dtype.kind not in "ib":
        raise RowError(f"column {name!r} is not a list of whole numbers")
    return numbers.astype(np.int64)


def _same_length(ids: Numbers, other: Numbers, name: str) -> None:
    if len(ids) != len(other):
        raise RowError(f"{name} has {len(other)} places and {IDS} {len(ids)}")


@dataclass
class TokenCheck:
    """What was found in rows of tokens."""

    name: str
    rows: int = 0
    bad_rows: int = 0
    first_bad: str = ""
    tokens: int = 0
    padding: int = 0
    trained_tokens: int = 0
    longest: int = 0
    largest_id: int = -1
    beyond: int = 0
    """Rows with an id beyond the vocabulary."""
    vocabulary: int = 0
    same_again: float | None = None
    """Share of the sampled ids that are the same when their text is tokenised again."""
    ended: int = 0
    """Rows that end with a special token."""
    full: int = 0
    """Rows as long as the longest that have such a token before their end."""
    eos: str = ""
    used: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    sample: str = ""
    """The beginning of the first row as text."""

    def mismatches(self, max_bad_rows: int) -> list[str]:
        """Why these tokens do not fit this model; empty if they may be used."""
        reasons = []
        if self.bad_rows > max_bad_rows:
            reasons.append(f"{counted(self.bad_rows, 'row')} cannot be used: {self.first_bad}")
        if self.beyond:
            ids = f"ids (up to {self.largest_id:,}) beyond the tokenizer's {self.vocabulary:,}"
            reasons.append(f"{counted(self.beyond, 'row')} with {ids}: another tokenizer made them")
        elif self.same_again is not None and self.same_again < SAME_TOKENIZER_FROM:
            reasons.append(
                f"only {self.same_again:.0%} of the ids are the same when their text is tokenised "
                f"again: another tokenizer made them (as text they begin {self.sample[:80]!r})"
            )
        if not reasons and not self.trained_tokens:
            reasons.append("there is no token to train on")
        return reasons

    def doubts(self) -> list[str]:
        found = []
        if self.longest >= PACKED_FROM and self.full > PACKED_SHARE * max(2, self.rows):
            rows = f"{self.full:,} of {counted(self.rows, 'row')} have {self.longest:,} tokens"
            found.append(
                f"{self.name}: {rows} and seem to be packed: each counts as one row of a step, so "
                "that an epoch has fewer, larger steps  (save one example a row; or divide the "
                "rows of a step by the examples in a row)"
            )
        if self.eos and not self.ended:
            what = f"no row ends with {self.eos} or another special token"
            text = "the model would not learn to stop  (add it to each row when tokenising)"
            found.append(f"{self.name}: {what}: {text}")
        return found

    def notes(self) -> list[str]:
        """What was checked, in words."""
        again = "" if self.same_again is None else f", {self.same_again:.1%} of a sample of"
        again += " the ids are the same when their text is tokenised again" if again else ""
        ignored = f"; not used: {', '.join(self.ignored)}" if self.ignored else ""
        return [
            f"{self.name}: tokens made elsewhere, {counted(self.rows, 'row')} of at most "
            f"{self.longest:,} tokens, {self.padding:,} places of padding removed; "
            f"{self.trained_tokens / max(1, self.tokens):.1%} of the tokens are trained on; "
            f"columns: {', '.join(self.used)}{ignored}",
            f"{self.name}: checked: no id beyond {self.largest_id:,} of {self.vocabulary:,}{again};"
            " the exact tokenizer and the prompt template cannot be checked",
            f"{self.name}: the first row begins: {self.sample!r}",
        ]


def check_tokens(rows: TokenRows, encoder: TextEncoder) -> dict[str, Any]:
    """The fields of the check of token rows; reads all of them."""
    check = TokenCheck(
        rows.source.name,
        vocabulary=1 + max(encoder.tokenizer.get_vocab(with_added_tokens=True).values()),
        used=rows.used,
        ignored=rows.ignored,
        eos=encoder.special.eos,
    )
    ends = np.array([*encoder.tokenizer.get_added_tokens_decoder(), encoder.eos_id or 0])
    sampled: list[Sequence[TokenSegment]] = []
    apart = 1  # an even sample of rows whose number is not known: the interval doubles
    for row in iterate(rows.source):
        segments = row if isinstance(row, BadRow) else rows.segments_of(row)
        check.rows += 1
        if isinstance(segments, BadRow):
            check.bad_rows += 1
            check.first_bad = check.first_bad or str(segments)
        elif isinstance(segments, list) and isinstance(row, Row):
            ids = np.concatenate([part.ids for part in segments])
            largest = int(ids.max())
            check.tokens += len(ids)
            check.padding += len(row.values[IDS]) - len(ids)
            if len(ids) > check.longest:
                check.longest, check.full = len(ids), 0
            if len(ids) == check.longest:
                check.full += bool(np.isin(ids[:-2], ends).any())
            check.trained_tokens += sum(len(part.ids) for part in segments if part.learn)
            check.largest_id = max(check.largest_id, largest)
            check.beyond += largest >= check.vocabulary
            # Templates end a turn with a token and a line break.
            check.ended += bool(np.isin(segments[-1].ids[-2:], ends).any())
            if (check.rows - 1) % apart == 0:
                sampled.append(segments)
            if len(sampled) >= 2 * SAMPLED_ROWS:
                sampled, apart = sampled[::2], 2 * apart
    if sampled:
        first = np.concatenate([part.ids for part in sampled[0]])
        in_range = first[first < check.vocabulary][:SAMPLED_TOKENS].tolist()
        check.sample = encoder.decode(in_range)[:SHOWN_CHARACTERS]
        check.same_again = None if check.beyond else _reencoded_share(sampled, encoder)
    return asdict(check)


def _reencoded_share(rows: Sequence[Sequence[TokenSegment]], encoder: TextEncoder) -> float | None:
    """Share of ids that are the same when their text is tokenised again. Segments are checked one
    by one, since prompt and answer are often tokenised separately."""
    same = count = 0
    for row in rows:
        for part in row:
            ids = part.ids[:SAMPLED_TOKENS].tolist()
            again = encoder.tokenizer.encode(encoder.decode(ids), add_special_tokens=False).ids
            same += sum((Counter(ids) & Counter(again)).values())
            count += max(len(ids), len(again))
    return same / count if count else None
