"""Times the phases of a step on the device, and reads them once the device is done.

Nothing here waits for the device: events are recorded in passing and read after they have
completed; only `drain`, at the end of a run, waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PHASES = ("data_wait", "copy", "forward", "backward", "optimizer")
COMMUNICATION = "communication"
"""Summing gradients over ranks, and waiting for the slowest; only with several ranks."""
ANSWERS = "answers"
"""In place of data_wait where the model makes its own batches: it answers, and is judged."""
OTHER = "other"

KEPT_STEPS = 1024
"""Unread steps kept; beyond that the oldest is dropped."""


DeviceEvent = Any
"""A torch.cuda.Event with timing, or what replaces it in tests."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one step: of the device if there is one, else of the host.

    `phases` has every phase and "other", the rest of `wall`. On a device, data_wait is the time it
    was idle because there was no batch; a host that waits while the device still has work costs
    nothing. Copies on their own stream overlap other phases, so they are not subtracted from
    `other`.
    """

    step: int
    wall: float
    phases: dict[str, float]
    ran_dry: bool | None = None
    """The device had already reached the last phase when the host had just launched it, so it waits
    for the host. A host that keeps up is hundreds of kernels ahead. None on a CPU."""


@dataclass(slots=True)
class _Step:
    """A step being timed: host seconds by phase, and event pairs if there is a device."""

    step: int
    host_begin: float
    begin: DeviceEvent
    host_end: float = 0.0
    end: DeviceEvent = None
    host: dict[str, float] = field(default_factory=dict)
    pairs: list[tuple[str, DeviceEvent, DeviceEvent]] = field(default_factory=list)
    copies: list[tuple[DeviceEvent, DeviceEvent]] = field(default_factory=list)
    """On their own stream."""
    inside: str | None = None
    ran_dry: bool | None = None

    def completed(self) -> bool:
        if self.end is not None and not self.end.query():
            return False
        return all(end.query() for _, end in self.copies)

    def wait(self) -> None:
        if self.end is not None:
            self.end.synchronize()
        for _, end in self.copies:
            end.synchronize()


class Timeline:
    """Times the phases of steps; `ready` returns those that the device has finished."""

    def __init__(
        self,
        device: torch.device | str,
        *,
        clock: Callable[[], float] = time.perf_counter,
        new_event: Callable[[], DeviceEvent] | None = None,
    ) -> None:
        """`new_event`: replaces CUDA events.

        A step with four phases costs the host about 0.2 ms (H200, torch 2.11): nothing if the
        device is the slower of the two (24.35 ms with and without).
        """
        self._current_stream: Callable[[], Any] = lambda: None
        if new_event is None and str(device).partition(":")[0] == "cuda":
            import torch

            new_event = partial(torch.cuda.Event, enable_timing=True)
            self._current_stream = partial(torch.cuda.current_stream, device)
        self._new_event = new_event
        self._stream: Any = None
        self._clock = clock
        self._open: _Step | None = None
        self._ended: deque[_Step] = deque(maxlen=KEPT_STEPS)
        self._copies: deque[tuple[DeviceEvent, DeviceEvent]] = deque()

    # --- while training ------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Start a step on the current stream; a previous one that was not ended is dropped."""
        # Looked up once: recording takes 3 us with an explicit stream and 11 us without (H200,
        # torch 2.11).
        self._stream = self._current_stream()
        self._open = _Step(step, self._clock(), self._recorded())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase; several intervals of a step add up.

        Outside of a step (in an evaluation) it measures nothing.
        """
        assert name in (*PHASES, COMMUNICATION, ANSWERS), name
        step = self._open
        if step is not None:
            assert step.inside is None, f"phase {name} inside {step.inside}"
            step.inside = name
        entered, began = self._clock(), self._recorded() if step is not None else None
        try:
            yield
        except BaseException:  # a failed device cannot record; do not hide its error behind another
            self._open = None
            raise
        if step is not None and step is self._open:
            step.host[name] = step.host.get(name, 0.0) + self._clock() - entered
            if began is not None:
                step.pairs.append((name, began, self._recorded()))
            step.inside = None

    def end(self) -> None:
        """End the step; its times can be read once the device has reached this point."""
        step = self._open
        if step is None:
            return
        assert step.inside is None, f"end() inside {step.inside}"
        if step.pairs:
            step.ran_dry = step.pairs[-1][1].query()
        step.end = self._recorded()
        step.host_end = self._clock()
        while self._copies:
            step.copies.append(self._copies.popleft())
        self._open = None
        self._ended.append(step)

    def take_event(self) -> DeviceEvent:
        """An event with timing, for `add_copy`; callable from any thread."""
        assert self._new_event is not None, "events are for devices with streams"
        return self._new_event()

    def add_copy(self, start: DeviceEvent, end: DeviceEvent) -> None:
        """Add a copy on another stream to the step that ends next."""
        self._copies.append((start, end))

    # --- reading -------------------------------------------------------------------------------

    def ready(self, lag: int = 1) -> list[StepTimes]:
        """Steps the device has finished, oldest first, without the newest `lag`; never waits."""
        times = []
        while len(self._ended) > lag and self._ended[0].completed():
            times.append(self._read(self._ended.popleft()))
        return times

    def drain(self) -> list[StepTimes]:
        """All ended steps; waits for the device, so only for the end of a run."""
        times = []
        while self._ended:
            self._ended[0].wait()
            times.append(self._read(self._ended.popleft()))
        return times

    # --- inside --------------------------------------------------------------------------------

    def _recorded(self) -> DeviceEvent:
        """An event recorded now; None without a device."""
        if self._new_event is None:
            return None
        event = self.take_event()
        event.record(self._stream)
        return event

    def _read(self, step: _Step) -> StepTimes:
        wall = step.host_end - step.host_begin
        phases = _with_other(wall, step.host)
        if step.begin is not None and step.end is not None:
            wall = _seconds(step.begin, step.end)
            on_device: dict[str, float] = {}
            for name, start, end in step.pairs:
                on_device[name] = on_device.get(name, 0.0) + _seconds(start, end)
            phases = _with_other(wall, on_device)
        phases["copy"] += sum(_seconds(start, end) for start, end in step.copies)
        return StepTimes(step=step.step, wall=wall, phases=phases, ran_dry=step.ran_dry)


def _seconds(start: DeviceEvent, end: DeviceEvent) -> float:
    return float(start.elapsed_time(end)) / 1000


def _with_other(wall: float, phases: dict[str, float]) -> dict[str, float]:
    """Every phase, and the rest of the wall time, which rounding never makes negative."""
    complete = {**dict.fromkeys(PHASES, 0.0), **phases}
    complete[OTHER] = max(0.0, wall - sum(complete.values()))
    return complete
