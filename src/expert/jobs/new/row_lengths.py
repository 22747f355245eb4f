"""How long the rows of a manifest are, and the max_seq_length that cuts almost none of them."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

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
TEXT_LENGTH = 2048
"""For plain text, which is split and loses nothing."""
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
class LengthChoice:
    """The chosen length, and why."""

    length: int
    because: str
    cut: float = 0.0
    """Share of the rows that it cuts."""
    warning: str = ""
    """What it cuts if that is much, and what kept it from being longer."""


def choose_length(opened: Opened, context: int | None) -> LengthChoice | None:
    """The smallest usual max_seq_length that cuts almost no row of a plan, within the model's
    context; None if no row can be used."""
    from expert.data.pipeline import reader_for

    line = _line(opened)
    source = line.sources_of("train")[0]
    reading = reader_for(line, source)
    segments_of = reading.formatter()
    formatted = ((segments_of(row), weight) for row, weight in _sampled_rows(source, reading))
    good = [(segments, weight) for segments, weight in formatted if isinstance(segments, list)]
    if not good:
        return None
    if line.has_tokenizer:
        how = "tokenised"
        lengths = line.encoder.encode([segments for segments, _ in good]).lengths.tolist()
    else:
        how = f"estimated, since the tokenizer of {opened.plan.model.name} is not on this machine"
        texts = ("".join(each.text for each in segments) for segments, _ in good)
        lengths = [round(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN) for text in texts]
    most = min(USUAL_LENGTHS[-1], context or USUAL_LENGTHS[-1])
    looked = f"{counted(len(lengths), 'row')} {how}, the longest {max(lengths):,} tokens"
    if opened.plan.data.overlong == "split":
        because = f"plain text is split into sequences of this length, nothing is lost; {looked}"
        return LengthChoice(min(TEXT_LENGTH, most), because)
    weights = [weight for _, weight in good]
    for length in sorted({*(length for length in USUAL_LENGTHS if length <= most), most}):
        longer = (w for w, each in zip(weights, lengths, strict=True) if each > length)
        cut = sum(longer) / sum(weights)
        if cut <= MAX_CUT_SHARE:
            return LengthChoice(length, looked, cut)
    bound = "longer ones need much memory: set it yourself where the card has room"
    if most == context:
        bound = f"the model sees {most:,} tokens"
    return LengthChoice(most, looked, cut, f"{cut:.1%} of the rows are longer and are cut: {bound}")


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
