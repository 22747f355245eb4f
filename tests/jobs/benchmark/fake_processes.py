"""Benchmarks as tests ask for them: with real processes, or with rates that are made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expert.insight.ladder.ladder import Ladder, Measured, SettingResult
from expert.jobs.benchmark import pace
from expert.jobs.benchmark.benchmark import BenchmarkRequest, Watcher
from expert.jobs.benchmark.measure import Benchmark
from expert.jobs.benchmark.processes import Job, MeasurementFailed, Ready, Window
from expert.manifest.reader import read_manifest
from tests.insight.ladders import measured

# As short as can be: what is measured here is whether it works, not how fast it is.
BRISK = pace.BenchmarkPace(
    total_seconds=100_000.0,
    train_seconds=0.1,
    max_train_steps=6,
    window_seconds=0.01,
    least_pairs=2,
    most_pairs=2,
    held_out=8,
    limit_seconds=300.0,
)


def be_brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as briefly as can be."""
    monkeypatch.setattr(pace, "QUICK", BRISK)


def request(path: Path, *overrides: str, **more: Any) -> BenchmarkRequest:
    return BenchmarkRequest(
        read=lambda further: read_manifest(path, overrides=(*overrides, *further)),
        command="expert benchmark",
        quick=True,
        **more,
    )


def a_job(name: str = "x", *, device: str = "cpu", peak: int = 10, limit: float = 30.0) -> Job:
    """A job whose plan knows its device and its memory alone."""
    memory = SimpleNamespace(peak_bytes=peak, budget_bytes=100)
    plan: Any = SimpleNamespace(memory=memory, kernels=SimpleNamespace(device=device))
    read: Any = None
    pace_of_it = replace(pace.QUICK, limit_seconds=limit)
    return Job(
        name=name,
        plan=plan,
        read=read,
        runs=Path(),
        pace=pace_of_it,
        steps=None,
        eval_precision="fp32",
    )


class Heard(Watcher):
    """Keeps what it was shown."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.doing: set[str] = set()
        self.forgotten = ""
        self.warned: list[str] = []

    def setting_started(self, setting: Any, number: int, of: int, left: float) -> None:
        self.started.append(setting.name)

    def crowded(self, words: str) -> None:
        self.warned.append(words)

    def setting_progress(self, doing: str, done: int, of: int) -> None:
        self.doing.add(doing)

    def setting_finished(self, result: SettingResult) -> None:
        self.ended.append(result.name)

    def not_remembered(self, because: str) -> None:
        self.forgotten = because


Answer = Callable[[str, Any], Measured | str]
"""What is measured of a setting with its plan, or why nothing is."""
COUNTED = {"training_rows": 10, "held_out_rows": 2, "held_out_tokens": 20}


class PlayedProcess:
    """Answers at once with what was made up."""

    def __init__(self, played: Played, job: Job) -> None:
        self.played, self.job, self.alive = played, job, True
        played.started.append((job.name, job.speed_only, job.threads))
        if not job.speed_only:
            played.plans[job.name] = job.plan
            played.answers[job.name] = played.answer(job.name, job.plan)
        found = played.answers[job.name]
        if isinstance(found, str):
            raise MeasurementFailed(found)
        if job.own_loss_too and found.own_loss is None:
            found = found.model_copy(update={"own_loss": found.loss})
        self.found = found
        self.ready = Ready(step_seconds=0.1, steps=10, cores=2, threads=2)
        played.live.append(self)

    def window(self, steps: int, skip: int) -> Window:
        self.played.windows.append(self.job.name)
        return Window(
            first=10,
            steps=1,
            tokens=round(1000 * self.found.tokens_per_second),
            examples=1,
            seconds=1000.0 * self.played.slowness(self.job.name),
            others=0.0,
        )

    def measured(self) -> dict[str, Any]:
        given = self.found.model_dump()
        return {key: value for key, value in given.items() if key != "spread"} | COUNTED

    def stop(self) -> None:
        self.alive = False
        if self in self.played.live:
            self.played.live.remove(self)


class Played:
    """Starts processes that are made up, and keeps what they were asked for.

    `given`: what is measured of all settings, or of those by name; the others reach 100, 200, 300,
    … one after the other."""

    def __init__(
        self,
        given: Answer | Mapping[str, Measured | str] = {},  # noqa: B006 - only read
        slowness: Callable[[str], float] | None = None,
        **facts: Any,
    ) -> None:
        self.given, self.rising, self.facts = given, count(100, 100), facts
        self.slowness = slowness or (lambda name: 1.0)
        """Times as long as it should take."""
        self.answers: dict[str, Measured | str] = {}
        self.plans: dict[str, Any] = {}
        self.started: list[tuple[str, bool, int | None]] = []
        self.windows: list[str] = []
        self.live: list[PlayedProcess] = []

    def answer(self, name: str, plan: Any) -> Measured | str:
        if callable(self.given):
            return self.given(name, plan)
        return self.given.get(name) or measured(float(next(self.rising)), **self.facts)

    def __call__(self, job: Job, *, log: Path, progress: Any, **_: Any) -> Any:
        return PlayedProcess(self, job)


def benchmarked(
    path: Path,
    place: Path,
    given: Answer | Mapping[str, Measured | str] = {},  # noqa: B006 - only read
    *,
    slowness: Callable[[str], float] | None = None,
    watcher: Watcher | None = None,
    **more: Any,
) -> tuple[Ladder, Played, Benchmark]:
    made, played = Benchmark(request(path, **more), watcher or Watcher()), Played(given, slowness)
    found = made.run(place, played)
    assert played.live == []
    return found, played, made
