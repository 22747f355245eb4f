"""The measured rate of a finished run is used by later plans of similar runs."""

from __future__ import annotations

from typing import Any

import pytest

from expert.planning.measurements import measurements_file, read_rates
from expert.run.open import plan
from expert.run.session import run_rate
from expert.run.session.run_rate import (
    LEAST_SECONDS,
    LEAST_STEPS,
    compile_seconds,
    settled_rate,
    was_compiled_before,
)
from tests.each import each
from tests.insight.records import CPU, evidence, finished_events, planned, record, step_events
from tests.jobs.runs import base_model, events_of, run, write_expert


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch):
    monkeypatch.setattr(run_rate, "LEAST_SECONDS", LEAST_SECONDS)


def test_the_rate_of_a_finished_run_is_the_time_of_the_next_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run_rate, "LEAST_SECONDS", 0.0)
    file = write_expert(tmp_path, base_model(), {"epochs": 5})
    assert plan(file).length.tokens_per_second is None
    done = run(file)
    assert done.steps >= LEAST_STEPS
    [kept] = read_rates(measurements_file())
    rates = [event["tokens_per_second"] for event in events_of(done.folder, "step")]
    assert min(rates) <= kept.tokens_per_second <= max(rates)
    again = plan(file, overrides=("epochs=50",))
    assert again.length.tokens_per_second == kept.tokens_per_second
    tokens = (again.length.tokens_per_epoch or 0) * 50
    assert again.length.seconds == pytest.approx(tokens / kept.tokens_per_second)
    assert plan(file, overrides=("batch_size=4",)).length.seconds is None


def test_a_run_that_cannot_be_remembered_ends_well_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file where a folder belongs")
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(run_rate, "LEAST_SECONDS", 0.0)
    done = run(write_expert(tmp_path, base_model(), {"epochs": 5}))
    assert done.final is not None
    told = [event["text"] for event in events_of(done.folder, "warning")]
    assert [text for text in told if text.startswith("the rate could not be stored: ")]


def reached(*others: dict[str, Any], on_cpu: bool = False, **changes: Any) -> float | None:
    lines = step_events(changes.pop("lines", 20), **changes)
    made = planned(**{f"kernels__{name}": value for name, value in CPU.items()} if on_cpu else {})
    return settled_rate(evidence(record(finished_events(lines, *others), made)))


def threads(**told: Any) -> dict[str, Any]:
    return {"event": "threads", "time": 99.0, "threads": 2, "own": 2, "cores": 2, **told}


def test_an_undisturbed_run_that_is_long_enough_has_a_rate():
    assert reached(tokens_per_second=5.0) == 5.0
    assert reached(threads(lowered=False), on_cpu=True, tokens_per_second=5.0) == 5.0


@each(
    ("others", "changes"),
    [
        ((), {"lines": 3}),
        ((), {"seconds": 0.2, "time_forward": 0.1, "time_backward": 0.1}),
        (({"event": "fell_back", "time": 99.0, "step": 0, "failure": "out of memory"},), {}),
        (({"event": "resumed", "time": 99.0, "step": 0},), {}),
        ((threads(threads=1, lowered=True),), {"on_cpu": True}),
        ((threads(lowered=False),), {"on_cpu": True, "cpu_others": 0.5}),
    ],
    ids=["few updates", "quick", "fell back", "resumed", "fewer threads", "neighbours"],
)
def test_a_run_that_was_short_or_disturbed_has_none(others, changes):
    assert reached(*others, **changes) is None


@each(
    ("counted", "found"),
    [
        ({}, None),
        ({"inductor": {"fxgraph_cache_miss": 2}}, False),
        ({"inductor": {"fxgraph_cache_hit": 2}, "aot_autograd": {"autograd_cache_hit": 1}}, True),
        ({"inductor": {"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}}, False),
    ],
)
def test_torch_tells_whether_it_had_compiled_everything_before(counted, found):
    from collections import Counter, defaultdict

    import torch._dynamo.utils as utils

    with pytest.MonkeyPatch.context() as patch:
        counters = defaultdict(Counter, {name: Counter(kinds) for name, kinds in counted.items()})
        patch.setattr(utils, "counters", counters)
        assert was_compiled_before() is found


def test_only_a_run_that_compiled_once_and_changed_nothing_tells_what_compiling_takes():
    compiled = {"event": "compiled", "time": 99.0, "step": 1, "seconds": 31.5}
    fell_back = {"event": "fell_back", "time": 99.5, "step": 1, "reason": "x"}

    def told(*events: dict[str, Any]) -> float | None:
        return compile_seconds(record(finished_events(step_events(20), *events), planned()))

    assert told(compiled) == 31.5
    assert told() is told(compiled, fell_back) is told(compiled, compiled) is None
