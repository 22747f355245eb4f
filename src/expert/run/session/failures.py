"""What an exception means for the plan of a run, and the end where nothing is left to try."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.run.build import DoesNotRun
from expert.training.recovery import Failure, OutOfMemory

if TYPE_CHECKING:
    from expert.planning.run_plan import RunPlan

# Other ways in which CUDA and the CPU's allocator report that there is no memory left.
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
    """A run that could not continue: what failed, and that nothing is left to try."""

    exit_code = EXIT_RUN_FAILED


def failure_of(
    error: BaseException,
    where: Literal["training", "evaluation", "probe"] = "training",
    plan: RunPlan | None = None,
) -> Failure | None:
    """What an exception means for the plan; None where another plan would not help."""
    from expert.data.feed.workers import WorkersUnavailable
    from expert.model.attention import CUDNN_FAILED
    from expert.model.attention import KernelUnavailable as AttentionUnavailable
    from expert.parallel.graphs import GraphsUnavailable
    from expert.parallel.group import PeerFailed
    from expert.training import recovery
    from expert.training.optim import OptimizerUnavailable

    # First of all, and however deep: compilers wrap what they raise when there is no memory left.
    full = next((one for one in _all_behind(error) if is_out_of_memory(one)), None)
    if full is not None:
        return recovery.OutOfMemory(where=where, message=str(full))
    for one in _chain(error):
        if isinstance(one, PeerFailed):
            return one.failure  # type: ignore[no-any-return]
        if isinstance(one, DoesNotRun):
            return one.failure
        if isinstance(one, AttentionUnavailable) or CUDNN_FAILED in str(one):
            return recovery.KernelUnavailable(kernel="attention", reason=str(one))
        if isinstance(one, WorkersUnavailable):
            return recovery.WorkersUnavailable(reason=str(one))
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
    """What still compiles is given up in turn: graphs, fused blocks, flex attention, the kernel of
    the loss."""
    from expert.training import recovery

    if plan is None or plan.kernels.compile:
        return recovery.CompileFailed(reason=reason)
    kernel = "attention" if plan.kernels.attention == "flex" else "fused_loss"
    kernel = "triton" if plan.kernels.fused_blocks else kernel
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
    first = str(getattr(failure, "message", None) or getattr(failure, "reason", failure))
    line = first.strip().splitlines()[0] if first.strip() else type(failure).__name__
    if isinstance(failure, OutOfMemory):
        where = "training" if failure.where == "probe" else failure.where
        fix = "a smaller model, a shorter max_seq_length, or quantization: int4"
        return f"out of memory in {where} with one sequence at a time: {line}  ({fix})"
    return f"{line}  (nothing is left to fall back to)"
