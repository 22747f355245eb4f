"""Whether forward and backward are captured as CUDA graphs: where launches limit the speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from expert.manifest.schema.kinds import ADAPTERS, SPLITS_WEIGHTS
from expert.planning.choose.fastest import WORTH, TimedFit, fastest_fit, uses_dropout
from expert.planning.choose.sequences import captured_flat
from expert.planning.decisions import Source
from expert.planning.draft import SET, PlanDraft
from expert.planning.memory.workload import CAPTURED_WIDTHS, Workload

PATH = "kernels.cuda_graphs"
NOT_ENOUGH_MEMORY = "too little memory: captured passes keep theirs"


@dataclass(frozen=True, kw_only=True)
class CaptureChoice:
    """Whether passes are captured, why, and the resulting way through a step."""

    way: TimedFit
    value: bool
    because: str
    source: Source = "machine"
    warning: str = ""


def choose_capture(draft: PlanDraft, base: Workload, sequences: int | None) -> CaptureChoice:
    """Capture if the manifest says so, or if the GPU would wait for its host. `base`: compiled or
    not. Settles nothing."""
    asked, plain = draft.config.use_cuda_graphs, fastest_fit(draft, base, sequences)

    def no(because: str, source: Source = "machine") -> CaptureChoice:
        warning = ""
        if asked is True:
            source, warning = "fallback", f"use_cuda_graphs: true, but {because}"
        return CaptureChoice(
            way=plain, value=False, because=because, source=source, warning=warning
        )

    if asked is False:
        return no(SET, "manifest")
    obstacle = _obstacle(draft, plain.fit.work)
    if obstacle:
        return no(obstacle)
    captured = fastest_fit(draft, _captured(draft, base), sequences)
    has_room = _fits_captured(draft, captured, plain)
    measured = draft.measured(PATH)
    if asked is True:
        if not has_room:
            return no(NOT_ENOUGH_MEMORY)
        return CaptureChoice(way=captured, value=True, because=SET, source="manifest")
    if draft.config.deterministic:
        return no("a resumed run starts uncaptured: the bits might differ")
    if measured is not None and measured[0] and not has_room:
        return no(NOT_ENOUGH_MEMORY)
    if measured is not None:
        way = captured if measured[0] else plain
        return CaptureChoice(way=way, value=measured[0], because=measured[1], source="measurement")
    if plain.time is None:
        return no("the compute time of a pass is not known")
    computing, launching = 1e3 * plain.time.computing, 1e3 * plain.time.launching
    times = f"about {computing:.0f} ms of compute, {launching:.0f} ms of launches per pass"
    saved = 1 - captured.step_seconds / plain.step_seconds
    if has_room and captured.step_seconds < WORTH * plain.step_seconds:
        because = f"expected to save {saved:.0%} of the time: {times}"
        return CaptureChoice(way=captured, value=True, because=because)
    if WORTH * launching <= computing:
        return no(f"the host keeps up: {times}")
    if not has_room:
        return no(f"{NOT_ENOUGH_MEMORY} ({times})")
    return no(
        f"captured passes keep their memory: with what still fits they are no faster ({times})"
    )


def _captured(draft: PlanDraft, base: Workload) -> Workload:
    """The captured workload, with an evaluation beside it."""
    asked = draft.config.eval_batch_size
    flat = not base.compiled and captured_flat(draft, base.attention)
    return replace(
        base,
        captured=True,
        widths=CAPTURED_WIDTHS if flat else 1,
        evaluated_rows=None if asked == "auto" else asked,
        evaluated_row_tokens=draft["data.max_seq_length"],
    )


def _fits_captured(draft: PlanDraft, captured: TimedFit, plain: TimedFit) -> bool:
    """Whether the captured way fits with the same quantisation and engine, and can be captured."""
    work, before = captured.fit.work, plain.fit.work
    same = (work.quantization, work.engine) == (before.quantization, before.engine)
    fits = captured.fit.fits or not plain.fit.fits
    return fits and same and not _obstacle(draft, work)


def settle_graphs_without_sizes(draft: PlanDraft) -> None:
    """For a model of unknown size: as the manifest says, else no graphs."""
    asked = draft.config.use_cuda_graphs
    obstacle = _cannot_capture(
        draft,
        engine=draft["parallel.engine"],
        recomputes=draft["kernels.checkpointing"] != "none",
        compiled=draft["kernels.compile"],
    )
    if asked is True and obstacle:
        draft.settle(PATH, False, obstacle, "fallback")
        draft.warn(PATH, f"use_cuda_graphs: true, but {obstacle}")
    elif asked != "auto":
        draft.settle(PATH, asked, SET, "manifest")
    else:
        draft.settle(PATH, False, obstacle or "the compute time of a pass is not known")


def _obstacle(draft: PlanDraft, work: Workload) -> str:
    recomputes = work.recomputed_blocks > 0
    return _cannot_capture(draft, engine=work.engine, recomputes=recomputes, compiled=work.compiled)


def _cannot_capture(draft: PlanDraft, *, engine: str, recomputes: bool, compiled: bool) -> str:
    """Why passes cannot be captured at all, or ""."""
    if not draft.on_gpu:
        return "CUDA graphs need a GPU"
    if engine in SPLITS_WEIGHTS:
        return "sharded weights are gathered for each pass, which is not captured"
    if not (draft.packed or draft.is_char_model):
        return "padded rows vary in width: each width would be captured again"
    adapter = ADAPTERS.get(draft.config.adapter_type)
    if adapter is not None and adapter.not_captured:
        return adapter.not_captured
    if recomputes and uses_dropout(draft):
        return "checkpointed blocks with dropout save the random state, which a graph cannot"
    mode = draft.config.torch_compile_mode
    if compiled and mode in ("reduce-overhead", "max-autotune"):
        return f"torch_compile_mode {mode} captures graphs of its own"
    return ""
