"""Whether forward and backward are captured as CUDA graphs: where launching takes longer."""

from __future__ import annotations

from expert.manifest.schema.kinds import ADAPTERS
from expert.planning.choose.length import likely_pass_seconds
from expert.planning.draft import SET, PlanDraft
from expert.planning.memory.fitting import budget_of, peak_bytes
from expert.planning.memory.memory import resting_bytes
from expert.planning.memory.workload import Workload

PATH = "kernels.cuda_graphs"
# Seconds to launch the kernels of one block, forward and backward, on an H200 with a slow host:
# LoRA on all projections 232 ms for 30 blocks (docs/benchmarks/small-updates-h200.json), 414
# for 28 (planted-faults-h200.json, slow copies), 14.3 ms for the 6 of the character GPT
# (char-gpt-h200.json). Other hosts are faster; capturing without need costs little.
LAUNCH_SECONDS = {"adapter": 0.011, "plain": 0.0024}
COMPILED_SHARE = 0.5
"""What is left of that where blocks are compiled: fewer kernels, but a graph to call for each (109
of the 232 ms)."""


def choose_graphs(draft: PlanDraft, work: Workload | None) -> None:
    """Captured where the manifest says so, or where the GPU would wait for its host."""
    asked = draft.config.use_cuda_graphs
    obstacle = _cannot_capture(draft)
    if asked is False:
        draft.settle(PATH, False, SET, "manifest")
    elif obstacle:
        draft.settle(PATH, False, obstacle, "machine" if asked == "auto" else "fallback")
        if asked is True:
            draft.warn(PATH, f"use_cuda_graphs: true, but {obstacle}")
    elif asked is True:
        draft.settle(PATH, True, SET, "manifest")
    elif draft.config.deterministic:
        draft.settle(PATH, False, "a resumed run starts uncaptured: the bits might differ")
    elif (found := draft.measured(PATH)) is not None:
        draft.settle(PATH, *found, "measurement")
    else:
        draft.settle(PATH, *_pays(draft, work))


def _cannot_capture(draft: PlanDraft) -> str:
    """Why passes cannot be captured at all, or nothing."""
    if not draft.on_gpu:
        return "CUDA graphs need a GPU"
    if draft["parallel.engine"] == "sharded":
        return "sharded weights are gathered for each pass, which is not captured"
    if not (draft.packed or draft.is_char_model):
        return "padded rows vary in width: each width would be captured again"
    adapter = ADAPTERS.get(draft.config.adapter_type)
    if adapter is not None and adapter.not_captured:
        return adapter.not_captured
    shape = draft.model.architecture  # the character model has a dropout of its own
    drops = draft["adapter.dropout"] or (shape is not None and bool(shape.dropout))
    if draft["kernels.checkpointing"] != "none" and drops:
        return "checkpointed blocks with dropout save the random state, which a graph cannot"
    mode = draft["kernels.compile_mode"]
    if draft["kernels.compile"] and mode in ("reduce-overhead", "max-autotune"):
        return f"torch_compile_mode {mode} captures graphs of its own"
    return ""


def _pays(draft: PlanDraft, work: Workload | None) -> tuple[bool, str]:
    """Whether launching would take longer than computing, and there is memory to spare: captured
    passes keep theirs, while an evaluation or a batch of another shape needs as much again."""
    computing = likely_pass_seconds(draft, work) if work is not None else None
    if work is None or computing is None:
        return False, "the compute time of a pass is not known"
    kind = "plain" if work.adapter in ("full", "none") else "adapter"
    share = COMPILED_SHARE if draft["kernels.compile"] else 1
    launching = LAUNCH_SECONDS[kind] * work.shape.layers * share
    times = f"about {1e3 * computing:.0f} ms of compute, up to {1e3 * launching:.0f} ms of launches"
    if computing >= launching:
        return False, f"the host keeps up: {times} per pass"
    if 2 * peak_bytes(draft, work) - resting_bytes(work) > budget_of(draft):
        return False, f"too little memory: captured passes keep theirs ({times} per pass)"
    return True, f"the GPU would wait for its host: {times} per pass"
