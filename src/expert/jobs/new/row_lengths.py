"""How long the rows of a manifest are, and the max_seq_length that cuts nearly none of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from expert.data.read.sources import Source
    from expert.data.records import BadRow, Row
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan
    from expert.run.prepare import Builder

USUAL_LENGTHS = (512, 1024, 2048, 4096, 8192)
"""No shorter, so that rows which are added later have room: packing fills what is left over. No
longer, since the memory of a step grows with it; who has the card for more sets it."""
CUT_AT_MOST = 0.005
"""Share of the rows that may lose their end: a few are far longer in many data sets."""
LOOKED_AT = 400
READ_AT_MOST = 200_000
"""Rows of a file without lines (.json, parquet) that are drawn from."""
BYTES_PER_TOKEN = 2.9
"""Of text where no tokenizer is at hand. Measured with Qwen3's: 2.9 on SQL with its tables, 3.1 on
JSON, 3.6 on Cypher, 4.2 on a handbook, 4.7 on Alpaca. The least of them, so that a length is chosen
too long rather than too short."""


@dataclass(frozen=True)
class CutBy:
    """What a length would cut, as shares of all."""

    length: int
    rows: float
    """Rows that lose their end."""
    answer_tokens: float
    """Tokens that would be trained on and are lost."""
    answers: float
    """Rows of which nothing is trained on any more."""

    def words(self) -> str:
        lost = f"{_share(self.rows)} of the rows and {_share(self.answer_tokens)} of the answers"
        gone = f"; {_share(self.answers)} of the rows lose their whole answer"
        return f"{self.length}: cuts {lost}" + (gone if self.answers else "")


def _share(share: float) -> str:
    return f"{share:.0%}" if not 0 < share < 0.01 else "below 1 %"


@dataclass(frozen=True)
class LengthChoice:
    """The length that was chosen, why, and what it and shorter ones cut."""

    length: int
    because: str
    longest: int
    rows: int
    """That were looked at."""
    estimated: bool
    """By characters: the tokenizer is not on this machine."""
    cuts: tuple[CutBy, ...] = ()
    """The chosen length first, then shorter ones that cut more."""
    bound: str = ""
    """What kept it from being longer; "" where nothing did."""


@dataclass(frozen=True, eq=False)
class RowLengths:
    """Tokens of some rows, and where in them answers begin and end."""

    lengths: NDArray[np.int64]
    spans: NDArray[np.int64]
    """(start, stop) of all answers, shape [n, 2]."""
    owners: NDArray[np.int64]
    """The row of each answer."""
    weights: NDArray[np.float64]
    """How many rows of the files each stands for."""
    estimated: bool

    def cut_by(self, length: int) -> CutBy:
        import numpy as np

        count = len(self.lengths)
        sizes = self.spans[:, 1] - self.spans[:, 0]
        # A first token is never a label: nothing comes before it.
        kept = np.clip(self.spans, 1, max(1, length))
        before = np.bincount(self.owners, weights=sizes, minlength=count)
        after = np.bincount(self.owners, weights=kept[:, 1] - kept[:, 0], minlength=count)
        over = self.lengths > length
        total = float((before * self.weights).sum())
        left = np.where(over, after, before)
        return CutBy(
            length,
            rows=float((over * self.weights).sum() / self.weights.sum()),
            answer_tokens=float(((before - left) * self.weights).sum() / total) if total else 0.0,
            answers=float(((over & (left == 0)) * self.weights).sum() / self.weights.sum()),
        )


def choose_length(known: RowLengths, *, context: int | None, splits: bool) -> LengthChoice:
    """The smallest usual length that cuts nearly nothing, within the model's context.

    `splits`: rows that are longer are split into several sequences, as plain text is.
    """
    most = min(USUAL_LENGTHS[-1], context or USUAL_LENGTHS[-1])
    usual = [length for length in USUAL_LENGTHS if length <= most] or [most]
    usual = usual if usual[-1] == most else [*usual, most]
    longest = int(known.lengths.max(initial=0))
    how = "estimated from characters" if known.estimated else "tokenised"
    looked = f"{len(known.lengths):,} rows {how}, the longest {longest:,} tokens"
    if splits:
        length = min(2048, most)
        because = f"plain text is split into sequences of this length, nothing is lost; {looked}"
        return LengthChoice(length, because, longest, len(known.lengths), known.estimated)
    cuts = [known.cut_by(length) for length in usual]
    fitting = [one for one in cuts if one.rows <= CUT_AT_MOST]
    chosen = fitting[0] if fitting else cuts[-1]
    shorter = tuple(one for one in reversed(cuts) if one.length < chosen.length)
    bound = ""
    if not fitting and most == context:
        bound = f"the model sees {most:,} tokens"
    elif not fitting:
        bound = "longer ones need much memory: set it yourself where the card has room"
    return LengthChoice(
        chosen.length,
        looked,
        longest,
        len(known.lengths),
        known.estimated,
        cuts=(chosen, *shorter),
        bound=bound,
    )


# --- looking at the rows -------------------------------------------------------------------------


def measure_rows(read: ReadManifest, plan: RunPlan) -> RowLengths | None:
    """Tokens of rows from all over the training files; None where no row can be used."""
    import numpy as np

    builder = _builder(read, plan)
    source = builder.sources.train or builder.sources.tasks[0].train
    segments_of, _ = builder.formatter(source)
    documents, weights = [], []
    for row, weight in _drawn(source, builder):
        made = segments_of(row)
        if isinstance(made, list):
            documents.append(made)
            weights.append(weight)
    if not documents:
        return None
    found = _estimated(documents) if builder.encoder is None else _tokenised(documents, builder)
    lengths, spans, owners = found
    return RowLengths(
        lengths, spans, owners, np.asarray(weights, np.float64), builder.encoder is None
    )


def _builder(read: ReadManifest, plan: RunPlan) -> Builder:
    from expert.jobs.datasets.show import TextOnly
    from expert.run.prepare import Builder
    from expert.run.token_folders import named_sources

    named = named_sources(read)

    def quiet(name: str, rows: int, tokens: int) -> None:
        """Nothing is prepared."""

    # A tokenizer on the hub is not fetched for this.
    if plan.model.place != "hub" and Path(plan.model.location).is_dir():
        try:
            return Builder(plan, read, named, quiet)
        except ExpertError:
            pass  # a folder without a tokenizer that can be read: training says so
    return TextOnly(plan, read, named, quiet)


def _drawn(source: Source, builder: Builder) -> list[tuple[Row, float]]:
    """Good rows with how many others each stands for."""
    from expert.data.read.spread_rows import spread_rows
    from expert.data.records import Row

    spread = spread_rows(source.files, format=source.format, most=LOOKED_AT)
    if spread is not None:
        return [
            (line.row, 1.0 if spread.whole else line.times / line.size)
            for line in spread.drawn
            if isinstance(line.row, Row)
        ]
    rows = islice(builder.rows_of(source), READ_AT_MOST)
    return [(row, 1.0) for row in _sample(rows) if isinstance(row, Row)]


def _sample(rows: Iterable[Row | BadRow]) -> list[Row | BadRow]:
    """Each row is as likely to be kept as any other."""
    chance = random.Random(0)
    kept: list[Row | BadRow] = []
    for number, row in enumerate(rows):
        if len(kept) < LOOKED_AT:
            kept.append(row)
        else:
            place = chance.randrange(number + 1)
            if place < LOOKED_AT:
                kept[place] = row
    return kept


def _tokenised(documents: Sequence[Any], builder: Builder) -> tuple[Any, Any, Any]:
    import numpy as np

    batch = builder.encoder.encode(documents)
    owners = np.repeat(np.arange(len(documents)), batch.span_counts // 2)
    return batch.lengths.astype(np.int64), batch.spans.reshape(-1, 2).astype(np.int64), owners


def _estimated(documents: Sequence[Any]) -> tuple[Any, Any, Any]:
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
    shaped = np.asarray(spans, np.int64).reshape(-1, 2)
    return np.asarray(lengths, np.int64), shaped, np.asarray(owners, np.int64)
