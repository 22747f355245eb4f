"""Selects the documents of an epoch: weighted tasks, and a share held out for validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from expert.core.text import counted
from expert.data.feed.order import ShufflePurpose, shuffled
from expert.data.tokens.row_keys import Keys, RowKeys

Numbers = NDArray[np.int32]


def draw_documents(
    counts: Sequence[int],
    weights: Sequence[float],
    *,
    held_out_share: float,
    seed: int,
    keys: RowKeys | None = None,
) -> tuple[Numbers, Numbers]:
    """(training, validation): document numbers, task after task.

    Rows are held out before weights are applied, so that a repeated row is never on both sides. A
    weight below 1 samples a share of a task's rows, a weight above 1 repeats them. With `keys`,
    duplicate rows stay on one side too.
    """
    total = sum(counts)
    held_out = np.zeros(total, np.bool_)
    if held_out_share > 0 and total > 1:
        held_out = _held_out(total, held_out_share, seed, keys)
    drawn, first = [np.zeros(0, np.int32)], 0
    for number, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        here = (first + np.flatnonzero(~held_out[first : first + count])).astype(np.int32)
        first += count
        whole, rest = divmod(round(len(here) * weight), len(here)) if len(here) else (0, 0)
        if (whole, rest) != (1, 0):
            order = shuffled(len(here), seed=seed, draw=ShufflePurpose.SAMPLE, number=number)
            here = np.sort(np.concatenate([*[here] * whole, here[order[:rest]]]))
        drawn.append(here)
    return np.concatenate(drawn), np.flatnonzero(held_out).astype(np.int32)


def held_out_warning(keys: RowKeys, train: Numbers, held_out: Numbers) -> str:
    """A warning if held-out rows, or their prompts with another answer, are trained on; else ""."""
    trained = int(np.isin(keys.whole[held_out], keys.whole[train]).sum())
    shared = trained or int(np.isin(keys.prompt[held_out], keys.prompt[train]).sum())
    rows = f"{shared} of {counted(len(held_out), 'row')}"
    if trained:
        what = f"the rows repeat so much that {rows} held out for validation are trained on as well"
        fix = "remove copies, or name other rows in training.dataset.validation_path"
        return f"{what}: their loss shows what was memorised  ({fix})"
    if shared:  # there are too few prompts to keep all rows with a prompt on one side
        what = f"{rows} held out for validation repeat prompts of training rows, with other answers"
        fix = "name rows with other prompts in training.dataset.validation_path"
        return f"{what}: the loss on them says little about new prompts  ({fix})"
    return ""


def _held_out(total: int, share: float, seed: int, keys: RowKeys | None) -> NDArray[np.bool_]:
    """Marks the rows that are held out.

    Rows with the same prompt stay together if that holds out about the requested number. If there
    are too few prompts, only identical rows stay together; if even those would hold out far too
    many, nothing is kept together. Without repeated rows, all three draws are the same.
    """
    # Exact arithmetic: in floating point 100 rows x 0.07 would be 8.
    wanted = math.ceil(total * Fraction(str(share)))
    if keys is not None:
        assert len(keys.whole) == total, "a key for every document"
        by_prompt = _whole_groups(keys.prompt, wanted, seed)
        if wanted <= 2 * by_prompt.sum() <= 4 * wanted:
            return by_prompt
        by_row = _whole_groups(keys.whole, wanted, seed)
        if by_row.any():
            return by_row
    marks = np.zeros(total, np.bool_)
    marks[np.random.Generator(np.random.PCG64(seed)).permutation(total)[:wanted]] = True
    return marks


def _whole_groups(keys: Keys, wanted: int, seed: int) -> NDArray[np.bool_]:
    """Marks about `wanted` rows: groups of equal keys that fit, in random order. If none fits, the
    smallest, unless it has more than 2 * wanted + 1 rows or more than half of all."""
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    # Groups are numbered by their first rows, not by their keys, so that without repeated rows the
    # draw is the same as without keys.
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    group = rank[group]
    sizes = np.bincount(group)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(sizes))
    taken = np.zeros(len(sizes), np.bool_)
    left, waiting = wanted, order
    while left and len(waiting):
        fits = int(np.searchsorted(np.cumsum(sizes[waiting]), left, side="right"))
        taken[waiting[:fits]] = True
        left -= int(sizes[waiting[:fits]].sum())
        waiting = waiting[fits:]
        waiting = waiting[sizes[waiting] <= left]
    if not taken.any():
        smallest = order[np.argmin(sizes[order])]
        taken[smallest] = sizes[smallest] <= min(2 * wanted + 1, len(keys) // 2)
    marks: NDArray[np.bool_] = taken[group]
    return marks
