"""An optimizer's step recorded once and replayed: one launch instead of lists of every weight.

Sorting 420 LoRA weights into the lists that fused kernels take costs torch 7 ms of a CPU core each
time; the kernels themselves run for less than one on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from expert.parallel.graphs import Made, Recorder, Replay, recorded

WARM_UPS = 2
"""Steps before one is recorded: the first makes the moments."""

Step = Callable[[Tensor], tuple[Tensor, Tensor]]
"""With the sum of the losses: the norm of the gradients, and whether the weights were changed."""


def is_fused(optimizer: Optimizer) -> bool:
    """Whether a step asks the host for nothing: not even whether the gradients are finite."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class RecordedUpdate:
    """The step of a fused optimizer whose gradients lie in the same places at every update."""

    def __init__(self, optimizer: Optimizer, record: Recorder, device: torch.device) -> None:
        self._record = record
        self._rate = torch.zeros((), device=device)
        self._losses = torch.zeros((), device=device)
        self._met: tuple[int, ...] = ()
        self._times = 0
        self._made: tuple[Made, Replay] | None = None
        optimizer._warned_capturable_if_run_uncaptured = True
        for group in optimizer.param_groups:
            group["lr"] = self._rate  # what is recorded reads it anew each time
            if device.type == "cuda":
                group["capturable"] = True

    def step(
        self, step: Step, rate: float, losses: Tensor, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Take a step: as it is while gradients move, recorded once they have stayed."""
        self._rate.fill_(rate)
        self._losses.copy_(losses)
        places = tuple(0 if tensor is None else tensor.data_ptr() for tensor in gradients)
        if places != self._met:
            self._met, self._times, self._made = places, 0, None
        self._times += 1
        if self._times <= WARM_UPS:
            return step(self._losses)
        if self._made is None:
            self._made = recorded(lambda: list(step(self._losses)), self._record)
        (norm, applied), replay = self._made
        replay()
        assert norm is not None
        assert applied is not None
        return norm.clone(), applied.clone()

    def forget(self) -> None:
        """Record anew: what was recorded reads places that are no longer used."""
        self._times, self._made = 0, None
