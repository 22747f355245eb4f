"""The thread that feeds the model: the numbers of filling by hand, none overwritten too soon."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from expert.core.world import World
from expert.data.feed.batches import (
    IGNORED,
    BatchArrays,
    BatchCounts,
    BatchShape,
    fill_batch,
)
from expert.data.feed.feed import Batch, PackedFeed, UpdateWork
from expert.data.feed.order import DataOrder, micro_batches
from expert.data.pack.pack import pack_best_fit
from expert.data.pack.pack_index import PackIndex
from expert.data.tokens.documents import FlatDocuments
from tests.data.shards import shard_of
from tests.wording import wording

PAD = 7
CPU = torch.device("cpu")


def some_documents(count: int = 60, seed: int = 0) -> FlatDocuments:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 30, count)
    tokens = [random.integers(10, 500, length).tolist() for length in lengths]
    spans = [[(int(length) // 2, int(length))] for length in lengths]
    return FlatDocuments([shard_of(tokens, spans)])


class Case:
    """Sixty documents, packed; updates of five bins."""

    def __init__(self, soft_tokens: int = 0) -> None:
        self.store = some_documents()
        self.index: PackIndex = pack_best_fit(self.store.lengths, 64, 1, soft_tokens=soft_tokens)
        self.order = DataOrder(self.index.bins, 5, seed=3)

    def works(self, done: int, total: int):
        for update in self.order.updates(done, total):
            yield UpdateWork(update, self.index, self.store)

    def feed(self, rows: int, done: int = 0, total: int = 9, device=CPU) -> PackedFeed:
        return PackedFeed(
            self.works(done, total),
            BatchShape.for_index(self.index, rows),
            batches_per_update=-(-5 // rows),
            device=device,
            pad_id=PAD,
            soft=self.index.soft_tokens > 0,
        )

    def by_hand(self, done: int, rows: int) -> list[BatchArrays]:
        made = []
        for bins in micro_batches(self.order.update(done).bins, rows):
            out = BatchArrays.allocate(BatchShape.for_index(self.index, rows))
            fill_batch(out, self.index, bins, self.store, pad_id=PAD)
            made.append(out)
        return made


def assert_equal_to_filling_by_hand(case: Case, feed: PackedFeed, rows: int) -> int:
    seen = 0
    with feed:
        for fed in feed:
            expected = case.by_hand(fed.update.done, rows)
            assert len(fed.batches) == len(expected)
            for batch, arrays in zip(fed.batches, expected, strict=True):
                assert batch.tokens.shape == (rows, 64)
                for name in ("tokens", "labels", "positions", "boundaries", "target_places"):
                    there = getattr(batch, name).flatten().cpu().numpy()
                    np.testing.assert_array_equal(there, getattr(arrays, name), err_msg=name)
                if batch.soft_mask is not None:
                    there = batch.soft_mask.flatten().cpu().numpy()
                    np.testing.assert_array_equal(there, arrays.soft_mask)
            seen += 1
    return seen


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_fed_updates_equal_the_same_bins_filled_by_hand(rows: int):
    case = Case()
    assert assert_equal_to_filling_by_hand(case, case.feed(rows), rows) == 9


def test_places_of_a_soft_prompt_are_told():
    case = Case(soft_tokens=3)
    with case.feed(2) as feed:
        masks = [batch.soft_mask for batch in next(iter(feed)).batches]
    assert all(mask is not None and mask.dtype == torch.bool for mask in masks)
    assert sum(int(mask.sum()) for mask in masks if mask is not None) % 3 == 0
    assert assert_equal_to_filling_by_hand(case, case.feed(2), 2) == 9


@pytest.mark.parametrize("soft", [0, 3])
def test_rows_that_are_trimmed_lose_nothing_but_padding(monkeypatch, soft: int):
    monkeypatch.setattr("expert.data.feed.feed.TRIMMED_TO", 8)
    case = Case(soft_tokens=soft)
    case.index = pack_best_fit(case.store.lengths, 64, 1, soft_tokens=soft, most_pieces=2)
    case.order = DataOrder(case.index.bins, 5, seed=3)
    widths = set()
    whole = case.feed(2)
    trimmed = PackedFeed(
        case.works(0, 9),
        BatchShape.for_index(case.index, 2),
        batches_per_update=3,
        device=CPU,
        pad_id=PAD,
        soft=soft > 0,
        trim=True,
    )
    with whole, trimmed:
        for one, other in zip(whole, trimmed, strict=True):
            assert one.counts == other.counts
            for full, cut in zip(one.batches, other.batches, strict=True):
                width = cut.tokens.shape[1]
                widths.add(width)
                for name in ("tokens", "labels", "positions", "soft_mask"):
                    there = getattr(full, name)
                    if there is not None and name != "positions":
                        assert torch.equal(there[:, :width], getattr(cut, name)), name
                assert bool((full.tokens[:, width:] == PAD).all())
                assert bool((full.labels[:, width:] == -100).all())
                places = cut.target_places[: cut.targets].long()
                assert bool((cut.labels.flatten()[places] >= 0).all())
                assert cut.target_places.shape == (2 * width,)
                edges = cut.boundaries.tolist()
                assert edges[-1] == 2 * width
                starts = [edge for edge in edges if edge < 2 * width]
                assert [int(cut.positions.flatten()[edge]) for edge in starts] == [0] * len(starts)
    assert len(widths) > 2


@pytest.mark.parametrize("soft", [0, 3])
def test_rows_end_to_end_lose_nothing_but_padding(monkeypatch, soft: int):
    monkeypatch.setattr("expert.data.feed.feed.FLAT_TO", 8)
    case = Case(soft_tokens=soft)
    case.index = pack_best_fit(case.store.lengths, 64, 1, soft_tokens=soft, most_pieces=2)
    case.order = DataOrder(case.index.bins, 5, seed=3)
    shape = BatchShape.for_index(case.index, 2)
    options: dict[str, Any] = {
        "batches_per_update": 3,
        "device": CPU,
        "pad_id": PAD,
        "soft": soft > 0,
    }
    flat = PackedFeed(case.works(0, 9), shape, flat=True, **options)
    widths = set()
    with case.feed(2) as whole, flat:
        for one, other in zip(whole, flat, strict=True):
            assert one.counts == other.counts
            for full, laid in zip(one.batches, other.batches, strict=True):
                assert documents_in(laid) == documents_in(full)
                assert (laid.tokens.shape[0], laid.longest) == (1, min(64, laid.tokens.shape[1]))
                assert laid.tokens.shape[1] < laid.counts.real_tokens + soft * 8 + 8
                assert int((laid.labels >= 0).sum()) == laid.targets
                widths.add(laid.tokens.shape[1])
    assert len(widths) > 2


def documents_in(batch: Batch) -> list[tuple[list[int], ...]]:
    """Tokens, labels and positions of every document that is no padding, in order."""
    edges = batch.boundaries.unique().tolist()
    parts = [part.flatten() for part in (batch.tokens, batch.labels, batch.positions)]
    cut = [tuple(part[a:b].tolist() for part in parts) for a, b in pairwise(edges)]
    return [document for document in cut if set(document[0]) != {PAD}]


def test_without_a_soft_prompt_there_is_no_mask_for_it():
    with Case().feed(2) as feed:
        assert next(iter(feed)).batches[0].soft_mask is None


def test_the_number_of_rows_at_once_changes_neither_order_nor_counts():
    case = Case()

    def seen(rows: int) -> list[tuple[Any, ...]]:
        with case.feed(rows) as feed:
            return [(sum((b.bins for b in fed.batches), ()), fed.counts) for fed in feed]

    assert seen(1) == seen(2) == seen(5)


def test_a_feed_goes_on_from_any_place():
    case = Case()
    with case.feed(2) as feed:
        whole = [sum((b.bins for b in fed.batches), ()) for fed in feed]
    with case.feed(2, done=4) as feed:
        rest = [sum((b.bins for b in fed.batches), ()) for fed in feed]
    assert rest == whole[4:]
    assert len(rest) == 5


def test_an_update_stays_as_it_is_until_the_next_one_is_taken():
    case = Case()
    with case.feed(2) as feed:
        updates = iter(feed)
        for done in range(6):
            fed = next(updates)
            time.sleep(0.01)  # the thread has filled whatever it may fill
            expected = case.by_hand(done, 2)
            for batch, arrays in zip(fed.batches, expected, strict=True):
                np.testing.assert_array_equal(batch.tokens.flatten().numpy(), arrays.tokens)


def test_what_goes_wrong_in_the_thread_is_raised_where_updates_are_taken():
    case = Case()

    def works():
        yield from case.works(0, 2)
        raise OSError("the disk is gone")

    shape = BatchShape.for_index(case.index, 5)
    feed = PackedFeed(works(), shape, batches_per_update=1, device=CPU, pad_id=PAD)
    with feed, pytest.raises(OSError, match="the disk is gone"):
        for _ in feed:
            pass


def test_leaving_early_ends_the_thread():
    case = Case()
    with case.feed(1, total=9) as feed:
        next(iter(feed))
    assert not any(thread.name == "expert-feed" for thread in threading.enumerate())


def test_an_update_with_too_many_batches_is_an_error_rather_than_a_loss():
    case = Case()
    shape = BatchShape.for_index(case.index, 1)
    feed = PackedFeed(case.works(0, 1), shape, batches_per_update=2, device=CPU, pad_id=PAD)
    with feed, pytest.raises(ValueError, match=wording("batches-in-update-with")):
        next(iter(feed))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_batches_arrive_on_the_card_as_they_were_filled():
    case = Case(soft_tokens=2)
    feed = case.feed(2, device=torch.device("cuda"))
    assert assert_equal_to_filling_by_hand(case, feed, 2) == 9


def test_a_silent_batch_of_a_rank_has_no_label_and_counts_nothing():
    case, size = Case(), 4  # five bins: one rank has two of them, the others one and a silent one
    batches: list[Batch] = []
    silent: list[Batch] = []
    for rank in range(size):
        feed = PackedFeed(
            case.works(0, 1),
            BatchShape.for_index(case.index, 1),
            batches_per_update=2,
            device=CPU,
            pad_id=PAD,
            world=World(rank=rank, size=size),
        )
        with feed:
            first, second = next(iter(feed)).batches
            batches.append(first)
            (batches if rank == 0 else silent).append(second)
            for batch in silent[-1:]:
                assert (batch.labels == IGNORED).all()
                assert batch.counts == BatchCounts()
                assert (batch.target_places == batch.labels.numel() - 1).all()
    assert len(silent) == 3
    with case.feed(5) as alone:
        whole = next(iter(alone)).counts
    assert sum((batch.counts for batch in batches), BatchCounts()) == whole
