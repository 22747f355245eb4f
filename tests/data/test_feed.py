"""The thread that feeds the model: the numbers of filling by hand, none overwritten too soon."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import astuple
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from expert.core.world import SINGLE_PROCESS, World
from expert.data.feed import feed as feeds
from expert.data.feed.batches import (
    IGNORED,
    PAD_ID,
    BatchArrays,
    BatchCounts,
    BatchShape,
    fill_batch,
)
from expert.data.feed.feed import FLAT_TO, Batch, PackedFeed, StepWork, few_widths, widths_of
from expert.data.feed.order import DataOrder, micro_batches, rank_batches
from expert.data.pack.pack import pack_best_fit
from expert.data.pack.pack_index import PackIndex
from expert.data.tokens.documents import FlatDocuments
from tests.data.shards import shard_of
from tests.each import each

CPU = torch.device("cpu")


class Case:
    """Sixty documents, packed; steps of five bins."""

    def __init__(self, soft_tokens: int = 0, most_pieces: int | None = None) -> None:
        random = np.random.default_rng(0)
        lengths = random.integers(2, 30, 60)
        tokens = [random.integers(10, 500, length).tolist() for length in lengths]
        spans = [[(int(length) // 2, int(length))] for length in lengths]
        self.store = FlatDocuments([shard_of(tokens, spans)])
        self.index: PackIndex = pack_best_fit(
            self.store.lengths, 64, 1, soft_tokens=soft_tokens, most_pieces=most_pieces
        )
        self.order = DataOrder(self.index.bins, 5, seed=3)

    def works(self, done: int, total: int):
        for update in self.order.steps(done, total):
            yield StepWork(update, self.index, self.store)

    def feed(self, rows: int, done: int = 0, total: int = 9, **more: Any) -> PackedFeed:
        return PackedFeed(
            more.pop("works", self.works(done, total)),
            BatchShape.for_index(self.index, rows),
            batches_per_step=more.pop("batches", -(-5 // rows)),
            device=more.pop("device", CPU),
            soft=self.index.soft_tokens > 0,
            **more,
        )

    def by_hand(self, done: int, rows: int) -> list[BatchArrays]:
        made = []
        for bins in micro_batches(self.order.step(done).bins, rows):
            out = BatchArrays.allocate(BatchShape.for_index(self.index, rows))
            fill_batch(out, self.index, bins, self.store)
            made.append(out)
        return made


def assert_equal_to_filling_by_hand(case: Case, feed: PackedFeed, rows: int) -> int:
    seen = 0
    with feed:
        for fed in feed:
            expected = case.by_hand(fed.step.done, rows)
            assert len(fed.batches) == len(expected)
            for batch, arrays in zip(fed.batches, expected, strict=True):
                assert batch.tokens.shape == (rows, 64)
                for name in ("tokens", "labels", "positions", "boundaries", "target_places"):
                    there = getattr(batch, name).flatten().cpu().numpy()
                    np.testing.assert_array_equal(there, getattr(arrays, name), err_msg=name)
                assert (batch.soft_mask is None) == (case.index.soft_tokens == 0)
                if batch.soft_mask is not None:
                    there = batch.soft_mask.flatten().cpu().numpy()
                    np.testing.assert_array_equal(there, arrays.soft_mask)
            seen += 1
    return seen


@pytest.mark.parametrize(("rows", "soft"), [(1, 0), (2, 3), (8, 0)])
def test_fed_steps_equal_the_same_bins_filled_directly(rows: int, soft: int):
    case = Case(soft_tokens=soft)
    assert assert_equal_to_filling_by_hand(case, case.feed(rows), rows) == 9


@pytest.mark.parametrize("soft", [0, 3])
@pytest.mark.parametrize("way", ["trim", "flat"])
def test_rows_that_are_trimmed_or_end_to_end_lose_nothing_but_padding(monkeypatch, way, soft):
    monkeypatch.setattr("expert.data.feed.feed.TRIMMED_TO", 8)
    monkeypatch.setattr("expert.data.feed.feed.FLAT_TO", 8)
    case = Case(soft_tokens=soft, most_pieces=2)
    widths = set()
    with case.feed(2) as whole, case.feed(2, **{way: True}) as other:
        for one, two in zip(whole, other, strict=True):
            assert counted(one.batches) == counted(two.batches)
            for full, laid in zip(one.batches, two.batches, strict=True):
                rows, width = laid.tokens.shape
                assert rows == (1 if way == "flat" else 2)
                assert laid.longest == min(64, width)
                assert documents_in(laid) == documents_in(full)
                assert int((laid.labels >= 0).sum()) == laid.targets
                places = laid.target_places[: laid.targets].long()
                assert bool((laid.labels.flatten()[places] >= 0).all())
                assert laid.target_places.shape == (rows * width,)
                if way == "flat":
                    assert width < laid.counts.real_tokens + soft * 8 + 8
                widths.add(width)
    assert len(widths) > 2


def counted(batches: Iterable[Batch]) -> list[int]:
    return [*map(int, np.sum([astuple(batch.counts) for batch in batches], axis=0))]


def documents_in(batch: Batch) -> list[tuple[list[int], ...]]:
    """Tokens, labels, positions and soft places of every document except padding, in order."""
    edges = batch.boundaries.unique().tolist()
    soft = torch.zeros_like(batch.tokens) if batch.soft_mask is None else batch.soft_mask
    parts = [part.flatten() for part in (batch.tokens, batch.labels, batch.positions, soft)]
    cut = [tuple(part[a:b].tolist() for part in parts) for a, b in pairwise(edges)]
    return [document for document in cut if set(document[0]) != {PAD_ID}]


def test_errors_of_the_feed_thread_are_raised_in_the_consumer():
    case = Case()

    def works():
        yield from case.works(0, 2)
        raise OSError("the disk is gone")

    with case.feed(5, works=works()) as feed, pytest.raises(OSError, match="the disk is gone"):
        list(feed)
    few = case.feed(1, batches=2)
    with few, pytest.raises(ValueError, match="5 batches in a step with room for 2"):
        next(iter(few))
    with case.feed(1, total=9) as feed:
        next(iter(feed))
    assert not any(thread.name == "expert-feed" for thread in threading.enumerate())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_batches_arrive_on_the_card_as_they_were_filled():
    case = Case(soft_tokens=2)
    feed = case.feed(2, device=torch.device("cuda"))
    assert assert_equal_to_filling_by_hand(case, feed, 2) == 9


def test_a_silent_batch_of_a_rank_has_no_label_and_counts_nothing():
    case, size = Case(), 4  # five bins: one rank has two of them, the others one and a silent one
    batches: list[Batch] = []
    filler: list[Batch] = []
    for rank in range(size):
        with case.feed(1, total=1, batches=2, world=World(rank=rank, size=size)) as feed:
            first, second = next(iter(feed)).batches
            batches.append(first)
            (batches if rank == 0 else filler).append(second)
            for batch in filler[-1:]:
                assert (batch.labels == IGNORED).all()
                assert batch.counts == BatchCounts()
                assert (batch.target_places == batch.labels.numel() - 1).all()
    assert len(filler) == 3
    with case.feed(5) as alone:
        whole = next(iter(alone)).batches
        assert counted(batches) == counted(whole)


# --- widths of batches whose rows lie end to end -------------------------------------------------


def places(needed, chosen) -> int:
    """What these batches take, each in the narrowest of the widths that holds it."""
    return sum(min(width for width in chosen if width >= one) for one in needed)


@each("most", [1, 2, 3, 9])
def test_no_other_choice_of_as_many_widths_leaves_less_empty(most):
    needed = np.random.default_rng(most).integers(100, 10 * FLAT_TO, 40)
    chosen = few_widths(needed, most)
    possible = sorted({-(-int(one) // FLAT_TO) * FLAT_TO for one in needed})
    assert list(chosen) == sorted(chosen)
    assert len(chosen) == min(most, len(possible))
    others = combinations(possible, min(most, len(possible)))
    least = min(places(needed, other) for other in others if other[-1] == possible[-1])
    assert places(needed, chosen) == least


@each("world", [SINGLE_PROCESS, World(0, 2), World(1, 2), World(2, 3)])
def test_widths_are_those_of_a_ranks_micro_batches_of_an_epoch(world, monkeypatch):
    monkeypatch.setattr(feeds, "FLAT_TO", 1)
    case = Case()
    needed = [
        int(case.index.lengths_of(batch.bins).sum())
        for update in case.order.steps(0, case.order.steps_per_epoch)
        for batch in rank_batches(update.bins, 2, world)
        if not batch.filler
    ]
    assert set(widths_of(case.order, case.index, 2, 99, world)) == set(needed)
