"""Whether blocks are compiled: if the whole run ends sooner, compile time included."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from expert.core.text import counted
from expert.planning.choose.cuda_graphs import choose_capture
from expert.planning.choose.fastest import micro_batch_split
from expert.planning.choose.length import total_tokens
from expert.planning.choose.sequences import FULL_ENOUGH
from expert.planning.compilations import CompileSeconds, expected_compile
from expert.planning.decisions import Source
from expert.planning.draft import SET, PlanDraft
from expert.planning.machine.cards import VOLTA
from expert.planning.measurements import ranks_of, similar_row_length
from expert.planning.memory.workload import Workload

PATH = "kernels.compile"
STEP = "batch.examples_per_update"
FEW_EXAMPLES = 1000
FEW_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class CompileComparison:
    """Training time of the whole run, eager and compiled, and the compile time."""

    eager: float
    compiled: float
    compiling: CompileSeconds
    measured: bool

    @property
    def pays(self) -> bool:
        return self.compiled + self.compiling.seconds < self.eager

    @property
    def words(self) -> str:
        took, total = self.compiling.seconds, self.compiled + self.compiling.seconds
        of_it = f"{took:.0f} s of it compiling"
        if self.compiling.warm:
            of_it += " from torch's cache"
        return f"about {total:.0f} s compiled, {of_it}, and {self.eager:.0f} s uncompiled"


def choose_compile(draft: PlanDraft, work: Workload | None, sequences: int | None) -> None:
    """Per-block compilation where it pays; `sequences`: per step, if known."""
    config = draft.config
    padded = not draft.packed and not draft.is_char_model  # character blocks have one length
    obstacle = _cannot_compile(draft)
    if config.torch_compile != "auto":
        draft.settle(PATH, config.torch_compile, SET, "manifest")
        if config.torch_compile and obstacle:
            draft.warn(PATH, f"{obstacle}: compilation may fall back")
        if config.torch_compile and padded:
            text = "padded rows vary in width, and each width is compiled again: use packing"
            draft.warn(PATH, text)
    elif draft["kernels.fused_blocks"]:
        draft.settle(PATH, False, "fused blocks need no compiling")
    elif draft.kept.attention == "flash4" and config.attention == "auto":
        draft.settle(
            PATH, False, "FlashAttention 4, which the run keeps, does not work in compiled blocks"
        )
    elif obstacle or padded:
        obstacle = obstacle or "padded rows vary in width: each width would be compiled again"
        draft.settle(PATH, False, obstacle)
    else:
        _settle_by_time(draft, work, sequences)
    because = "more effort gains little on single blocks"
    draft.choose("kernels.compile_mode", "torch_compile_mode", "default", because, "preset")
    draft.settle_from_config("kernels.compile_backend", "torch_compile_backend")


def _cannot_compile(draft: PlanDraft) -> str:
    """Why compilation does not work or pay here at all, or ""."""
    if not draft.on_gpu:
        return "compiling is not worth it on a CPU"
    if draft.target.windows:
        return "Triton does not ship for Windows"
    if not draft.has_capability(VOLTA):
        return f"{draft.card_label} is older than Triton supports (7.0)"
    return ""


def _settle_by_time(draft: PlanDraft, work: Workload | None, sequences: int | None) -> None:
    measured = draft.measured(PATH)
    seconds = _seconds(draft, work, sequences)
    if measured is not None and (not measured[0] or seconds is None or seconds.pays):
        draft.settle(PATH, *measured, "measurement")
    elif seconds is not None:
        source: Source = "measurement" if seconds.measured else "machine"
        known, because = draft.survey.packed, seconds.words
        if known is not None and known.fill < FULL_ENOUGH:
            because += f" (sequences are {known.fill:.0%} full, compiled batches of one width)"
        draft.settle(PATH, seconds.pays, because, source)
    else:
        short = _too_short(draft)
        because = "fixed shapes: 1.2-2.2x as fast on an H200, after about 30 s of compiling"
        draft.settle(PATH, not short, short or because)


def _too_short(draft: PlanDraft) -> str:
    """Why a run of unknown duration is too short anyway, or ""."""
    steps, rows = draft["length.total_steps"], draft.survey.rows
    if steps is not None and steps < FEW_STEPS:
        return f"the run is too short: {counted(steps, 'step')}"
    if rows is not None and rows * draft.config.epochs < FEW_EXAMPLES:
        return f"the run is too short: {counted(rows, 'row')}"
    return ""


def _seconds(
    draft: PlanDraft, work: Workload | None, sequences: int | None
) -> CompileComparison | None:
    """Both times of the whole run; None if the rows, the model or the card are unknown."""
    tokens, steps = total_tokens(draft), draft["length.total_steps"]
    if work is None or not tokens or not steps:
        return None
    ways = [
        choose_capture(draft, replace(work, compiled=compiled), sequences).way
        for compiled in (False, True)
    ]
    rates = [_measured_rate(draft, compiled=compiled) for compiled in (False, True)]
    known = [tokens / (rate * draft.cluster.ranks) if rate else None for rate in rates]
    eager, compiled = (steps * way.step_seconds for way in ways)
    if math.isinf(eager + compiled) and None in known:
        return None
    # If one of the two was measured, scale the other by the ratio of the table.
    times = next((k / t for k, t in zip(known, (eager, compiled), strict=True) if k), 1.0)
    return CompileComparison(
        eager=known[0] or times * eager,
        compiled=known[1] or times * compiled,
        compiling=compile_time(draft, ways[1].fit.work),
        measured=None not in known,
    )


def compile_time(draft: PlanDraft, work: Workload) -> CompileSeconds:
    """The expected compile time here."""
    share = draft.cluster.share_of(draft["batch.sequences_per_update"] or work.rows)
    shape = replace(work, rows=micro_batch_split(draft, share, work.rows)[0])
    known = draft.compilations if draft.target.is_this_machine else ()
    return expected_compile(known, shape, draft.card_key)


def _measured_rate(draft: PlanDraft, *, compiled: bool) -> float | None:
    """Tokens per second per device in measured runs with similar steps, compiled or not; else from
    the benchmark that compared the two."""
    wanted = draft.rate_key(draft.model.quantization)
    settled = {PATH: compiled, STEP: draft[STEP]}
    for rate in reversed(draft.rates):
        alike = rate.row_tokens is not None and similar_row_length(
            rate.row_tokens, draft.row_tokens
        )
        same = all(rate.settings.get(path) == value for path, value in settled.items())
        same &= not rate.settings.get("kernels.fused_blocks")
        if alike and same and ranks_of(rate) == 1 and rate.matches_shape(wanted):
            return rate.tokens_per_second
    best = draft.best
    if best is None or PATH not in best.settings:
        return None
    gain = best.gains.get(PATH)
    if best.settings[PATH] is compiled:
        return best.tokens_per_second
    return best.tokens_per_second / gain if gain and best.settings[PATH] else None
