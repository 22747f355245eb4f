"""Whether forward and backward are recorded as CUDA graphs: where launching takes longer."""

from __future__ import annotations

from expert.planning.choose.kernels import LIKELY_SHARE_OF_PEAK
from expert.planning.choose.length import peak_flops
from expert.planning.decisions import Ledger
from expert.planning.memory.fitting import budget_of, peak_bytes
from expert.planning.memory.memory import resting_bytes
from expert.planning.memory.workload import Workload, flops_per_token
from expert.planning.situation import Situation

PATH = "kernels.cuda_graphs"
# Seconds to launch the kernels of one block, forward and backward, on an H200 with a slow host:
# LoRA on all projections 232 ms for 30 blocks (docs/benchmarks/small-updates-h200.json), 414
# for 28 (planted-faults-h200.json, slow copies), 14.3 ms for the 6 of the character GPT
# (char-gpt-h200.json). Other hosts are faster; to record what did not need it costs little.
LAUNCH_SECONDS = {"adapter": 0.011, "plain": 0.0024}
COMPILED_SHARE = 0.5
"""What is left of that where blocks are compiled: fewer kernels, but a graph to call for each (109
of the 232 ms)."""


def choose_graphs(
    now: Situation, ledger: Ledger, work: Workload | None, *, packed: bool, compiled: bool
) -> bool:
    """Recorded where the manifest says so, or where the card would wait for its host."""
    asked = now.config.use_cuda_graphs
    obstacle = _cannot_record(now, ledger, packed=packed)
    if asked is False:
        ledger.settle(PATH, False, "set in the manifest", "manifest")
    elif obstacle:
        ledger.settle(PATH, False, obstacle, "machine" if asked == "auto" else "fallback")
        if asked is True:
            ledger.warn(PATH, f"use_cuda_graphs was asked for, but {obstacle}")
    elif asked is True:
        ledger.settle(PATH, True, "set in the manifest", "manifest")
    elif now.config.deterministic:
        because = "a resumed run begins with passes that are not recorded: the bits might differ"
        ledger.settle(PATH, False, because, "machine")
    elif (found := now.measured(PATH)) is not None:
        ledger.settle(PATH, *found, "measurement")
    else:
        ledger.settle(PATH, *_pays(now, work, compiled=compiled), "machine")
    return bool(ledger.decisions[PATH].value)


def _cannot_record(now: Situation, ledger: Ledger, *, packed: bool) -> str:
    """Why passes cannot be recorded at all, or nothing."""
    if not now.on_gpu:
        return "only CUDA has graphs"
    if not (packed or now.is_char_model):
        return "widths of padded rows vary: each would be recorded anew"
    if now.config.adapter_type == "adalora":
        return "AdaLoRA's penalty counts the targets of every batch"
    recomputes = ledger.decisions["kernels.checkpointing"].value != "none"
    drops = ledger.decisions["adapter.dropout"].value or _drops_of_itself(now)
    if recomputes and drops:
        return "recomputed blocks that draw dropout save the random state, which no graph can"
    mode = ledger.decisions["kernels.compile_mode"].value
    if ledger.decisions["kernels.compile"].value and mode in ("reduce-overhead", "max-autotune"):
        return f"torch_compile_mode {mode} records graphs of its own"
    return ""


def _drops_of_itself(now: Situation) -> bool:
    """Whether the character model draws dropout: its own, not that of an adapter."""
    shape = now.model.architecture
    return shape is not None and bool(shape.dropout)


def _pays(now: Situation, work: Workload | None, *, compiled: bool) -> tuple[bool, str]:
    """Whether launching would take longer than computing, and there is memory to spare: recorded
    passes keep theirs, while an evaluation or a batch of another shape needs as much again."""
    peak = peak_flops(now, work.precision) if work is not None else None
    if work is None or peak is None:
        return False, "how long a pass computes is not known"
    kind = "plain" if work.adapter in ("full", "none") else "adapter"
    launching = LAUNCH_SECONDS[kind] * work.shape.layers * (COMPILED_SHARE if compiled else 1)
    mean = min(now.survey.mean_tokens or work.row_tokens, work.row_tokens)
    computing = work.tokens * flops_per_token(work, mean) / (LIKELY_SHARE_OF_PEAK * peak)
    times = f"computing about {1e3 * computing:.0f} ms, launching up to {1e3 * launching:.0f}"
    if computing >= launching:
        return False, f"the host keeps up: a pass takes {times}"
    if 2 * peak_bytes(now, work) - resting_bytes(work) > budget_of(now):
        return False, f"memory is short for it: recorded passes keep theirs ({times})"
    return True, f"the card would wait for its host: {times}"
