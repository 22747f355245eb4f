"""How long the rows of a manifest are, and the max_seq_length that cuts almost none of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.data.read.sample_rows import sample_rows
from expert.data.read.sources import Source
from expert.data.records import BadRow, Row

if TYPE_CHECKING:
    from expert.data.pipeline import DataPipeline, RowReader
    from expert.run.open import Opened

USUAL_LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Not shorter, so that rows added later have room: packing fills the rest. Not longer, since the
memory of a step grows with it; users with a larger card can set more."""
MAX_CUT_SHARE = 0.005
"""Share of the rows that may be cut: many datasets have a few far longer rows."""
SAMPLED_ROWS = 400
MAX_ROWS_READ = 200_000
"""Rows of a file without lines (.json, parquet) to sample from."""
BYTES_PER_TOKEN = 2.9
"""Estimate without a tokenizer. Measured with Qwen3's: 2.9 on SQL with its tables, 3.1 on JSON, 3.6
on Cypher, 4.2 on a handbook, 4.7 on Alpaca. The smallest of them, so that a length is too long
rather than too short."""


@dataclass(frozen=True)
class LengthCut:
    """What a length would cut, as shares of all."""

    length: int
    rows: float
    """Rows that are cut."""
    answer_tokens: float
    """Trainable tokens that are lost."""
    answers: float
    """Rows that lose all trainable tokens."""

    def words(self) -> str:
        lost = f"{_share(self.rows)} of the rows and {_share(self.answer_tokens)} of the answers"
        gone = f"; {_share(self.answers)} of the rows lose their whole answer"
        return f"{self.length}: cuts {lost}" + (gone if self.answers else "")


def _share(share: float) -> str:
    return f"{share:.0%}" if not 0 < share < 0.01 else "below 1 %"


@dataclass(frozen=True)
class LengthChoice:
    """The chosen length, why, and what it and shorter ones cut."""

    length: int
    because: str
    longest: int
    rows: int
    """Rows that were looked at."""
    estimated: bool
    """From characters: the tokenizer is not on this machine."""
    cuts: tuple[LengthCut, ...] = ()
    """The chosen length first, then shorter ones that cut more."""
    bound: str = ""
    """What kept it from being longer; "" if nothing did."""


def choose_length(opened: Opened, context: int | None) -> LengthChoice | None:
    """The smallest usual max_seq_length that cuts almost no row of a plan, within the model's
    context; None if no row can be used."""
    import numpy as np

    from expert.data.pipeline import reader_for

    line = _line(opened)
    source = line.sources_of("train")[0]
    reading = reader_for(line, source)
    segments_of = reading.formatter()
    formatted = ((segments_of(row), weight) for row, weight in _sampled_rows(source, reading))
    good = [(segments, weight) for segments, weight in formatted if isinstance(segments, list)]
    if not good:
        return None
    documents = [segments for segments, _ in good]
    weights = np.asarray([weight for _, weight in good], np.float64)
    if line.has_tokenizer:
        batch = line.encoder.encode(documents)
        owners = np.repeat(np.arange(len(documents)), batch.span_counts // 2)
        lengths, spans = batch.lengths.astype(np.int64), batch.spans.astype(np.int64).reshape(-1, 2)
    else:
        lengths, spans, owners = _estimated(documents)

    def cut_by(length: int) -> LengthCut:
        # The first token is never a label: nothing precedes it.
        kept = np.clip(spans, 1, max(1, length))
        before, after = (
            np.bincount(owners, weights=each[:, 1] - each[:, 0], minlength=len(lengths))
            for each in (spans, kept)
        )
        over = lengths > length
        left = np.where(over, after, before)
        total = float((before * weights).sum())
        return LengthCut(
            length,
            rows=float((over * weights).sum() / weights.sum()),
            answer_tokens=float(((before - left) * weights).sum() / total) if total else 0.0,
            answers=float(((over & (left == 0)) * weights).sum() / weights.sum()),
        )

    most = min(USUAL_LENGTHS[-1], context or USUAL_LENGTHS[-1])
    usual = sorted({*(length for length in USUAL_LENGTHS if length <= most), most})
    longest, estimated = int(lengths.max(initial=0)), not line.has_tokenizer
    how = "estimated from characters" if estimated else "tokenised"
    looked = f"{counted(len(lengths), 'row')} {how}, the longest {longest:,} tokens"
    if opened.plan.data.overlong == "split":
        because = f"plain text is split into sequences of this length, nothing is lost; {looked}"
        return LengthChoice(min(2048, most), because, longest, len(lengths), estimated)
    cuts = [cut_by(length) for length in usual]
    fitting = [one for one in cuts if one.rows <= MAX_CUT_SHARE]
    chosen = fitting[0] if fitting else cuts[-1]
    shorter = tuple(one for one in reversed(cuts) if one.length < chosen.length)
    bound = ""
    if not fitting and most == context:
        bound = f"the model sees {most:,} tokens"
    elif not fitting:
        bound = "longer ones need much memory: set it yourself where the card has room"
    found = (chosen.length, looked, longest, len(lengths), estimated)
    return LengthChoice(*found, cuts=(chosen, *shorter), bound=bound)


def _line(opened: Opened) -> DataPipeline:
    from expert.data.pipeline import open_pipeline

    plan, read, named = opened.plan, opened.read, opened.named
    # A hub tokenizer is not downloaded for this.
    if plan.model.place != "hub" and Path(plan.model.location).is_dir():
        with suppress(ExpertError):  # a folder with an unreadable tokenizer: training reports it
            return open_pipeline(plan, read, named, writes=False)
    return open_pipeline(plan, read, named, writes=False, has_tokenizer=False)


def _sampled_rows(source: Source, reading: RowReader) -> list[tuple[Row, float]]:
    """Good rows, each with the number of rows it represents."""
    spread = sample_rows(source.files, format=source.format, most=SAMPLED_ROWS)
    if spread is not None:
        return [
            (line.row, 1.0 if spread.whole else line.times / line.size)
            for line in spread.drawn
            if isinstance(line.row, Row)
        ]
    chance = random.Random(0)
    kept: list[Row | BadRow] = []
    for number, row in enumerate(islice(reading.rows(), MAX_ROWS_READ)):
        # Reservoir sampling: each row is equally likely to be kept.
        if len(kept) < SAMPLED_ROWS:
            kept.append(row)
        elif (place := chance.randrange(number + 1)) < SAMPLED_ROWS:
            kept[place] = row
    return [(row, 1.0) for row in kept if isinstance(row, Row)]


def _estimated(documents: Sequence[Any]) -> Any:
    """Lengths, answer positions and their rows, from the bytes of the text."""
    import numpy as np

    lengths, spans, owners = [], [], []
    for number, segments in enumerate(documents):
        place = 0.0
        for segment in segments:
            size = len(segment.text.encode("utf-8", "replace")) / BYTES_PER_TOKEN
            if segment.learn:
                spans.append((round(place), round(place + size)))
                owners.append(number)
            place += size
        lengths.append(round(place))
    arrays = [np.asarray(each, np.int64) for each in (lengths, spans, owners)]
    return arrays[0], arrays[1].reshape(-1, 2), arrays[2]
