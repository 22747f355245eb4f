"""Where the time of a step goes: phases timed on the device, read when the device is done.

Nothing here waits for the device. Events are recorded in passing and asked for later, when they
have completed on their own; only `drain`, for the end of a run, waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

PHASES = ("data_wait", "copy", "forward", "backward", "optimizer")
COMMUNICATION = "communication"
"""Summing gradients over ranks, and waiting for the slowest; a phase where there are several."""
OTHER = "other"

KEPT_STEPS = 1024
"""Steps that nobody read are kept up to here; then the oldest is dropped."""


class DeviceEvent(Protocol):
    """What is used of torch.cuda.Event; a copy is timed with two that its own stream recorded."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to the later one."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one step: of the device where there is one, else of the host.

    `phases` has every phase and "other", the rest of `wall`. On a device, data_wait is the time it
    was idle because no batch was there; a host that waits while the device still has work costs
    nothing. Copies on a stream of their own run beside the other phases, so they are not taken off
    `other`.
    """

    step: int
    wall: float
    phases: dict[str, float]
    ran_dry: bool | None = None
    """The device had come to the last phase when the host had only just launched it: it waits for
    the host. A host that keeps up is hundreds of kernels ahead. None on a CPU."""


@dataclass(slots=True)
class _Step:
    """One step being timed: host seconds by phase, and event pairs where there is a device."""

    step: int
    host_begin: float
    begin: DeviceEvent | None
    host_end: float = 0.0
    end: DeviceEvent | None = None
    host: dict[str, float] = field(default_factory=dict)
    pairs: list[tuple[str, DeviceEvent, DeviceEvent]] = field(default_factory=list)
    beside: list[tuple[str, DeviceEvent, DeviceEvent]] = field(default_factory=list)
    inside: str | None = None
    ran_dry: bool | None = None
    host_entered: float = 0.0
    entered: DeviceEvent | None = None

    def completed(self) -> bool:
        if self.end is not None and not self.end.query():
            return False
        return all(end.query() for _, _, end in self.beside)

    def wait(self) -> None:
        if self.end is not None:
            self.end.synchronize()
        for _, _, end in self.beside:
            end.synchronize()

    def events(self) -> Iterator[DeviceEvent]:
        yield from (e for e in (self.begin, self.end, self.entered) if e is not None)
        for _, start, end in (*self.pairs, *self.beside):
            yield from (start, end)


class _Phase:
    """One phase as a context manager; made once and entered again for every micro-batch."""

    __slots__ = ("_name", "_timeline")

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name

    def __enter__(self) -> None:
        self._timeline._enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timeline._leave(failed=kind is not None)


class Timeline:
    """Times the phases of steps; `ready` gives back those the device has finished."""

    def __init__(
        self,
        device: torch.device | str,
        *,
        clock: Callable[[], float] = time.perf_counter,
        new_event: Callable[[], DeviceEvent] | None = None,
    ) -> None:
        """`new_event` stands in for CUDA's events.

        A step with four phases costs the host about 0.2 ms (H200, torch 2.11): nothing where the
        device is the slower of the two (24.35 ms with and without).
        """
        self._current_stream: Callable[[], Any] = lambda: None
        if new_event is None and str(device).partition(":")[0] == "cuda":
            new_event, self._current_stream = _cuda(device)
        self._new_event = new_event
        self._stream: Any = None
        self._clock = clock
        self._phases = {name: _Phase(self, name) for name in (*PHASES, COMMUNICATION)}
        self._open: _Step | None = None
        self._ended: deque[_Step] = deque()
        # The feeder's thread adds to these two; a deque's append and pop are atomic.
        self._spare: deque[DeviceEvent] = deque()
        self._handed_over: deque[tuple[str, DeviceEvent, DeviceEvent]] = deque()

    # --- while training ------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Start a step on the current stream; one begun and never ended is forgotten."""
        self._forget()
        # Looked up once: recording takes 3 us on a stream that is given, 11 on one that is not
        # (H200, torch 2.11).
        self._stream = self._current_stream()
        self._open = _Step(step, self._clock(), self._recorded())

    def phase(self, name: str) -> _Phase:
        """A context manager for one stretch of a phase; stretches of a step add up.

        Outside a step (in an evaluation) it measures nothing.
        """
        return self._phases[name]

    def end(self) -> None:
        """End the step; its times can be read once the device has come this far."""
        update = self._open
        if update is None:
            return
        assert update.inside is None, f"end() inside {update.inside}"
        if update.pairs:
            update.ran_dry = update.pairs[-1][1].query()
        update.end = self._recorded()
        update.host_end = self._clock()
        while self._handed_over:
            update.beside.append(self._handed_over.popleft())
        self._open = None
        self._ended.append(update)
        if len(self._ended) > KEPT_STEPS:
            self._spare.extend(self._ended.popleft().events())

    def take_event(self) -> DeviceEvent:
        """An event with timing for `add_events`, from the pool; for any thread."""
        assert self._new_event is not None, "events are for devices with streams"
        try:
            return self._spare.pop()
        except IndexError:
            return self._new_event()

    def add_events(self, phase: str, start: DeviceEvent, end: DeviceEvent) -> None:
        """Add a stretch that another stream recorded to the step that ends next.

        The events come from `take_event` and belong to the timeline again after this call.
        """
        assert phase in self._phases, phase
        self._handed_over.append((phase, start, end))

    # --- reading -------------------------------------------------------------------------------

    def ready(self, lag: int = 1) -> list[StepTimes]:
        """Steps the device has finished, oldest first, without the newest `lag`; never waits."""
        found = []
        while len(self._ended) > lag and self._ended[0].completed():
            found.append(self._read(self._ended.popleft()))
        return found

    def drain(self) -> list[StepTimes]:
        """All steps that have ended; waits for the device, so it is for the end of a run."""
        found = []
        while self._ended:
            self._ended[0].wait()
            found.append(self._read(self._ended.popleft()))
        return found

    # --- inside --------------------------------------------------------------------------------

    def _recorded(self) -> DeviceEvent | None:
        if self._new_event is None:
            return None
        event = self.take_event()
        event.record(self._stream)
        return event

    def _enter(self, name: str) -> None:
        update = self._open
        if update is None:
            return
        assert update.inside is None, f"phase {name} inside {update.inside}"
        update.inside = name
        update.host_entered = self._clock()
        update.entered = self._recorded()

    def _leave(self, *, failed: bool) -> None:
        update = self._open
        if update is None:
            return
        if failed:  # a failed device cannot record; its error must not be hidden behind another
            self._forget()
            return
        name = update.inside
        assert name is not None
        update.host[name] = update.host.get(name, 0.0) + self._clock() - update.host_entered
        if update.entered is not None:
            end = self._recorded()
            assert end is not None
            update.pairs.append((name, update.entered, end))
            update.entered = None
        update.inside = None

    def _forget(self) -> None:
        if self._open is not None:
            self._spare.extend(self._open.events())
            self._open = None

    def _read(self, update: _Step) -> StepTimes:
        wall = update.host_end - update.host_begin
        phases = _with_other(wall, update.host)
        if update.begin is not None and update.end is not None:
            wall = _seconds(update.begin, update.end)
            phases = _with_other(wall, _summed(update.pairs))
        for name, seconds in _summed(update.beside).items():
            phases[name] += seconds
        self._spare.extend(update.events())
        return StepTimes(step=update.step, wall=wall, phases=phases, ran_dry=update.ran_dry)


def _cuda(device: torch.device | str) -> tuple[Callable[[], DeviceEvent], Callable[[], Any]]:
    """How to make an event with timing, and how to find the current stream of the device."""
    import torch

    def new_event() -> DeviceEvent:
        event: DeviceEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event

    return new_event, lambda: torch.cuda.current_stream(device)


def _seconds(start: DeviceEvent, end: DeviceEvent) -> float:
    return start.elapsed_time(end) / 1000


def _summed(pairs: list[tuple[str, DeviceEvent, DeviceEvent]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, start, end in pairs:
        total[name] = total.get(name, 0.0) + _seconds(start, end)
    return total


def _with_other(wall: float, phases: dict[str, float]) -> dict[str, float]:
    """Every phase, and what is left of the wall time; rounding never makes it negative."""
    complete = {**dict.fromkeys(PHASES, 0.0), **phases}
    complete[OTHER] = max(0.0, wall - sum(complete.values()))
    return complete
