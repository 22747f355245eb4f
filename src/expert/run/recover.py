"""What a run does about a failure: another plan, an earlier checkpoint, or a clear end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from expert.core.errors import EXIT_RUN_FAILED, ExpertError

if TYPE_CHECKING:
    from expert.data.feed.run_data import RunData
    from expert.planning.run_plan import RunPlan
    from expert.run.session import Session
    from expert.training.recorder import Trouble
    from expert.training.recovery import Failure
    from expert.training.spikes import Stability

SHOWN_ROWS = 10
# Other ways in which CUDA and the CPU's allocator say that there is no memory left.
NO_MEMORY = (
    "can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
NOT_DETERMINISTIC = "does not have a deterministic implementation"


class RunFailed(ExpertError):
    """A run that could not go on: what failed, and that nothing is left to try."""

    exit_code = EXIT_RUN_FAILED


def failure_of(
    error: BaseException,
    where: Literal["training", "evaluation", "probe"] = "training",
    plan: RunPlan | None = None,
) -> Failure | None:
    """What an exception means for the plan; None where another plan would not help."""
    from expert.model.attention import CUDNN_FAILED
    from expert.model.attention import KernelUnavailable as AttentionUnavailable
    from expert.parallel.graphs import GraphsUnavailable
    from expert.run.build import DoesNotRun
    from expert.training import recovery
    from expert.training.optim import OptimizerUnavailable

    # First of all, and however deep: compilers wrap what they raise when there is no memory left.
    full = next((one for one in _all_behind(error) if is_out_of_memory(one)), None)
    if full is not None:
        return recovery.OutOfMemory(where=where, message=str(full))
    for one in _chain(error):
        if isinstance(one, DoesNotRun):
            return one.failure
        if isinstance(one, AttentionUnavailable) or CUDNN_FAILED in str(one):
            return recovery.KernelUnavailable(kernel="attention", reason=str(one))
        if isinstance(one, GraphsUnavailable):
            return recovery.KernelUnavailable(kernel="cuda_graphs", reason=str(one))
        if isinstance(one, OptimizerUnavailable):
            return recovery.KernelUnavailable(kernel=one.optimizer, reason=one.reason)
        if _is_of_a_compiler(one):
            return _without_compiler(_said(one), plan)
        if NOT_DETERMINISTIC in str(one) and plan is not None and plan.kernels.deterministic:
            return recovery.KernelUnavailable(kernel="attention", reason=_said(one))
    return None


def _is_of_a_compiler(error: BaseException) -> bool:
    """Whether a graph or a kernel could not be compiled; Triton calls a C compiler for its own."""
    if type(error).__module__.startswith(COMPILERS):
        return True
    if isinstance(error, subprocess.CalledProcessError):
        return True
    return isinstance(error, RuntimeError) and "C compiler" in str(error)


def _without_compiler(reason: str, plan: RunPlan | None) -> Failure:
    """What still compiles is given up in turn: graphs, flex attention, the kernel of the loss."""
    from expert.training import recovery

    if plan is None or plan.kernels.compile:
        return recovery.CompileFailed(reason=reason)
    kernel = "attention" if plan.kernels.attention == "flex" else "fused_loss"
    return recovery.KernelUnavailable(kernel=kernel, reason=reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from, the outermost first."""
    while error is not None:
        yield error
        error = error.__cause__


def _all_behind(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and what was being handled then."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop(0)
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]


def _said(error: BaseException) -> str:
    """The sentence of an error; where its first line only announces the next, both."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def nothing_left(failure: Failure) -> str:
    """The last sentence of a run that has tried everything."""
    from expert.training.recovery import OutOfMemory

    first = str(getattr(failure, "message", None) or getattr(failure, "reason", failure))
    line = first.strip().splitlines()[0] if first.strip() else type(failure).__name__
    if isinstance(failure, OutOfMemory):
        where = "training" if failure.where == "probe" else failure.where
        fix = "a smaller model, a shorter max_seq_length, or quantization: int4"
        return f"out of memory in {where} with one sequence at a time: {line}  ({fix})"
    return f"{line}  (nothing is left to fall back to)"


def heal(session: Session, failure: Failure, *, torn: bool) -> None:
    """Take the next plan for the same update, or end with RunFailed."""
    from expert.training.recovery import OutOfMemory, plan_after

    if isinstance(failure, OutOfMemory) and session.blocks is not None:
        failure = replace(failure, blocks=session.blocks)
    after = plan_after(session.plan, failure)
    if after is None:
        session.emit("failed", step=session.state.done, error=nothing_left(failure))
        raise RunFailed(nothing_left(failure))
    change_over(session, after, failure, torn=torn)


def change_over(session: Session, after: RunPlan, failure: Any, *, torn: bool = False) -> None:
    """Take another plan, after the numbers of the updates before it were read and judged."""
    grave = _tell_late(session, session.recorder.settle())
    if grave is not None and grave[1] == "stop":
        recover(session, *grave, sound=not torn)
    fall_back(session, after, failure)
    if torn:
        session.emit("warning", text="an update broke off while it changed the weights")
    if grave is not None:
        recover(session, *grave)
    elif torn:
        from_step = session.state.done
        _go_back(session)
        _tell_back(session, from_step)


def _tell_late(session: Session, troubles: list[Trouble]) -> tuple[Trouble, str] | None:
    """Tell of every trouble; the first one that cannot be passed over, and its verdict."""
    from expert.training.loop import tell_trouble

    for trouble in troubles:
        verdict = session.verdict_on(trouble)
        tell_trouble(trouble, verdict, session.emit, lambda bins: rows_behind(session.data, bins))
        if verdict not in ("skip", "ignore"):
            return trouble, verdict
    return None


def try_another(session: Session, sign: Any) -> None:
    """Follow a sign that another plan would be better; the run goes on in any case."""
    from expert.training.recovery import DataBound, OutOfMemory, plan_after

    useless = isinstance(sign, DataBound) and not session.has_workers
    if isinstance(sign, OutOfMemory) and session.blocks is not None:
        sign = replace(sign, blocks=session.blocks)
    after = None if useless else plan_after(session.plan, sign)
    if after is not None:
        change_over(session, after, sign)
        return
    if isinstance(sign, DataBound):
        text = f"{sign.share:.0%} of the time goes on waiting for data, and nothing can be retuned"
    else:
        text = f"{type(sign).__name__}: no other plan helps, the run goes on as it is"
    session.warn_once(type(sign).__name__, text)


def fall_back(session: Session, after: RunPlan, failure: Any) -> None:
    """Take another plan for the same run; what was learnt so far stays."""
    from expert.training.recovery import changes

    made = changes(session.plan, after)
    session.emit(
        "fell_back",
        step=session.state.done,
        failure=type(failure).__name__,
        reason=made[0].because if made else "",
        changes=[decision.model_dump(mode="json") for decision in made],
    )
    session.change_plan(after, {decision.path for decision in made})


def recover(session: Session, trouble: Trouble, verdict: str, *, sound: bool = True) -> None:
    """Go back to the last checkpoint and pass over the rows that broke the run, or stop.

    `sound` says that no update broke off while it changed the weights.
    """
    from expert.training.recovery import NotFinite

    what, kept = trouble.what, ""
    if verdict in ("skip", "ignore"):
        return
    if verdict == "rollback":
        _roll_back(session, trouble, session.loop_plan().stability)
        return
    if isinstance(what, NotFinite):
        words = f"a loss or gradient of update {what.step + 1} is not finite"
        rows = rows_behind(session.data, what.bins)
        words += f"; rows {', '.join(map(str, rows))} were in it" if rows else ""
        kept = _kept(session, what.step) if sound else ""
    else:
        words = (
            f"the loss leapt to {what.loss:.3g} from {what.median:.3g} at update {what.step + 1}"
        )
    session.emit("stopped", step=session.state.done, reason=words, exit_code=EXIT_RUN_FAILED)
    raise RunFailed(
        f"{words}{kept}  (look at these rows, lower learning_rate or lengthen warmup_steps; "
        "on_not_finite, on_loss_spike and max_rollbacks say what is tried first)"
    )


def _kept(session: Session, step: int) -> str:
    """Save what was learnt so far, and say so: what is not finite has changed no weight."""
    from expert.training.checkpoint import CheckpointError, DiskFull

    _tell_late(session, session.recorder.settle())
    skipped = session.state.skipped.with_window(step, step)
    try:
        session.save(replace(session.state, skipped=skipped, **session.recorder.state()))
    except (CheckpointError, DiskFull) as error:
        session.emit("warning", step=session.state.done, text=f"nothing was saved: {error}")
        return ""
    return f"; a checkpoint after update {session.state.done} was saved, --resume goes on behind it"


def _roll_back(session: Session, trouble: Trouble, policy: Stability) -> None:
    """The last good checkpoint, without the updates of the trouble, and with a lower rate."""
    from expert.training.checkpoint import put_aside_after
    from expert.training.recovery import LossSpike
    from expert.training.schedule import after_rollback, rollbacks_of

    first, last = trouble.what.step, max(trouble.what.step, session.state.done - 1)
    if isinstance(trouble.what, LossSpike):
        # A loss is that of the weights before its update: those at the first high loss were broken
        # already, most likely by the update before.
        first = max(0, first - 1)
        put_aside_after(session.checkpoints.folder, first)
    skipped = session.state.skipped.with_window(first, last)
    rollbacks = session.state.rollbacks + 1
    schedule = session.loop_plan().schedule
    from_step = session.state.done
    _go_back(session)
    at = session.state.done
    steps = policy.rewarm_steps(schedule.total_steps - at)
    schedule = after_rollback(schedule, at=at, rate_factor=policy.rate_factor, steps=steps)
    session.state = replace(
        session.state, skipped=skipped, rollbacks=rollbacks, schedule=rollbacks_of(schedule)
    )
    _tell_back(session, from_step)


def _tell_back(session: Session, from_step: int) -> None:
    session.emit(
        "rolled_back",
        step=session.state.done,
        from_step=from_step,
        to_step=session.state.done,
        skipped=session.state.skipped.to_json(),
        rate_factor=session.loop_plan().schedule.rate_factor,
    )


def _go_back(session: Session) -> None:
    """Stand where the newest good checkpoint does; without one the run begins anew."""
    from expert.training.state import TrainState

    found = session.checkpoints.newest()
    kept = session.state
    state = found.state if found is not None else TrainState()
    session.stand_at(
        replace(state, skipped=kept.skipped, rollbacks=kept.rollbacks, schedule=kept.schedule),
        found.groups if found is not None else None,
    )


def rows_behind(data: RunData, bins: tuple[int, ...], most: int = SHOWN_ROWS) -> list[int | str]:
    """Rows of the source, from 0, that the sequences were made of; none are known of a stream.

    Where several sources were mixed, the name of the prepared folder tells them apart.
    """
    split = data.train
    if split is None or not bins:
        return []
    index, store = split.index, split.open()
    sizes = [prepared.statistics.documents for prepared in split.folders]
    found: dict[int | str, None] = {}
    for number in bins:
        for piece in range(index.bin_offsets[number], index.bin_offsets[number + 1]):
            document = int(index.piece_document[piece])
            row: int | str = store.row(document)
            if len(sizes) > 1:
                row = f"{_folder_of(split.folders, sizes, document)}:{row}"
            found[row] = None
            if len(found) == most:
                return list(found)
    return list(found)


def _folder_of(folders: Any, sizes: list[int], document: int) -> str:
    for prepared, size in zip(folders, sizes, strict=True):
        if document < size:
            return str(prepared.folder.name)
        document -= size
    raise IndexError(document)
