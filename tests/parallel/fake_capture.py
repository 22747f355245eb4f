"""A stand-in for CUDA graphs without a GPU: a replay runs the captured function again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from expert.parallel.graphs import Capture, CapturedOutputs, Replay
from expert.training.learner import CapturedStep


class FakeCapture:
    """Like a graph, it computes nothing while it captures, and its outputs stay in place."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, run: Callable[[], CapturedOutputs]) -> tuple[CapturedOutputs, Replay]:
        self.recorded += 1
        with torch.random.fork_rng():
            made = run()
        kept = [None if tensor is None else _nothing(tensor) for tensor in made]

        def replay() -> None:
            self.replayed += 1
            for place, tensor in zip(kept, run(), strict=True):
                if place is not None:
                    assert tensor is not None
                    place.copy_(tensor)

        return kept, replay


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Values that show if they are read before the first replay."""
    return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0)


class UndoneStep(CapturedStep):
    """Undoes the step that the stand-in takes while it captures: a capture changes nothing."""

    def __init__(self, optimizer: Optimizer, capture: Capture, device: torch.device) -> None:
        def undone(run: Callable[[], CapturedOutputs]) -> tuple[CapturedOutputs, Replay]:
            touched = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            touched += [tensor.grad for tensor in touched if tensor.grad is not None]
            touched += [value for state in optimizer.state.values() for value in state.values()]
            before = [tensor.detach().clone() for tensor in touched]
            found = capture(run)
            with torch.no_grad():
                for tensor, value in zip(touched, before, strict=True):
                    tensor.copy_(value)
            return found

        super().__init__(optimizer, undone, device)
