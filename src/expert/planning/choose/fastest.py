"""The fastest way through a step that fits: micro-batch size, checkpointing, CUDA graphs.

Larger micro-batches need fewer passes, each with a fixed cost; checkpointed blocks make room for
them and are computed twice. Captured passes need no launches but keep their memory. The speed of
each comes from the table in choose/rates.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from expert.manifest.schema.kinds import ADAPTERS, ON_POLICY, SPLITS_WEIGHTS
from expert.planning.choose.length import peak_flops, total_tokens
from expert.planning.choose.rates import COLD_COMPILE, MEASURED_CARD, PassSeconds, pass_seconds
from expert.planning.choose.sequences import (
    captured_fill,
    captured_flat,
    evaluated_sequences,
    occupied,
)
from expert.planning.decisions import Source
from expert.planning.draft import SET, PlanDraft
from expert.planning.memory.fitting import (
    CPU_TOKENS_PER_PASS,
    MARGIN,
    budget_of,
    even_split,
    find_fit,
    has_host_memory,
    peak_bytes,
    with_fewest_checkpointed,
)
from expert.planning.memory.workload import CAPTURED_WIDTHS, Workload
from expert.planning.survey import local_path, survey_file

WORTH = 0.98
"""A way that gives something up must be this much faster: the table is not more precise."""
LITTLE_USED = 0.8
AS_FAST = 1.02
"""If less than LITTLE_USED of the memory would be used, larger micro-batches are taken even if the
table rates them only equally fast: fewer passes depend less on the host."""
ROWS_TRIED = 8
# Measured over expected seconds of a step on the H200: 0.85 to 1.17 for the 29 recorded runs whose
# settings a plan would choose; up to 2.1 for those that waited for launches on shared cores.
EXPECTED, WAITING_FOR_LAUNCHES = (0.8, 1.3), 2.3
START_SECONDS = (10.0, 40.0)
"""Of whole runs, outside preparing, compiling and their steps (training-speed-h200.json)."""
EVALUATION = 0.4
"""Relative to training on as many tokens: a forward pass, in larger batches."""
GRAPHS = "kernels.cuda_graphs"
NOT_ENOUGH_MEMORY = "too little memory: captured passes keep theirs"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way through a step: a workload with as many rows as fit, or the smallest one."""

    work: Workload
    fits: bool
    passes: int
    time: PassSeconds | None
    """Of one pass; None if unknown."""
    checkpointed_for: int = 1
    """The micro-batch size that blocks are checkpointed for."""

    @property
    def step_seconds(self) -> float:
        return self.passes * self.time.seconds if self.time is not None else math.inf


Capture = tuple[bool, str, Source]
"""Whether passes are captured, why, and the source of that choice."""


def choose_capture(draft: PlanDraft, base: Workload, sequences: int | None) -> tuple[Way, Capture]:
    """The way through a step, captured if the manifest says so or if the GPU would wait for its
    host. `base`: compiled or not. Settles nothing."""
    asked, plain = draft.config.use_cuda_graphs, _fastest(draft, base, sequences)

    def no(because: str) -> tuple[Way, Capture]:
        return plain, (False, because, "fallback" if asked is True else "machine")

    if asked is False:
        return plain, (False, SET, "manifest")
    if obstacle := _obstacle_of(draft, plain.work):
        return no(obstacle)
    flat = not base.compiled and captured_flat(draft, base.attention)
    evaluated = evaluated_sequences(draft)
    captured = replace(
        base,
        captured=True,
        widths=CAPTURED_WIDTHS if flat else 1,
        evaluated_rows=(evaluated and evaluated[0]) if draft.evaluates else 0,
        evaluated_row_tokens=draft["data.max_seq_length"],
    )
    way = _fastest(draft, captured, sequences)
    # It must fit with the same quantisation and engine, and be possible to capture.
    work, before = way.work, plain.work
    has_room = way.fits or not plain.fits
    has_room &= (work.quantization, work.engine) == (before.quantization, before.engine)
    has_room &= not _obstacle_of(draft, work)
    if asked is True:
        return (way, (True, SET, "manifest")) if has_room else no(NOT_ENOUGH_MEMORY)
    if draft.config.deterministic:
        return no("a resumed run starts uncaptured: the bits might differ")
    if plain.time is None:
        return no("the compute time of a pass is not known")
    computing, launching = 1e3 * plain.time.computing, 1e3 * plain.time.launching
    times = f"about {computing:.0f} ms of compute, {launching:.0f} ms of launches per pass"
    saved = 1 - way.step_seconds / plain.step_seconds
    if has_room and way.step_seconds < WORTH * plain.step_seconds:
        return way, (True, f"expected to save {saved:.0%} of the time: {times}", "machine")
    if WORTH * launching <= computing:
        return no(f"the host keeps up: {times}")
    return no(f"{NOT_ENOUGH_MEMORY}; what still fits is no faster ({times})")


def settle_graphs(draft: PlanDraft, chosen: Capture | None) -> None:
    """Record whether passes are captured. `chosen`: None for a model of unknown size, which is
    captured only if the manifest says so."""
    asked = draft.config.use_cuda_graphs
    if chosen is not None:
        value, because, source = chosen
    else:
        recomputes, compiled = draft["kernels.checkpointing"] != "none", draft["kernels.compile"]
        engine = draft["parallel.engine"]
        obstacle = _obstacle(draft, engine=engine, recomputes=recomputes, compiled=compiled)
        value, because, source = asked is True and not obstacle, SET, "manifest"
        if asked is True and obstacle:
            because, source = obstacle, "fallback"
        elif asked == "auto":
            because, source = obstacle or "the compute time of a pass is not known", "machine"
    draft.settle(GRAPHS, value, because, source)
    if asked is True and not value:
        draft.warn(GRAPHS, f"use_cuda_graphs: true, but {because}")


def _obstacle_of(draft: PlanDraft, work: Workload) -> str:
    recomputes = work.recomputed_blocks > 0
    return _obstacle(draft, engine=work.engine, recomputes=recomputes, compiled=work.compiled)


def _obstacle(draft: PlanDraft, *, engine: str, recomputes: bool, compiled: bool) -> str:
    """Why passes cannot be captured at all, or ""."""
    if not draft.on_gpu:
        return "CUDA graphs need a GPU"
    if draft.config.method == ON_POLICY:
        return "answers vary in length: each batch has a width of its own"
    shape = draft.resolved.shape
    if shape is not None and shape.untried:
        return f"they were not tried with {shape.untried}"
    if engine in SPLITS_WEIGHTS:
        return "sharded weights are gathered for each pass, which is not captured"
    if not (draft.packed or draft.is_char_model):
        return "padded rows vary in width: each width would be captured again"
    adapter = ADAPTERS.get(draft.config.adapter_type)
    if adapter is not None and adapter.not_captured:
        return adapter.not_captured
    if recomputes and _draws_random_numbers(draft):
        return "checkpointed blocks with dropout save the random state, which a graph cannot"
    mode = draft.config.torch_compile_mode
    if compiled and mode in ("reduce-overhead", "max-autotune"):
        return f"torch_compile_mode {mode} captures graphs of its own"
    return ""


def _draws_random_numbers(draft: PlanDraft) -> bool:
    """Whether blocks use dropout; the character model has its own."""
    shape = draft.model.architecture
    return bool(draft["adapter.dropout"] or (shape is not None and shape.dropout))


# --- the fastest micro-batch ---------------------------------------------------------------------


def _fastest(draft: PlanDraft, base: Workload, sequences: int | None) -> Way:
    """The fastest way that fits, compiled and captured or not as in `base`: with what fits without
    giving anything up, or with a larger micro-batch and more checkpointed blocks. `sequences`: per
    step, if known."""
    most, config = max_rank_sequences(draft, sequences), draft.config

    def timed(work: Workload, *, fits: bool, rows: int = 1) -> Way:
        micro, passes = even_split(most, work.rows, on_gpu=draft.on_gpu)
        time = pass_seconds_of(draft, replace(work, rows=micro), passes)
        return Way(work=work, fits=fits, passes=passes, time=time, checkpointed_for=rows)

    limit = pass_limit(draft, base.row_tokens, most)
    smallest, fits = find_fit(draft, base, most, limit=limit)
    way = best = timed(smallest, fits=fits)
    free = config.gradient_checkpointing == config.micro_batch_size == "auto"
    if not free or not fits or way.time is None or smallest.is_sharded:
        return way
    if smallest.captured and _draws_random_numbers(draft):  # blocks cannot be checkpointed
        return way
    budget = int(MARGIN * budget_of(draft))
    for rows in _more_rows(draft, smallest.rows, most):
        work = replace(smallest, rows=rows, accumulates=rows < most, recomputed_blocks=0)
        work = with_fewest_checkpointed(draft, work, budget)
        if peak_bytes(draft, work) > budget or not has_host_memory(draft, work):
            break
        other = timed(work, fits=True, rows=rows)
        micro = even_split(most, best.work.rows, on_gpu=draft.on_gpu)[0]
        taken = peak_bytes(draft, replace(best.work, rows=micro))
        unused = taken < LITTLE_USED * budget_of(draft)
        if other.step_seconds < (AS_FAST if unused else WORTH) * best.step_seconds:
            best = other
    return best


def max_rank_sequences(draft: PlanDraft, sequences: int | None) -> int:
    """The most sequences of a step that one rank computes."""
    examples = draft["batch.examples_per_update"]
    return draft.cluster.share_of(min(sequences or examples, examples))


def pass_limit(draft: PlanDraft, row_tokens: int, most: int) -> int:
    """How many of at most `most` sequences are worth computing in one pass: all on a GPU, and where
    the width of rows is unknown."""
    if draft.on_gpu or not (draft.packed or draft.is_char_model):
        return most
    return max(1, min(most, CPU_TOKENS_PER_PASS // row_tokens))


def pass_seconds_of(draft: PlanDraft, work: Workload, passes: int) -> PassSeconds | None:
    """The time of one of `passes` passes of a step; None if the card's peak is unknown."""
    peak = peak_flops(draft, work.precision) if draft.on_gpu else None
    if peak is None:
        return None
    card = draft.target.card
    return pass_seconds(
        work,
        tokens=_pass_tokens(draft, work, passes),
        mean_tokens=draft.mean_document(work.row_tokens),
        peak=peak,
        bandwidth=card.bandwidth_gbs if card is not None else None,
        characters=draft.is_char_model,
    )


def _pass_tokens(draft: PlanDraft, work: Workload, passes: int) -> float:
    """Tokens computed in a pass: those of the rows if known, plus padding if all batches have one
    width."""
    tokens, steps = total_tokens(draft), int(draft["length.total_steps"] or 0)
    if not tokens or not steps:
        return float(work.tokens)
    known = draft.packed_rows
    fill = 1.0
    if known is not None and (work.compiled or work.captured or work.attention == "flex"):
        fill = known.fill * occupied(draft, passes, work.rows)
        if work.widths > 1:  # which never hold more than sequences of one width do
            rows = draft["batch.examples_per_update"] / draft.cluster.ranks / passes
            fill = max(known.fill, captured_fill(rows))
    of_a_pass: float = tokens / steps / draft.cluster.ranks / passes / fill
    return min(float(work.tokens), of_a_pass)


def _more_rows(draft: PlanDraft, rows: int, most: int) -> Iterator[int]:
    """Larger micro-batch sizes that divide a step evenly, ascending: first one by one, then
    doubling."""
    before, largest = even_split(most, rows, on_gpu=draft.on_gpu)[0], rows
    for tried in range(2 * ROWS_TRIED):
        largest += 1 if tried < ROWS_TRIED else largest
        if largest > most:
            return
        micro, _ = even_split(most, largest, on_gpu=draft.on_gpu)
        if micro > max(rows, before):
            before = micro
            yield micro


# --- the whole run -------------------------------------------------------------------------------


def settle_expected_time(draft: PlanDraft, work: Workload | None) -> None:
    """The time from the start to the end of the run, as a range, on the card that was measured."""
    path, steps = "length.expected_seconds", draft["length.total_steps"]
    tokens = total_tokens(draft)
    passes = draft["batch.accumulation"] or 1
    card = draft.target.card
    time = pass_seconds_of(draft, work, passes) if work is not None else None
    if work is None:
        draft.unknown(draft.resolved.shape_from, path)
    elif not steps or not tokens:
        empty = draft["length.rows"] == 0
        draft.unknown("there are no rows" if empty else draft.survey.because, path)
    elif not card or card.slug != MEASURED_CARD or work.engine != "single" or time is None:
        draft.settle(path, None, "unknown until it runs: only single H200 cards were measured")
    else:
        least, most = EXPECTED
        if time.launching > time.computing:
            most = WAITING_FOR_LAUNCHES
        trained = steps * passes * time.seconds
        held_out = (draft.survey.tokens or 0) * draft.dataset.validation_split
        if draft.dataset.validation_path:
            file = local_path(draft.dataset.validation_path, draft.folder)
            held_out = survey_file(file).tokens or 0
        strategy, every = draft["watch.evaluation_strategy"], draft["watch.eval_steps"]
        epochs = steps / draft["length.steps_per_epoch"] / draft["watch.eval_every_epochs"]
        times = 0 if strategy == "no" else max(1, math.ceil(epochs))
        if strategy == "steps" and every:
            times = steps // every + 1
        trained *= 1 + EVALUATION * times * held_out / tokens
        compiling = COLD_COMPILE if work.compiled else 0.0
        shortest = START_SECONDS[0] + 0.4 * compiling + least * trained
        longest = START_SECONDS[1] + 1.3 * compiling + most * trained
        because = "estimated from runs on an H200, without preparing the rows"
        draft.settle(path, (shortest, longest), because)
