"""Where the time of a run and of its steps went, according to its events."""

from __future__ import annotations

from typing import Any

import pytest

from expert.insight.step.anatomy import StepAnatomy, dissect, log_lines, run_times
from tests.insight.records import finished_events, planned, record, step_events


def step_of(events: list[Any], **plan: Any) -> Any:
    return dissect(record(finished_events(events), planned(**plan))).step


def test_phases_add_up_and_overlapped_copies_take_no_time():
    step = StepAnatomy(phases={"data_wait": 0.2, "copy": 0.03, "compute": 0.05})
    assert step.wall == pytest.approx(0.28)
    assert step.idle_share == pytest.approx(1 - 50 / 280)
    assert step.share("copy") == pytest.approx(30 / 280)
    step = StepAnatomy(phases={"copy": 0.03, "compute": 0.05}, copies_beside=True)
    assert (step.wall, step.exposed_copy, step.idle_share) == (0.05, 0.0, 0.0)


def test_the_average_step_is_the_median_after_warm_up():
    slow = {"seconds": 100.0, "time_forward": 99.0}
    steps = step_events(9)
    steps[0] |= slow  # steps 1 to 5 compile
    steps[5] |= slow  # a hiccup
    step = step_of(steps)
    assert step.settled
    assert step.updates == 40
    assert step.of("forward") == pytest.approx(0.668 / 5)
    # Wall time beyond the phases was spent between steps.
    assert step.wall == pytest.approx(1.4934 / 5)
    assert step.of("other") == pytest.approx((1.4934 - 0.668 - 0.821 - 0.0032 - 6.6e-6) / 5)
    assert (step.mfu, step.gpu_utilization) == (0.2917, 1.0)


def test_lines_after_a_compilation_or_a_fallback_have_not_settled():
    steps = step_events(6, every=1, updates=1)
    change = {"event": "fell_back", "step": 4}
    again = {"event": "compiled", "step": 5}
    events = [{"event": "started", "step": 0}, *steps[:4], change, again, *steps[4:]]
    assert [line.settled for line in log_lines(events)] == [False] * 3 + [True, False, False]


def test_the_step_of_incomplete_events():
    alone = step_of(step_events(1, every=1, updates=1))
    assert (alone.settled, alone.updates) == (False, 1)
    steps = step_events(4)
    steps[1] |= {"seconds": "nan", "time_forward": None, "mfu": True}
    steps[2] |= {"step": "x"}
    assert step_of(steps).mfu == 0.2917
    assert not step_of(step_events(4), kernels__device="cpu").copies_beside
    assert dissect(record(finished_events(step_events(4)), {})).step is not None
    nothing = dissect(record([{"event": "started", "time": 1.0}, {"event": "failed", "time": 4.0}]))
    assert (nothing.step, nothing.run.total) == (None, 3.0)


def test_the_whole_run_is_split_by_purpose():
    events = [
        {"event": "started", "time": 0.0, "step": 0},
        {"event": "loaded", "time": 10.0, "seconds": 9.0},
        {"event": "compiled", "time": 31.0, "step": 1, "seconds": 21.0},
        {"event": "step", "time": 40.0, "step": 10, "seconds": 30.0},
        {"event": "eval", "time": 45.0, "step": 10, "seconds": 5.0},
        {"event": "saved", "time": 47.0, "step": 10, "seconds": 2.0},
        {"event": "finished", "time": 50.0, "step": 12, "seconds": 32.0},
    ]
    spent = run_times(events, usual_update=1.0)
    assert {**vars(spent), "rest": spent.rest} == {
        "loading": 9.0,
        "compiling": 20.0,
        "training": 12.0,
        "evaluating": 5.0,
        "saving": 2.0,
        "total": 50.0,
        "rest": 2.0,
    }
