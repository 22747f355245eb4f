"""What an exception means for the plan of a run, and the message when nothing is left to try."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Literal

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.data.processes import CannotStartWorkers
from expert.model.attention import CUDNN_FAILED, AttentionUnavailable
from expert.model.device_memory import is_out_of_memory
from expert.parallel.graphs import GraphsUnavailable
from expert.parallel.group import PeerFailed
from expert.planning.run_plan import RunPlan
from expert.run.build import PlanUnsupported
from expert.training.optim import OptimizerUnavailable
from expert.training.recovery import (
    CompileFailed,
    Failure,
    KernelUnavailable,
    OutOfMemory,
    WorkersUnavailable,
)

COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
NOT_DETERMINISTIC = "does not have a deterministic implementation"


class RunFailed(ExpertError):
    exit_code = EXIT_RUN_FAILED


def failure_of(
    error: BaseException,
    where: Literal["training", "evaluation", "probe"] = "training",
    plan: RunPlan | None = None,
) -> Failure | None:
    """The failure behind an exception; None if another plan would not help."""
    # First, and at any depth: compilers wrap the error when memory runs out.
    full = next((each for each in _causes_and_contexts(error) if is_out_of_memory(each)), None)
    if full is not None:
        return OutOfMemory(where=where, message=str(full))
    cause: BaseException | None = error
    while cause is not None:  # outermost first
        if isinstance(cause, PeerFailed):
            return cause.failure  # type: ignore[no-any-return]
        if isinstance(cause, PlanUnsupported):
            return cause.failure
        if isinstance(cause, AttentionUnavailable) or CUDNN_FAILED in str(cause):
            return KernelUnavailable(kernel="attention", reason=str(cause))
        if isinstance(cause, CannotStartWorkers):
            return WorkersUnavailable(reason=str(cause))
        if isinstance(cause, GraphsUnavailable):
            return KernelUnavailable(kernel="cuda_graphs", reason=str(cause))
        if isinstance(cause, OptimizerUnavailable):
            return KernelUnavailable(kernel=cause.optimizer, reason=cause.reason)
        # Compiling a graph or kernel failed; Triton also calls a C compiler.
        compiles = isinstance(cause, RuntimeError) and "C compiler" in str(cause)
        compiles = compiles or isinstance(cause, subprocess.CalledProcessError)
        if compiles or type(cause).__module__.startswith(COMPILERS):
            # Given up one after the other: graphs, fused blocks, flex attention, the loss kernel.
            if plan is None or plan.kernels.compile:
                return CompileFailed(reason=_sentence(cause))
            kernel = "attention" if plan.kernels.attention == "flex" else "fused_loss"
            kernel = "triton" if plan.kernels.fused_blocks else kernel
            return KernelUnavailable(kernel=kernel, reason=_sentence(cause))
        if NOT_DETERMINISTIC in str(cause) and plan is not None and plan.kernels.deterministic:
            return KernelUnavailable(kernel="attention", reason=_sentence(cause))
        cause = cause.__cause__
    return None


def _causes_and_contexts(error: BaseException) -> Iterator[BaseException]:
    """The error with its causes and the exceptions being handled when each was raised."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop(0)
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            yield current
            waiting += [current.__cause__, current.__context__]


def _sentence(error: BaseException) -> str:
    """The first line of an error, and the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def exhausted_message(failure: Failure) -> str:
    """The final message of a run that has tried everything."""
    first = str(getattr(failure, "message", None) or getattr(failure, "reason", failure))
    line = first.strip().splitlines()[0] if first.strip() else type(failure).__name__
    if isinstance(failure, OutOfMemory):
        where = "training" if failure.where == "probe" else failure.where
        fix = "a smaller model, a shorter max_seq_length, or quantization: int4"
        return f"out of memory in {where} with one sequence at a time: {line}  ({fix})"
    return f"{line}  (nothing is left to fall back to)"
