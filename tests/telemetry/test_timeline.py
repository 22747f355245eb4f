"""Phases of steps, on the host's clock and on a fake device that lags behind it."""

from __future__ import annotations

from typing import Any

import pytest

from expert.telemetry.timeline import PHASES, StepTimes, Timeline


class FakeDevice:
    """A stream: `work` takes device time, events record it, `reached` is its progress.

    `now` is device time at the end of everything launched so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = 0.0
        self.made: list[FakeEvent] = []

    def work(self, seconds: float) -> None:
        self.now += seconds

    def new_event(self) -> FakeEvent:
        self.made.append(FakeEvent(self))
        return self.made[-1]


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at: Any = None
        self.waited = 0

    def record(self, stream: object = None) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return bool(self.at <= self.device.reached)

    def synchronize(self) -> None:
        self.waited += 1
        self.device.reached = max(self.device.reached, self.at)

    def elapsed_time(self, end_event: FakeEvent, /) -> float:
        assert end_event.query(), "the device has not come this far"
        return float(1000 * (end_event.at - self.at))


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def on_host(clock) -> Timeline:
    return Timeline("cpu", clock=clock)


@pytest.fixture
def on_device(clock, device) -> Timeline:
    return Timeline("cpu", clock=clock, new_event=device.new_event)


def launch(timeline: Timeline, device: FakeDevice, step: int, forward: float = 0.5) -> None:
    timeline.begin(step)
    with timeline.phase("forward"):
        device.work(forward)
    timeline.end()


def test_on_the_cpu_phases_take_the_time_of_the_clock(on_host, clock):
    on_host.begin(7)
    with on_host.phase("data_wait"):
        clock.turn(0.25)
    with on_host.phase("forward"):
        clock.turn(1.0)
    clock.turn(0.5)
    on_host.end()
    phases = dict.fromkeys(PHASES, 0.0) | {"data_wait": 0.25, "forward": 1.0, "other": 0.5}
    assert on_host.ready(lag=0) == [StepTimes(step=7, wall=1.75, phases=phases)]


def test_device_time_is_reported_apart_from_host_time(on_device, clock, device):
    on_device.begin(1)
    with on_device.phase("data_wait"):
        clock.turn(0.3)  # the host waits, the device still has work
    with on_device.phase("forward"):
        clock.turn(0.125)
        device.work(2.0)
    on_device.end()
    [times] = on_device.drain()
    assert (times.wall, times.phases["forward"], times.phases["data_wait"]) == (2.0, 2.0, 0.0)


def test_a_step_is_given_out_once_the_device_has_finished_it_and_only_draining_waits(
    on_device, device
):
    for step in (1, 2, 3):
        launch(on_device, device, step, forward=1.0)
    assert on_device.ready(lag=0) == []
    device.reached = 1.5
    assert on_device.ready(lag=3) == []
    assert [times.step for times in on_device.ready(lag=0)] == [1]
    device.reached = 2.0
    assert [times.step for times in on_device.ready(lag=0)] == [2]
    assert sum(event.waited for event in device.made) == 0
    assert [times.step for times in on_device.drain()] == [3]
    assert sum(event.waited for event in device.made) == 1


def test_a_copy_on_another_stream_is_waited_for_and_not_taken_off_the_rest(on_device, device):
    start, end = on_device.take_event(), on_device.take_event()
    start.at, end.at = 0.0, 9.0
    on_device.add_copy(start, end)
    on_device.begin(1)
    with on_device.phase("forward"):
        device.work(1.0)
    device.work(0.25)
    on_device.end()
    device.reached = 8.0
    assert on_device.ready(lag=0) == []
    device.reached = 9.0
    [times] = on_device.ready(lag=0)
    assert (times.phases["copy"], times.phases["other"]) == (9.0, 0.25)


def test_a_step_that_fails_is_forgotten_and_its_error_comes_through(on_device, device):
    on_device.begin(1)
    before = len(device.made)

    with pytest.raises(MemoryError, match="full"), on_device.phase("forward"):
        raise MemoryError("full")
    assert len(device.made) == before + 1  # nothing is recorded on a device that may be broken
    launch(on_device, device, 1)
    assert [times.step for times in on_device.drain()] == [1]


@pytest.mark.gpu
def test_real_events_measure_what_the_device_did():
    import torch

    timeline = Timeline(torch.device("cuda", 0))
    matrix = torch.ones(4096, 4096, device="cuda")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    beside = torch.cuda.Stream()
    for step in range(3):
        timeline.begin(step)
        with torch.cuda.stream(beside):
            start, end = timeline.take_event(), timeline.take_event()
            start.record()
            torch.ones(2**24, device="cuda")
            end.record()
        timeline.add_copy(start, end)
        with timeline.phase("forward"):
            for _ in range(20):
                torch.mm(matrix, matrix)
        with timeline.phase("optimizer"):
            torch.mm(matrix, matrix)
        timeline.end()
    found = timeline.ready() + timeline.drain()
    assert [times.step for times in found] == [0, 1, 2]
    for times in found:
        # twenty products against one: a clear difference even on a busy card
        assert times.phases["forward"] > 4 * times.phases["optimizer"] > 0
        assert times.phases["copy"] > 0
        assert times.wall >= times.phases["forward"] + times.phases["optimizer"]


def test_a_device_that_caught_up_with_the_host_ran_dry(on_device, device):
    for step, far in enumerate((False, True)):
        on_device.begin(step)
        for phase in ("forward", "optimizer"):
            with on_device.phase(phase):
                device.work(0.5)
                if far and phase == "optimizer":
                    device.reached = device.now  # it waited for every launch
        on_device.end()
    assert [times.ran_dry for times in on_device.drain()] == [False, True]
