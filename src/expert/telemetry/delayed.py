"""Reads numbers from the GPU later, so that training never waits for the latest ones."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


class DelayedValues:
    """Numbers of past steps. A step's numbers are read once `lag` more steps have been launched.

    With a lag of one, the GPU works on the next step while the host reads the last one, and when a
    number is read does not depend on timing.
    """

    def __init__(self, device: torch.device, *, lag: int | None = None) -> None:
        self._cuda = device.type == "cuda"
        self.lag = lag if lag is not None else int(self._cuda)
        # The key of each step, its numbers on the host, and the event after their copy.
        self._pending: deque[tuple[int, Tensor, Any]] = deque()

    def add(self, key: int, numbers: list[Tensor]) -> None:
        """Start copying the numbers of one step to the host."""
        together = torch.stack([number.detach().double().reshape(()) for number in numbers])
        if not self._cuda:
            self._pending.append((key, together, None))
            return
        host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
        host.copy_(together, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((key, host, event))

    def take(self, *, everything: bool = False) -> list[tuple[int, list[float]]]:
        """Numbers of the steps that are far enough back, or of all."""
        taken = []
        while len(self._pending) > (0 if everything else self.lag):
            key, host, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            taken.append((key, host.tolist()))
        return taken
