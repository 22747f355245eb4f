"""Batches of rows laid end to end come in a few widths that leave as little empty as they can."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from expert.core.world import ALONE, World
from expert.data.feed import feed as feeds
from expert.data.feed import widths
from expert.data.feed.order import dealt
from expert.data.feed.widths import FLAT_TO, few_widths, widths_of
from tests.data.test_feed import Case
from tests.each import each


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


@each("world", [ALONE, World(0, 2), World(1, 2), World(2, 3)])
def test_widths_are_those_of_a_ranks_micro_batches_of_an_epoch(world, monkeypatch):
    monkeypatch.setattr(widths, "FLAT_TO", 1)
    case = Case()
    needed = [
        int(case.index.lengths_of(batch.bins).sum())
        for update in case.order.updates(0, case.order.steps_per_epoch)
        for batch in dealt(update.bins, 2, world)
        if not batch.silent
    ]
    assert set(widths_of(case.order, case.index, 2, 99, world)) == set(needed)


def test_a_batch_is_padded_to_the_next_width_and_one_that_needs_more_to_all_places(monkeypatch):
    monkeypatch.setattr(feeds, "FLAT_TO", 4)
    case = Case()
    with case.feed(5, flat=True) as feed:
        needed = [fed.batches[0].tokens.shape[1] for fed in feed]
    given = sorted(set(needed))[:-1]
    with case.feed(5, flat=True, widths=(given[0], given[-1])) as feed:
        padded = [fed.batches[0].tokens.shape[1] for fed in feed]
    expected = [next(w for w in (given[0], given[-1], 5 * 64) if w >= one) for one in needed]
    assert padded == expected
    assert len(set(expected)) == 3
