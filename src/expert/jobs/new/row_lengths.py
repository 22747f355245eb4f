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
from expert.data.records import BadRow, DataError, Row

if TYPE_CHECKING:
    from expert.data.pipeline import DataPipeline, RowReader
    from expert.run.open import Opened

USUAL_LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Not shorter, so that rows added later have room: packing fills the rest. Not longer, since the
memory of a step grows with it; users with a larger card can set more."""
LONG_LENGTHS = (16_384, 32_768, 65_536, 131_072)
"""Only where a shorter one would cut most rows."""
TEXT_LENGTH = 2048
"""For plain text, which is split and loses nothing."""
MAX_CUT_SHARE = 0.005
"""Share of the rows that may be cut: many datasets have a few far longer rows."""
MOST_LOST = 0.5
"""Share of the rows that may be unusable or cut in an expert that is created at all."""
SAMPLED_ROWS = 400
MAX_ROWS_READ = 50_000
"""Rows that they are sampled from."""
BYTES_PER_TOKEN = 2.9
"""Estimate without a tokenizer. Measured with Qwen3's: 2.9 on SQL with its tables, 3.1 on JSON, 3.6
on Cypher, 4.2 on a handbook, 4.7 on Alpaca. The smallest of them, so that a length is too long
rather than too short."""


@dataclass(frozen=True)
class LengthChoice:
    """The chosen length, and why."""

    length: int
    because: str
    template: str
    """The prompt template that the rows were measured with."""
    warning: str = ""
    """What it cuts if that is much, and what kept it from being longer."""


def choose_length(opened: Opened, context: int | None) -> LengthChoice:
    """The smallest usual max_seq_length that cuts almost no row of a plan, within the model's
    context; DataError if most rows would be cut or cannot be used."""
    from expert.data.pipeline import reader_for

    line = _line(opened)
    reading = reader_for(line, line.sources_of("train")[0])
    formatted = list(map(reading.formatter(), _sampled_rows(reading)))
    good = [segments for segments in formatted if isinstance(segments, list)]
    bad = [outcome for outcome in formatted if isinstance(outcome, BadRow)]
    if not good or len(bad) > MOST_LOST * len(formatted):
        why = f": {bad[0]}" if bad else ""
        looked = f"{len(good)} of {counted(len(formatted), 'row')}"
        raise DataError(f"only {looked} can be trained on{why}")
    template = line.plan.model.prompt_template or "tokenizer"
    template = line.template.name if line.template and line.has_tokenizer else template
    if line.has_tokenizer:
        how = "tokenised"
        lengths = line.encoder.encode(good).lengths.tolist()
    else:
        how = f"estimated, since the tokenizer of {opened.plan.model.name} is not on this machine"
        texts = ("".join(each.text for each in segments) for segments in good)
        lengths = [round(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN) for text in texts]
    most = context or LONG_LENGTHS[-1]
    looked = f"{counted(len(lengths), 'row')} {how}, the longest {max(lengths):,} tokens"
    if opened.plan.data.overlong == "split":
        because = f"plain text is split into sequences of this length, nothing is lost; {looked}"
        return LengthChoice(min(TEXT_LENGTH, most), because, template)
    cut, length = 1.0, most
    for length in (*(each for each in (*USUAL_LENGTHS, *LONG_LENGTHS) if each < most), most):
        cut = sum(each > length for each in lengths) / len(lengths)
        if cut <= (MOST_LOST if length >= USUAL_LENGTHS[-1] else MAX_CUT_SHARE):
            break
    bound = "longer ones need much memory: set it yourself where the card has room"
    if length == context:
        bound = f"the model sees {length:,} tokens"
    warning = f"{cut:.1%} of the rows are longer and are cut: {bound}"
    if cut > MOST_LOST:
        raise DataError(f"{warning}  (divide the rows, or name a --model that sees more)")
    return LengthChoice(length, looked, template, warning if cut > MAX_CUT_SHARE else "")


def _line(opened: Opened) -> DataPipeline:
    from expert.data.pipeline import open_pipeline

    plan, read, named = opened.plan, opened.read, opened.named
    # A hub tokenizer is not downloaded for this.
    if plan.model.place != "hub" and Path(plan.model.location).is_dir():
        with suppress(ExpertError):  # a folder with an unreadable tokenizer: training reports it
            return open_pipeline(plan, read, named, writes=False)
    return open_pipeline(plan, read, named, writes=False, has_tokenizer=False)


def _sampled_rows(reading: RowReader) -> list[Row]:
    """Good rows, each equally likely to be among them."""
    chance = random.Random(0)
    kept: list[Row | BadRow] = []
    for number, row in enumerate(islice(reading.rows(), MAX_ROWS_READ)):
        if len(kept) < SAMPLED_ROWS:
            kept.append(row)
        elif (place := chance.randrange(number + 1)) < SAMPLED_ROWS:
            kept[place] = row
    return [row for row in kept if isinstance(row, Row)]
