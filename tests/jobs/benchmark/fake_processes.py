"""Benchmarks as tests ask for them: with real processes, or with events that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from expert.insight.ladder.ladder import Ladder, SettingResult
from expert.jobs.benchmark import benchmark
from expert.jobs.benchmark.benchmark import Benchmark
from expert.jobs.benchmark.child import Job, MeasurementFailed
from expert.jobs.benchmark.measured import Event
from expert.jobs.benchmark.request import BenchmarkPace, BenchmarkRequest, Watcher
from expert.manifest.reader import read_manifest

# As short as can be: what is measured here is whether it works, not how fast it is.
BRISK = BenchmarkPace(
    total_seconds=100_000.0,
    timed_seconds=0.01,
    window_seconds=0.01,
    max_train_steps=6,
    held_out=8,
    limit_seconds=300.0,
)


def be_brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as briefly as can be."""
    monkeypatch.setattr("expert.jobs.benchmark.request.QUICK", BRISK)


def request(path: Path, *overrides: str, **more: Any) -> BenchmarkRequest:
    return BenchmarkRequest(
        read=lambda further: read_manifest(path, overrides=(*overrides, *further)),
        command="expert benchmark",
        quick=True,
        **more,
    )


class Heard(Watcher):
    """Keeps what it was shown."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.doing: set[str] = set()
        self.forgotten = ""

    def setting_started(self, name: str, adds: str, number: int, of: int, left: float) -> None:
        self.started.append(name)

    def setting_progress(self, doing: str, step: int) -> None:
        self.doing.add(doing)

    def setting_finished(self, result: SettingResult) -> None:
        self.ended.append(result.name)

    def not_remembered(self, because: str) -> None:
        self.forgotten = because


Answer = Callable[[str, Any], float | tuple[float, float] | str]
"""The rate of a setting with its plan, its rate and loss, or why there is none."""


class Played:
    """The events of runs that are made up. `given`: rates of all settings, or of those by name; the
    others reach 100, 200, 300, … one after the other, and the repeated baseline the rate it had."""

    def __init__(self, given: Answer | Mapping[str, Any] = {}) -> None:  # noqa: B006 - only read
        self.given, self.rising = given, count(100, 100)
        self.rates: dict[str, Any] = {}
        self.plans: dict[str, Any] = {}

    def __call__(self, job: Job, *, log: Path, limit: float) -> Iterator[Event]:
        self.plans[job.name] = job.plan
        if callable(self.given):
            found = self.given(job.name, job.plan)
        else:
            again = self.rates.get("baseline") if job.name == "baseline-again" else None
            found = self.given.get(job.name) or again or float(next(self.rising))
        self.rates[job.name] = found
        if isinstance(found, str):
            raise MeasurementFailed(found)
        rate, loss = found if isinstance(found, tuple) else (found, 2.0)
        for step in count(1):
            facts = {"tokens": rate, "seconds": 1.0, "updates": 1, "examples": 2}
            yield {"event": "step", "step": step, **facts}
            if step % job.eval_every == 0:
                yield {"event": "eval", "step": step, "loss": loss, "tokens": 80}


def played(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    place: Path,
    given: Answer | Mapping[str, Any] = {},  # noqa: B006 - only read
    *,
    watcher: Watcher | None = None,
    **more: Any,
) -> tuple[Ladder, Played, Benchmark]:
    """A benchmark whose processes are made up."""
    events = Played(given)
    monkeypatch.setattr(benchmark, "events_of", events)
    made = Benchmark(request(path, **more), watcher or Watcher())
    return made.run(place), events, made
