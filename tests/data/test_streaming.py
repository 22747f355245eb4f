"""Streams: bounded windows, the same steps with any number of workers, resumable positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from expert.data.feed.streaming import Stream, StreamPosition
from expert.data.pack.pack import pack_best_fit
from expert.data.records import BadRow, DataError, Row, Segment
from expert.data.tokens.encoder import CharacterEncoder
from tests.data.shards import loader_plan
from tests.each import each

ENCODER = CharacterEncoder("abcdefghijklmnopqrstuvwxyz0123456789 ")
LENGTH = 64
ROWS = 150
START = StreamPosition()


class Source:
    """Rows that count how many of them were read."""

    def __init__(self, count: int = ROWS, bad: int | None = None) -> None:
        self.count = count
        self.bad = bad
        self.read = 0

    def __call__(self) -> Iterator[Row | BadRow]:
        for number in range(self.count):
            self.read += 1
            if number == self.bad:
                yield BadRow("rows.jsonl", number + 1, "broken")
            else:
                yield Row({"text": f"{number} {'x' * (number % 17)}"}, "rows.jsonl", number + 1)


def segments_of(row: Row) -> list[Segment]:
    return [Segment(str(row.values["text"]), True)]


def pack(store, seed):
    return pack_best_fit(store.lengths, LENGTH, seed)


def a_stream(source: Source, workers: int = 0, pack=pack, encoder=ENCODER, **more) -> Stream:
    more |= {"window_rows": 40, "options": loader_plan(workers=workers)}
    return Stream(
        source, lambda: segments_of, encoder, pack, examples_per_update=10, seed=2, **more
    )


def texts_of(work) -> list[str]:
    return [
        ENCODER.decode(work.store.tokens(document)[start:stop].tolist())
        for number in work.step.bins.tolist()
        for document, start, stop in work.index.pieces(number)
    ]


def works(
    stream: Stream, place: StreamPosition = START, done: int = 0, epochs: float = 1, total=None
):
    return stream.works(done=done, place=place, epochs=epochs, total=total)


def seen(stream: Stream, **more) -> list[tuple[Any, ...]]:
    found = works(stream, **more)
    return [(w.step.done, w.step.epoch, w.step.window, texts_of(w)) for w in found]


def test_a_stream_has_every_row_once_per_epoch_in_steps_of_the_requested_size():
    updates = seen(a_stream(Source()), epochs=2)
    orders = [[some for _, at, _, some in updates if at == epoch] for epoch in (0, 1)]
    for order in orders:
        texts = [text for some in order for text in some]
        assert len(texts) == len(set(texts)) == ROWS
    assert orders[0] != orders[1]
    assert [done for done, *_ in updates] == list(range(len(updates)))
    # Windows of 40 rows are cut evenly.
    assert np.mean([len(texts) for *_, texts in updates]) == pytest.approx(10, rel=0.25)
    assert len(seen(a_stream(Source()), total=3)) == 3


@each("workers", [1, 3])
def test_the_number_of_workers_does_not_change_the_steps(workers: int):
    assert seen(a_stream(Source(), workers)) == seen(a_stream(Source()))


def test_a_stream_resumes_from_any_position():
    whole = seen(a_stream(Source()))
    stream = a_stream(Source())
    for at, work in enumerate(works(stream)):
        place = StreamPosition(work.step.epoch, work.step.window, work.step.in_epoch + 1)
        rest = seen(a_stream(Source()), place=place, done=at + 1)
        assert rest == whole[at + 1 :]


def test_no_more_is_read_than_the_windows_in_use():
    source = Source(count=10_000)
    taken = works(a_stream(source))
    next(taken)
    assert source.read <= 40 + 41  # looking at the first window, then reading it


def test_bad_rows_stop_the_stream_and_are_named_unless_they_are_tolerated():
    with pytest.raises(DataError, match=r"(?s)a row of the stream .*rows\.jsonl:91: broken"):
        seen(a_stream(Source(bad=90)))
    texts = [text for *_, some in seen(a_stream(Source(bad=90), max_bad_rows=1)) for text in some]
    assert len(texts) == ROWS - 1


class Unlearnt(CharacterEncoder):
    """Characters of which none is trained on."""

    def encode(self, documents):
        batch = super().encode(documents)
        nothing = np.zeros(0, np.int32)
        return type(batch)(batch.ids, batch.lengths, nothing, np.zeros_like(batch.span_counts))


def unlearnt(store, seed):
    """No bins: no row has anything to train on."""
    return pack_best_fit(store.lengths, LENGTH, seed, unlearnt=np.arange(len(store)))


@each(
    ("count", "encoder", "pack", "told"),
    [
        (0, ENCODER, pack, "no rows that can be used"),
        (ROWS, Unlearnt(ENCODER.characters), pack, "nothing to train on"),
        (
            ROWS,
            ENCODER,
            unlearnt,
            "the first 40 rows of the stream: the answer starts after max_seq_length 64",
        ),
    ],
    ids=["empty", "no answer", "answers cut off"],
)
def test_a_stream_whose_first_rows_have_no_trained_tokens_is_an_error(count, encoder, pack, told):
    with pytest.raises(DataError, match=told):
        a_stream(Source(count), encoder=encoder, pack=pack)


def test_a_window_without_trained_tokens_makes_no_step():
    def nothing_after_the_first(store, seed):
        first = ENCODER.decode(store.tokens(0)[:2]) == "0 "
        gone = np.arange(0 if first else len(store))
        return pack_best_fit(store.lengths, LENGTH, seed, unlearnt=gone)

    stream = a_stream(Source(), pack=nothing_after_the_first)
    rows = [len(texts_of(work)) for work in works(stream)]
    assert (sum(rows), min(rows) > 0) == (40, True)
    assert (stream.first_rows, stream.first_left_out) == (40, 0)
