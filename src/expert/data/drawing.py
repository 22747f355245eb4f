"""Which documents an epoch has: weighted tasks, and a share held out for validation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from expert.data.order import Draw, shuffled
from expert.data.sources import split_rows

Numbers = NDArray[np.int32]


def draw_documents(
    counts: Sequence[int], weights: Sequence[float], *, held_out_share: float, seed: int
) -> tuple[Numbers, Numbers]:
    """(training, validation): numbers of documents, those of the tasks one after the other.

    Rows are held out before weights are applied, so a row that a weight takes twice is never on
    both sides. A weight below 1 draws a share of a task's rows, one above 1 takes them again.
    """
    total = sum(counts)
    held_out = np.zeros(total, np.bool_)
    if held_out_share > 0 and total > 1:
        held_out = split_rows(total, held_out_share, seed)
    drawn, first = [np.zeros(0, np.int32)], 0
    for number, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        here = (first + np.flatnonzero(~held_out[first : first + count])).astype(np.int32)
        first += count
        whole, rest = divmod(round(len(here) * weight), len(here)) if len(here) else (0, 0)
        if (whole, rest) != (1, 0):
            order = shuffled(len(here), seed=seed, draw=Draw.SAMPLE, number=number)
            here = np.sort(np.concatenate([*[here] * whole, here[order[:rest]]]))
        drawn.append(here)
    return np.concatenate(drawn), np.flatnonzero(held_out).astype(np.int32)
