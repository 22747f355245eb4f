"""The order of the data depends on the seed, the epoch and the step, and on nothing else."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expert.core.world import World
from expert.data.feed.order import DataOrder, ShufflePurpose, micro_batches, rank_batches, shuffled

counts = st.integers(1, 300)
seeds = st.integers(0, 2**63)


def run(order: DataOrder, done: int, total: int) -> list[list[int]]:
    return [update.bins.tolist() for update in order.steps(done, total)]


def test_shuffles_never_change_and_differ_by_purpose():
    # Written down once: a run that resumes after an upgrade must continue in the same order.
    order = shuffled(12, seed=42, draw=ShufflePurpose.EPOCH, number=3)
    assert order.tolist() == [11, 2, 0, 8, 10, 7, 9, 4, 5, 3, 6, 1]
    orders = [tuple(shuffled(50, seed=7, draw=draw)) for draw in ShufflePurpose]
    # Numbers that would look alike when written end to end, or padded with zeros.
    orders.append(tuple(shuffled(50, seed=7 + (1 << 32), draw=ShufflePurpose.PIECES)))
    assert len(set(orders)) == len(ShufflePurpose) + 1
    epochs = {tuple(DataOrder(40, 1, seed).epoch(n)) for seed in (1, 2, 3) for n in range(4)}
    assert len(epochs) == 12


@given(counts, st.integers(1, 40), seeds)
def test_an_epoch_has_every_bin_once_in_steps_of_equal_size(count: int, size: int, seed: int):
    order = DataOrder(count, size, seed)
    updates = run(order, 0, order.steps_per_epoch)
    assert sorted(chain(*updates)) == list(range(count))
    assert {len(update) for update in updates[:-1]} <= {size}
    assert 1 <= len(updates[-1]) <= size


@given(st.data(), counts, st.integers(1, 40), seeds, st.booleans())
def test_resuming_at_any_step_gives_the_same_order(data, count, size, seed, grouped):
    lengths = np.arange(count) * 7919 % 101 if grouped else None
    total = math.ceil(2.5 * DataOrder(count, size, seed).steps_per_epoch)
    whole = run(DataOrder(count, size, seed, lengths), 0, total)
    done = data.draw(st.integers(0, total))
    assert run(DataOrder(count, size, seed, lengths), done, total) == whole[done:]


@given(counts, st.integers(1, 12), seeds, st.integers(0, 3))
def test_grouping_sorts_the_rows_of_each_step_and_changes_none(count, size, seed, epoch):
    """Sorted across steps, a step had rows of one length, and training was worse."""
    lengths = np.arange(count) * 7919 % 101
    plain, grouped = (DataOrder(count, size, seed, by).epoch(epoch) for by in (None, lengths))
    for one, other in zip(micro_batches(plain, size), micro_batches(grouped, size), strict=True):
        assert sorted(one) == sorted(other)
        assert lengths[other].tolist() == sorted(lengths[one].tolist(), reverse=True)


@given(bins=st.integers(0, 40), rows=st.integers(1, 9), size=st.integers(1, 6))
def test_ranks_share_every_bin_of_a_step_and_have_equally_many_batches(bins, rows, size):
    step = np.arange(bins)
    shares = [rank_batches(step, rows, World(rank=rank, size=size)) for rank in range(size)]
    trained_on = [n for share in shares for some in share if not some.filler for n in some.bins]
    assert sorted(trained_on) == list(range(bins))
    assert len({len(share) for share in shares}) == 1
    assert all(len(some.bins) <= rows for share in shares for some in share)
    alone = [some.bins.tolist() for some in rank_batches(step, rows)]
    assert alone == [some.tolist() for some in micro_batches(step, rows)]
