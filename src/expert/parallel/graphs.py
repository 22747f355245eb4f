"""Forward and backward captured as CUDA graphs, once for each shape of batch, and replayed.

A small model on a fast card waits for its host: thousands of kernels are launched one by one, and
each takes longer to launch than to run. A CUDA graph holds all launches of a pass. A captured pass
reads and writes the memory it was captured with: batches are copied into it, gradients out of it.

That memory is kept. A pass that is run beside it takes as much again, so that once a shape of batch
is captured none of its batches is: one with fewer targets, as the last of an epoch, is replayed
with positions that have no label, and one with more is captured without being run first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from expert.core.errors import ExpertError

TENSORS = ("tokens", "labels", "positions", "boundaries", "soft_mask", "target_places")
"""What a model reads of a batch, as far as it lies on the device."""
WARM_UPS = 2
"""Passes of a shape before it is captured: kernels are compiled, chosen and given their workspace
while they run for the first time, none of which can be captured."""
MOST_GRAPHS = 8
"""Shapes that are captured; each has its own gradients. All batches of a run have one shape."""
TARGETS_IN_STEPS_OF = 8192
"""The number of target positions is known on the host and captured with the graph; positions
without a label fill it up. 8192 is a chunk of the fused loss or less."""
OFTEN = 16
"""Batches with fewer targets than were captured before these are captured too: the last batch of
an epoch does not come as often."""
FIT_TARGETS = 2
"""Numbers of targets that a shape is captured for; a third one is all that a batch has room for."""


Made = list[Tensor | None]
Replay = Callable[[], None]


class GraphsUnavailable(ExpertError):
    """A pass that cannot be captured on this card."""


class Capture(Protocol):
    """Captures a function that makes tensors: gives those tensors, and what computes them again in
    place. They hold nothing useful before the first replay."""

    def __call__(self, run: Callable[[], Made]) -> tuple[Made, Replay]: ...


class CudaCapture:
    """Captures CUDA graphs that share one pool of memory: no two are ever replayed at once.

    Other threads may use the card meanwhile: batches are copied to it beside the capture.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A pool that no graph uses any more is released, though a tensor still lies in it, and
        # capturing into it again is an error (torch 2.11).
        self._keeps_pool: torch.cuda.CUDAGraph | None = None

    def __call__(self, run: Callable[[], Made]) -> tuple[Made, Replay]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        made: Made = []
        failed: BaseException | None = None
        began = False
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                began = True
                try:
                    made = run()
                except BaseException as error:  # noqa: BLE001 - raised below
                    failed = error  # memory ran out, say; the capture itself may still end well
        except BaseException as error:  # noqa: BLE001 - raised below
            self._tidy_up(graph, stream, began=began)
            failed = failed or error
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # the error knows this frame: with it here, its tensors would stay
        self._keeps_pool = graph
        return made, graph.replay

    def _tidy_up(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, *, began: bool
    ) -> None:
        """Repair what torch 2.11 leaves behind after a capture that could not be ended.

        The stream of the capture stays the current one, the allocator keeps allocating from the
        pool, and the generator believes that it is captured and refuses to draw. One short
        capture that ends well frees the generator. Where memory ran out before the capture
        `began`, nothing has been allocated from the pool yet.
        """
        keep_for_good(graph)
        torch.cuda.set_stream(stream)
        device = torch.cuda.current_device()
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool") if began else ():
            with suppress(RuntimeError, AttributeError):  # the capture got as far by itself
                getattr(torch._C, name)(device, self._pool)
        short = torch.cuda.CUDAGraph()
        keep_for_good(short)
        with suppress(RuntimeError), torch.cuda.graph(short):
            torch.ones((), device="cuda")
        torch.cuda.set_stream(stream)


def keep_for_good(graph: object) -> None:
    """Never destroy a failed graph, not even when Python ends: the allocator may still ask it
    whether memory belongs to it, and the destructor of one that could not begin aborts the process
    (torch 2.11, seen on an H200)."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))


def captured(run: Callable[[], Made], capture: Capture) -> tuple[Made, Replay]:
    """What a function makes, captured; GraphsUnavailable where it cannot be."""
    try:
        return capture(run)
    except (torch.OutOfMemoryError, ExpertError):
        raise
    except Exception as error:  # of the model, of a compiler, of CUDA: it runs without a graph
        raise GraphsUnavailable(f"cannot be recorded: {error}") from error


class Passes(Protocol):
    """What is captured: the engine's own forward and backward."""

    def forward(self, batch: Any) -> Tensor:
        """The summed loss."""

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss, where the parameters that compute have theirs."""

    def computing(self) -> list[Tensor]:
        """The parameters that get gradients."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Captured:
    """The passes of one shape, and the memory they read and write."""

    batch: SimpleNamespace
    """Its `targets` are as many as the passes compute: a batch may have fewer."""
    divisor: Tensor
    loss: Tensor
    share: Tensor
    """The loss over the divisor."""
    gradients: list[Tensor | None]
    forward: Replay
    backward: Replay

    def fill(self, batch: Any, divisor: int) -> None:
        """Copy a batch to where the passes read it."""
        pairs = [
            (getattr(self.batch, name), tensor)
            for name in TENSORS
            if (tensor := getattr(batch, name)) is not None
        ]
        for kept, tensor in pairs:
            kept.copy_(tensor, non_blocking=True)
        self.divisor.fill_(divisor)


class CapturedPasses:
    """The passes of every shape of batch so far."""

    def __init__(self, passes: Passes, capture: Capture) -> None:
        self._passes, self._capture = passes, capture
        self._met: dict[Hashable, int] = {}
        self._captured: dict[Hashable, list[Captured]] = {}

    def of(self, batch: Any) -> Captured | None:
        """The captured passes for a batch; None while its shape is run without a graph."""
        shape, targets = _shape(batch), _targets(batch)
        known = self._captured.get(shape)
        if known is None:
            if self._meet(shape) <= WARM_UPS or len(self._captured) >= MOST_GRAPHS:
                return None
            known = self._captured[shape] = []
        enough = [each for each in known if each.batch.targets >= targets]
        best = min(enough, key=lambda each: int(each.batch.targets), default=None)
        if best is not None and best.batch.targets > targets:
            often = self._meet((shape, targets)) > OFTEN and len(known) < FIT_TARGETS
            best = None if often else best
        if best is None:
            # Other targets are more rounds of the same kernels, which have run: no warm-up.
            most = int(batch.target_places.shape[0])
            best = self._made(batch, targets if len(known) < FIT_TARGETS else most)
            known.append(best)
        return best

    def _meet(self, what: Hashable) -> int:
        self._met[what] = self._met.get(what, 0) + 1
        return self._met[what]

    def _made(self, batch: Any, targets: int) -> Captured:
        passes = self._passes
        fixed = _fixed(batch, targets)
        divisor = torch.ones((), device=batch.tokens.device)
        shares: list[Tensor] = []  # the newest, with all that its backward needs

        def forward() -> Made:
            loss = passes.forward(fixed)
            shares[:] = [loss / divisor]
            return [loss.detach(), shares[0].detach()]

        def backward() -> Made:
            passes.backward(shares.pop())
            return _taken(passes.computing())

        # The captured backward makes gradients of its own; those of the step under way are put
        # back.
        before = _taken(passes.computing())
        try:
            (loss, share), replay_forward = captured(forward, self._capture)
            gradients, replay_backward = captured(backward, self._capture)
        finally:
            for parameter, gradient in zip(passes.computing(), before, strict=True):
                parameter.grad = gradient
        assert loss is not None
        assert share is not None
        return Captured(
            batch=fixed,
            divisor=divisor,
            loss=loss,
            share=share,
            gradients=gradients,
            forward=replay_forward,
            backward=replay_backward,
        )


def _taken(parameters: Iterable[Tensor]) -> Made:
    """The gradients of parameters, which have none afterwards."""
    found: Made = []
    for parameter in parameters:
        found.append(parameter.grad)
        parameter.grad = None
    return found


def _shape(batch: Any) -> Hashable:
    shapes = tuple(
        None if (tensor := getattr(batch, name)) is None else tuple(tensor.shape)
        for name in TENSORS
    )
    return shapes, batch.longest, batch.whole_rows


def _targets(batch: Any) -> int:
    """As many as are captured: all of these positions are computed, some without a label."""
    steps: int = -(-max(1, batch.targets) // TARGETS_IN_STEPS_OF)
    return min(int(batch.target_places.shape[0]), steps * TARGETS_IN_STEPS_OF)


def _fixed(batch: Any, targets: int) -> SimpleNamespace:
    """A batch of this shape whose memory stays where it is."""
    tensors = {
        name: None if (tensor := getattr(batch, name)) is None else tensor.clone()
        for name in TENSORS
    }
    alike = {"longest": batch.longest, "whole_rows": batch.whole_rows}
    return SimpleNamespace(**tensors, **alike, targets=targets)
