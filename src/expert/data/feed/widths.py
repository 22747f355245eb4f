"""A few widths for batches whose rows lie end to end, so that each can be captured once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expert.core.world import ALONE, World
from expert.data.feed.order import DataOrder
from expert.data.pack.pack_index import PackIndex

FLAT_TO = 256
"""Rows laid end to end are padded to a multiple of this: it suits the tiles of matrix products and
keeps the number of different sizes small."""


def few_widths(needed: NDArray[np.int64], most: int) -> tuple[int, ...]:
    """At most `most` widths, ascending, that hold these batches with the least padding in all."""
    widths, counts = np.unique(-(-needed // FLAT_TO) * FLAT_TO, return_counts=True)
    before = np.concatenate(([0], np.cumsum(counts)))
    # least[j]: places of the batches of the j smallest widths, with as many widths as rounds so far
    least = np.full(len(widths) + 1, np.inf)
    least[0] = 0
    chosen: list[list[int]] = [[] for _ in least]
    for _ in range(min(most, len(widths))):
        last, of_last = least.copy(), list(chosen)
        for j in range(1, len(least)):
            places = last[:j] + widths[j - 1] * (before[j] - before[:j])
            first = int(places.argmin())
            if places[first] < least[j]:
                least[j], chosen[j] = places[first], [*of_last[first], int(widths[j - 1])]
    return tuple(chosen[-1])


def widths_of(
    order: DataOrder, index: PackIndex, rows: int, most: int, world: World = ALONE
) -> tuple[int, ...]:
    """Widths for this rank's batches of `rows` sequences, from those of the first epoch. Other
    epochs are shuffled differently: a batch may need more than the largest of them."""
    bins, step = order.epoch(0), order.bins_per_update
    places = np.add.outer(np.arange(0, len(bins), step), np.arange(world.rank, step, world.size))
    lengths = np.append(index.bin_lengths()[bins], 0)[np.minimum(places, len(bins))]
    needed = [lengths[:, first : first + rows].sum(1) for first in range(0, places.shape[1], rows)]
    return few_widths(np.concatenate([one[one > 0] for one in needed]), most)
