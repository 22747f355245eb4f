"""Whether forward and backward are captured as CUDA graphs: where launching takes longer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from expert.core.text import counted
from expert.manifest.schema.kinds import ADAPTERS, SPLITS_WEIGHTS
from expert.planning.choose.fastest import WORTH, Way, drops, way_of
from expert.planning.decisions import Source
from expert.planning.draft import SET, PlanDraft
from expert.planning.memory.workload import Workload

PATH = "kernels.cuda_graphs"
NO_ROOM = "too little memory: captured passes keep theirs"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Whether passes are captured, why, and the way through a step that follows from it."""

    way: Way
    value: bool
    because: str
    source: Source = "machine"
    warning: str = ""


def choose_capture(draft: PlanDraft, base: Workload, sequences: int | None) -> Captured:
    """Captured where the manifest says so, or where the GPU would wait for its host. `base`:
    compiled or not; nothing is settled here."""
    asked, plain = draft.config.use_cuda_graphs, way_of(draft, base, sequences)

    def no(because: str, source: Source = "machine") -> Captured:
        warning = ""
        if asked is True:
            source, warning = "fallback", f"use_cuda_graphs: true, but {because}"
        return Captured(way=plain, value=False, because=because, source=source, warning=warning)

    if asked is False:
        return no(SET, "manifest")
    obstacle = _obstacle(draft, plain.fit.work)
    if obstacle:
        return no(obstacle)
    recorded = way_of(draft, _captured(draft, base), sequences)
    has_room = _has_room(draft, recorded, plain)
    found = draft.measured(PATH)
    if asked is True:
        if not has_room:
            return no(NO_ROOM)
        return Captured(way=recorded, value=True, because=SET, source="manifest")
    if draft.config.deterministic:
        return no("a resumed run starts uncaptured: the bits might differ")
    if found is not None and found[0] and not has_room:
        return no(NO_ROOM)
    if found is not None:
        way = recorded if found[0] else plain
        return Captured(way=way, value=found[0], because=found[1], source="measurement")
    if plain.time is None:
        return no("the compute time of a pass is not known")
    computing, launching = (1e3 * each for each in (plain.time.computing, plain.time.launching))
    times = f"about {computing:.0f} ms of compute, {launching:.0f} ms of launches per pass"
    if has_room and recorded.step_seconds < WORTH * plain.step_seconds:
        because = f"the GPU would wait for its host: {times}"
        if recorded.fit.work.rows != plain.fit.work.rows:
            rows = counted(recorded.fit.work.rows, "row")
            because = f"{rows} at once, captured, are faster than {times}"
        return Captured(way=recorded, value=True, because=because)
    if WORTH * launching <= computing:
        return no(f"the host keeps up: {times}")
    if not has_room:
        return no(f"{NO_ROOM} ({times})")
    rows = counted(recorded.fit.work.rows, "row")
    return no(f"captured passes keep their memory: {rows} at once would be no faster ({times})")


def _captured(draft: PlanDraft, base: Workload) -> Workload:
    """The same captured, with an evaluation beside it."""
    asked = draft.config.eval_batch_size
    return replace(
        base,
        captured=True,
        evaluated_rows=None if asked == "auto" else asked,
        evaluated_row_tokens=draft["data.max_seq_length"],
    )


def _has_room(draft: PlanDraft, recorded: Way, plain: Way) -> bool:
    """Whether what is captured fits with the same base and ranks, and can be captured."""
    one, other = recorded.fit.work, plain.fit.work
    same = (one.quantization, one.engine) == (other.quantization, other.engine)
    fits = recorded.fit.fits or not plain.fit.fits
    return fits and same and not _obstacle(draft, one)


def settle_graphs_without_sizes(draft: PlanDraft) -> None:
    """Of a model whose sizes are not known, as the manifest says, else not at all."""
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
    """Why passes cannot be captured at all, or nothing."""
    if not draft.on_gpu:
        return "CUDA graphs need a GPU"
    if engine in SPLITS_WEIGHTS:
        return "sharded weights are gathered for each pass, which is not captured"
    if not (draft.packed or draft.is_char_model):
        return "padded rows vary in width: each width would be captured again"
    adapter = ADAPTERS.get(draft.config.adapter_type)
    if adapter is not None and adapter.not_captured:
        return adapter.not_captured
    if recomputes and drops(draft):
        return "checkpointed blocks with dropout save the random state, which a graph cannot"
    mode = draft.config.torch_compile_mode
    if compiled and mode in ("reduce-overhead", "max-autotune"):
        return f"torch_compile_mode {mode} captures graphs of its own"
    return ""
