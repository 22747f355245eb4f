"""Forward and backward passes captured as CUDA graphs, one per batch shape, and replayed.

A small model on a fast GPU waits for the host: thousands of kernels each take longer to launch than
to run. A CUDA graph launches all kernels of a pass. It reads and writes the memory it was captured
with: batches are copied into it, gradients out of it.

That memory stays allocated, and running the same pass without the graph would take as much again.
So once a shape is captured, all its batches use graphs: one with fewer targets, as the last of an
epoch, is replayed with unlabelled positions, and one with more is captured without a warm-up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from expert.core.errors import ExpertError

TENSORS = (
    *("tokens", "labels", "positions", "boundaries", "soft_mask", "target_places"),
    *("branch", "key_places", "key_boundaries", "key_copies", "answers", "reference"),
)
"""The tensors of a batch that a model or an objective reads."""
WARM_UPS = 2
"""Passes before the first is captured, for each shape if they are compiled: kernels are compiled,
tuned and given workspace on first use, none of which can be captured."""
ALIGNED = 16
"""Triton compiles kernels for sizes that are multiples of this, and for others."""
MAX_SHAPES = 8
"""Captured shapes; each has its own gradients. Batches of a run have one shape, or a few widths."""
TARGET_MULTIPLE = 8192
"""The number of targets is a host value and thus fixed in the graph; unlabelled positions fill it
up. 8192 is at most one chunk of the fused loss."""
CAPTURE_AFTER = 16
"""Batches with fewer targets than captured, after which these are captured too: the last batch of
an epoch does not come as often."""
TARGET_COUNTS_PER_SHAPE = 2
"""Target counts captured per shape; a third capture has the most that a batch can have."""


LossSum = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]
"""From model and batch to the summed loss, and sums of further metrics."""
CapturedOutputs = list[Tensor | None]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], CapturedOutputs]], tuple[CapturedOutputs, Replay]]
"""Captures a function that returns tensors: returns these tensors, and a function that computes
them again in place. Their values are undefined before the first replay."""


class GraphsUnavailable(ExpertError):
    """A pass that cannot be captured on this GPU."""


class CudaCapture:
    """Captures CUDA graphs that share one memory pool: no two are ever replayed concurrently.

    Other threads may use the GPU meanwhile: batches are copied to it during a capture.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A pool is released once no graph uses it, even if a tensor is still in it, and capturing
        # into it again is an error (torch 2.11).
        self._pool_owner: torch.cuda.CUDAGraph | None = None

    def __call__(self, run: Callable[[], CapturedOutputs]) -> tuple[CapturedOutputs, Replay]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        outputs: CapturedOutputs = []
        failed: BaseException | None = None
        began = False
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                began = True
                try:
                    outputs = run()
                except BaseException as error:  # noqa: BLE001 - raised below
                    failed = error  # such as out of memory; the capture may still end normally
        except BaseException as error:  # noqa: BLE001 - raised below
            self._clean_up_failed_capture(graph, stream, began=began)
            failed = failed or error
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # the error references this frame, which would keep its tensors alive
        self._pool_owner = graph
        return outputs, graph.replay

    def _clean_up_failed_capture(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, *, began: bool
    ) -> None:
        """Repair what torch 2.11 leaves behind after a capture that could not be ended.

        The capture's stream stays the current one, the allocator keeps using the pool, and the
        random generator believes it is being captured and refuses to draw. One short successful
        capture resets the generator. If memory ran out before the capture `began`, nothing has been
        allocated from the pool yet.
        """
        never_destroy(graph)
        torch.cuda.set_stream(stream)
        device = torch.cuda.current_device()
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool") if began else ():
            with suppress(RuntimeError, AttributeError):  # already done by the capture
                getattr(torch._C, name)(device, self._pool)
        short = torch.cuda.CUDAGraph()
        never_destroy(short)
        with suppress(RuntimeError), torch.cuda.graph(short):
            torch.ones((), device="cuda")
        torch.cuda.set_stream(stream)


def never_destroy(graph: object) -> None:
    """Never destroy a failed graph, not even at interpreter exit: the allocator may still ask it
    whether it owns memory, and the destructor of a graph that could not begin aborts the process
    (torch 2.11, seen on an H200)."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))


def captured(
    run: Callable[[], CapturedOutputs], capture: Capture
) -> tuple[CapturedOutputs, Replay]:
    """Capture a function's results; GraphsUnavailable if that fails."""
    try:
        return capture(run)
    except (torch.OutOfMemoryError, ExpertError):
        raise
    except Exception as error:  # from the model, a compiler or CUDA: continue without a graph
        raise GraphsUnavailable(f"cannot be captured: {error}") from error


@dataclass(frozen=True, eq=False, kw_only=True)
class Captured:
    """The passes of one batch shape, and the memory they read and write."""

    batch: SimpleNamespace
    """Its `targets` is the number that the passes compute; a batch may have fewer."""
    divisor: Tensor
    loss: Tensor
    metrics: dict[str, Tensor]
    share: Tensor
    """The loss divided by the divisor."""
    gradients: list[Tensor | None]
    forward: Replay
    backward: Replay

    def replay_forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss and metrics of a batch of this shape."""
        for name in TENSORS:
            tensor = getattr(batch, name)
            if tensor is not None:
                getattr(self.batch, name).copy_(tensor, non_blocking=True)
        self.forward()
        # Copies: the next replay writes to the same memory.
        return self.loss.clone(), {name: sums.clone() for name, sums in self.metrics.items()}

    def replay_backward(self, divisor: int) -> tuple[Tensor, list[Tensor | None]]:
        """The loss / `divisor` and its gradients, valid until the next replay."""
        self.divisor.fill_(divisor)
        self.backward()
        return self.share, self.gradients


class CapturedPasses:
    """The captured passes of every batch shape so far."""

    def __init__(
        self, compute: Any, learner: Any, capture: Capture, *, warm_up_each_shape: bool
    ) -> None:
        """`compute`: a forward pass. `warm_up_each_shape`: as compiled passes need it. Others warm
        up only once, since the same kernels compute all shapes, and once more for a size that is
        not aligned."""
        self._compute, self._learner = compute, learner
        self._capture, self._warm_each = capture, warm_up_each_shape
        self._met: dict[Hashable, int] = {}
        self._captured: dict[Hashable, list[Captured]] = {}

    def of(self, loss_sum: LossSum, batch: Any) -> Captured | None:
        """The captured passes for a batch; None while its shape runs without a graph."""
        shape, targets = _shape(batch), _targets(batch)
        known = self._captured.get(shape)
        if known is None:
            met = self._meet(shape if self._warm_each else batch.tokens.numel() % ALIGNED)
            if met <= WARM_UPS or len(self._captured) >= MAX_SHAPES:
                return None
            known = self._captured[shape] = []
        enough = [graph for graph in known if graph.batch.targets >= targets]
        best = min(enough, key=lambda graph: int(graph.batch.targets), default=None)
        if best is not None and best.batch.targets > targets:
            often = (
                self._meet((shape, targets)) > CAPTURE_AFTER
                and len(known) < TARGET_COUNTS_PER_SHAPE
            )
            best = None if often else best
        if best is None:
            # More targets are more iterations of kernels that have already run: no warm-up.
            most = int(batch.target_places.shape[0])
            best = self._capture_passes(
                loss_sum, batch, targets if len(known) < TARGET_COUNTS_PER_SHAPE else most
            )
            known.append(best)
        return best

    def _meet(self, what: Hashable) -> int:
        self._met[what] = self._met.get(what, 0) + 1
        return self._met[what]

    def _capture_passes(self, loss_sum: LossSum, batch: Any, targets: int) -> Captured:
        learner = self._learner
        # A batch of this shape at a fixed address.
        tensors = {name: getattr(batch, name) for name in TENSORS}
        fixed = SimpleNamespace(
            **{name: None if one is None else one.clone() for name, one in tensors.items()},
            longest=batch.longest,
            whole_rows=batch.whole_rows,
            targets=targets,
        )
        divisor = torch.ones((), device=batch.tokens.device)
        losses: list[Tensor] = []  # the latest, with its autograd graph
        names: list[str] = []

        def forward() -> CapturedOutputs:
            loss, metrics = self._compute(loss_sum, fixed)
            losses[:], names[:] = [loss], list(metrics)
            return [loss.detach(), *metrics.values()]

        def backward() -> CapturedOutputs:
            share = losses.pop() / divisor
            learner.backpropagate(share)
            return [share.detach(), *_take_gradients(learner.computing())]

        # The captured backward allocates its own gradients; those of the current step are restored.
        before = _take_gradients(learner.computing())
        try:
            (loss, *metrics), replay_forward = captured(forward, self._capture)
            (share, *gradients), replay_backward = captured(backward, self._capture)
        finally:
            for parameter, gradient in zip(learner.computing(), before, strict=True):
                parameter.grad = gradient
        assert loss is not None
        assert share is not None
        return Captured(
            batch=fixed,
            divisor=divisor,
            loss=loss,
            metrics={n: m for n, m in zip(names, metrics, strict=True) if m is not None},
            share=share,
            gradients=gradients,
            forward=replay_forward,
            backward=replay_backward,
        )


def _take_gradients(parameters: Iterable[Tensor]) -> CapturedOutputs:
    """Take the gradients from parameters, which have none afterwards."""
    gradients: CapturedOutputs = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


def _shape(batch: Any) -> Hashable:
    shapes = tuple(
        None if (tensor := getattr(batch, name)) is None else tuple(tensor.shape)
        for name in TENSORS
    )
    return shapes, batch.longest, batch.whole_rows


def _targets(batch: Any) -> int:
    """The number of targets to capture: all of them are computed, some without a label."""
    steps: int = -(-max(1, batch.targets) // TARGET_MULTIPLE)
    return min(int(batch.target_places.shape[0]), steps * TARGET_MULTIPLE)
