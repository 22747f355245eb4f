"""The fastest way through a step that fits: rows at once, blocks checkpointed, passes captured.

More rows at once take fewer passes, each with a fixed time; blocks that are checkpointed make room
for them and are computed twice. Captured passes need no launches and keep their memory. What each
is worth is in the one table of choose/rates.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from expert.planning.choose.length import peaks_of, total_tokens
from expert.planning.choose.rates import PassSeconds, pass_seconds
from expert.planning.draft import PlanDraft
from expert.planning.memory.fitting import (
    MARGIN,
    Fit,
    budget_of,
    even_split,
    fewest_recomputed,
    find_fit,
    has_host_memory,
    peak_bytes,
    worth_at_once,
)
from expert.planning.memory.workload import Workload

WORTH = 0.98
"""A way that gives something up must be faster by this: the table is not better than that."""
LITTLE_USED = 0.8
AS_FAST = 1.02
"""Where less than this share of the memory would be used, more rows at once are taken also where
the table says that they are only as fast: fewer passes depend less on the host."""
ROWS_TRIED = 8


@dataclass(frozen=True, kw_only=True)
class Way:
    """What fits, how many passes make a step, and the seconds of one; None where nobody knows."""

    fit: Fit
    passes: int
    time: PassSeconds | None
    checkpointed_for: int = 1
    """Rows that blocks are checkpointed for, where they are."""

    @property
    def step_seconds(self) -> float:
        return self.passes * self.time.seconds if self.time is not None else math.inf


def way_of(draft: PlanDraft, base: Workload, sequences: int | None) -> Way:
    """The fastest way that fits, compiled and captured or not as `base` is. `sequences`: of a step,
    where they are known."""
    most = most_of_a_rank(draft, sequences)
    fit = find_fit(draft, base, most, limit=limit_of(draft, base, most))
    return _with_more_rows(draft, _timed(draft, fit, sequences), sequences)


def most_of_a_rank(draft: PlanDraft, sequences: int | None) -> int:
    """Sequences of a step that one rank computes, at most."""
    examples = draft["batch.examples_per_update"]
    return draft.cluster.share_of(min(sequences or examples, examples))


def limit_of(draft: PlanDraft, base: Workload, most: int) -> int:
    """How many of them are worth computing at once."""
    even = draft.packed or draft.is_char_model
    return worth_at_once(on_gpu=draft.on_gpu, even=even, row_tokens=base.row_tokens, most=most)


def split_of(draft: PlanDraft, sequences: int, largest: int) -> tuple[int, int]:
    """Rows at once and passes that make up so many sequences."""
    return even_split(sequences, largest, on_gpu=draft.on_gpu)


def pass_seconds_of(draft: PlanDraft, work: Workload, passes: int) -> PassSeconds | None:
    """What one of so many passes of a step takes; None where the card's peak is not known."""
    peak = peaks_of(draft, work.precision)[0] if draft.on_gpu else None
    if peak is None:
        return None
    card = draft.target.card
    return pass_seconds(
        work,
        tokens=_pass_tokens(draft, work, passes),
        mean_tokens=draft.mean_document(work.row_tokens),
        peak=math.sqrt(peak[0] * peak[1]),
        bandwidth=card.bandwidth_gbs if card is not None else None,
        characters=draft.is_char_model,
    )


def _pass_tokens(draft: PlanDraft, work: Workload, passes: int) -> float:
    """Tokens that are computed in a pass: those of the rows where they are known, and what stays
    empty where all batches are of one width."""
    tokens, steps = total_tokens(draft), int(draft["length.total_steps"] or 0)
    if not tokens or not steps:
        return float(work.tokens)
    known = draft.survey.packed
    fixed = known is not None and (work.compiled or work.captured)
    fill = known.fill if fixed and known is not None else 1.0
    of_a_pass: float = tokens / steps / draft.cluster.ranks / passes / fill
    return min(float(work.tokens), of_a_pass)


def _timed(draft: PlanDraft, fit: Fit, sequences: int | None) -> Way:
    rows, passes = split_of(draft, most_of_a_rank(draft, sequences), fit.work.rows)
    return Way(
        fit=fit, passes=passes, time=pass_seconds_of(draft, replace(fit.work, rows=rows), passes)
    )


def _with_more_rows(draft: PlanDraft, way: Way, sequences: int | None) -> Way:
    """The way, or one with more rows at once and more blocks checkpointed where that is faster."""
    found, config, most = way, draft.config, most_of_a_rank(draft, sequences)
    measured = draft.measured("kernels.checkpointing") or draft.measured("batch.micro_batch")
    free = config.gradient_checkpointing == config.micro_batch_size == "auto" and not measured
    if not free or not way.fit.fits or way.time is None or way.fit.work.splits_weights:
        return way
    if way.fit.work.captured and drops(draft):  # then no block can be checkpointed
        return way
    budget = int(MARGIN * budget_of(draft))
    for rows in _more_rows(draft, way.fit.work.rows, most):
        work = replace(way.fit.work, rows=rows, accumulates=rows < most, recomputed_blocks=0)
        work = fewest_recomputed(draft, work, budget)
        if peak_bytes(draft, work) > budget or not has_host_memory(draft, work):
            break
        other = _timed(draft, Fit(work, True), sequences)
        at_once = split_of(draft, most, found.fit.work.rows)[0]
        taken = peak_bytes(draft, replace(found.fit.work, rows=at_once))
        unused = taken < LITTLE_USED * budget_of(draft)
        if other.step_seconds < (AS_FAST if unused else WORTH) * found.step_seconds:
            found = replace(other, checkpointed_for=rows)
    return found


def drops(draft: PlanDraft) -> bool:
    """Whether passes draw random numbers; the character model has a dropout of its own."""
    shape = draft.model.architecture
    return bool(draft["adapter.dropout"] or (shape is not None and shape.dropout))


def _more_rows(draft: PlanDraft, rows: int, most: int) -> Iterator[int]:
    """Micro-batches that are larger and divide a step evenly, from the smallest: some steps up,
    then twice as many each time."""
    before, largest = split_of(draft, most, rows)[0], rows
    for tried in range(2 * ROWS_TRIED):
        largest += 1 if tried < ROWS_TRIED else largest
        if largest > most:
            return
        micro, _ = split_of(draft, most, largest)
        if micro > max(rows, before):
            before = micro
            yield micro
