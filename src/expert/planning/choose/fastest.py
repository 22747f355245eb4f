"""The fastest way through a step that fits: micro-batch size, checkpointing, CUDA graphs.

Larger micro-batches need fewer passes, each with a fixed cost; checkpointed blocks make room for
them and are computed twice. Captured passes need no launches but keep their memory. The speed of
each comes from the table in choose/rates.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from expert.planning.choose.length import peaks_of, total_tokens
from expert.planning.choose.rates import PassSeconds, pass_seconds
from expert.planning.choose.sequences import captured_fill, occupied
from expert.planning.draft import PlanDraft
from expert.planning.memory.fitting import (
    MARGIN,
    Fit,
    budget_of,
    even_split,
    find_fit,
    has_host_memory,
    max_useful_batch,
    peak_bytes,
    with_fewest_checkpointed,
)
from expert.planning.memory.workload import Workload

WORTH = 0.98
"""A way that gives something up must be this much faster: the table is not more precise."""
LITTLE_USED = 0.8
AS_FAST = 1.02
"""If less than LITTLE_USED of the memory would be used, larger micro-batches are taken even if the
table rates them only equally fast: fewer passes depend less on the host."""
ROWS_TRIED = 8


@dataclass(frozen=True, kw_only=True)
class TimedFit:
    """A fitting workload, its passes per step, and the seconds of one; None if unknown."""

    fit: Fit
    passes: int
    time: PassSeconds | None
    checkpointed_for: int = 1
    """The micro-batch size that blocks are checkpointed for."""

    @property
    def step_seconds(self) -> float:
        return self.passes * self.time.seconds if self.time is not None else math.inf


def fastest_fit(draft: PlanDraft, base: Workload, sequences: int | None) -> TimedFit:
    """The fastest way that fits, compiled and captured or not as in `base`. `sequences`: per step,
    if known."""
    most = max_rank_sequences(draft, sequences)
    fit = find_fit(draft, base, most, limit=pass_limit(draft, base.row_tokens, most))
    return _with_more_rows(draft, _timed(draft, fit, sequences), sequences)


def max_rank_sequences(draft: PlanDraft, sequences: int | None) -> int:
    """The most sequences of a step that one rank computes."""
    examples = draft["batch.examples_per_update"]
    return draft.cluster.share_of(min(sequences or examples, examples))


def pass_limit(draft: PlanDraft, row_tokens: int, most: int) -> int:
    """How many of at most `most` sequences are worth computing in one pass."""
    even = draft.packed or draft.is_char_model
    return max_useful_batch(on_gpu=draft.on_gpu, even=even, row_tokens=row_tokens, most=most)


def micro_batch_split(draft: PlanDraft, sequences: int, largest: int) -> tuple[int, int]:
    """The micro-batch size and the passes that make up `sequences`."""
    return even_split(sequences, largest, on_gpu=draft.on_gpu)


def pass_seconds_of(draft: PlanDraft, work: Workload, passes: int) -> PassSeconds | None:
    """The time of one of `passes` passes of a step; None if the card's peak is unknown."""
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
    """Tokens computed in a pass: those of the rows if known, plus padding if all batches have one
    width."""
    tokens, steps = total_tokens(draft), int(draft["length.total_steps"] or 0)
    if not tokens or not steps:
        return float(work.tokens)
    known = draft.survey.packed
    fill = 1.0
    fixed = work.compiled or work.captured or work.attention == "flex"
    if known is not None and fixed:
        if work.widths == 1:
            fill = known.fill * occupied(draft, passes, work.rows)
        else:
            rows = draft["batch.examples_per_update"] / draft.cluster.ranks / passes
            # The widths never hold more than sequences of one width do.
            fill = max(known.fill, captured_fill(rows))
    of_a_pass: float = tokens / steps / draft.cluster.ranks / passes / fill
    return min(float(work.tokens), of_a_pass)


def _timed(draft: PlanDraft, fit: Fit, sequences: int | None) -> TimedFit:
    rows, passes = micro_batch_split(draft, max_rank_sequences(draft, sequences), fit.work.rows)
    return TimedFit(
        fit=fit, passes=passes, time=pass_seconds_of(draft, replace(fit.work, rows=rows), passes)
    )


def _with_more_rows(draft: PlanDraft, way: TimedFit, sequences: int | None) -> TimedFit:
    """The way, or a faster one with a larger micro-batch and more checkpointed blocks."""
    best, config, most = way, draft.config, max_rank_sequences(draft, sequences)
    measured = draft.measured("kernels.checkpointing") or draft.measured("batch.micro_batch")
    free = config.gradient_checkpointing == config.micro_batch_size == "auto" and not measured
    if not free or not way.fit.fits or way.time is None or way.fit.work.is_sharded:
        return way
    if way.fit.work.captured and uses_dropout(draft):  # then blocks cannot be checkpointed
        return way
    budget = int(MARGIN * budget_of(draft))
    for rows in _more_rows(draft, way.fit.work.rows, most):
        work = replace(way.fit.work, rows=rows, accumulates=rows < most, recomputed_blocks=0)
        work = with_fewest_checkpointed(draft, work, budget)
        if peak_bytes(draft, work) > budget or not has_host_memory(draft, work):
            break
        other = _timed(draft, Fit(work, True), sequences)
        micro = micro_batch_split(draft, most, best.fit.work.rows)[0]
        taken = peak_bytes(draft, replace(best.fit.work, rows=micro))
        unused = taken < LITTLE_USED * budget_of(draft)
        if other.step_seconds < (AS_FAST if unused else WORTH) * best.step_seconds:
            best = replace(other, checkpointed_for=rows)
    return best


def uses_dropout(draft: PlanDraft) -> bool:
    """Whether blocks draw random numbers; the character model has its own dropout."""
    shape = draft.model.architecture
    return bool(draft["adapter.dropout"] or (shape is not None and shape.dropout))


def _more_rows(draft: PlanDraft, rows: int, most: int) -> Iterator[int]:
    """Larger micro-batch sizes that divide a step evenly, ascending: first one by one, then
    doubling."""
    before, largest = micro_batch_split(draft, most, rows)[0], rows
    for tried in range(2 * ROWS_TRIED):
        largest += 1 if tried < ROWS_TRIED else largest
        if largest > most:
            return
        micro, _ = micro_batch_split(draft, most, largest)
        if micro > max(rows, before):
            before = micro
            yield micro
