"""Benchmarks whose runs are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from expert.insight.ladder import Ladder
from expert.jobs.benchmark import benchmark
from expert.jobs.benchmark.benchmark import (
    Benchmark,
    BenchmarkRequest,
    Event,
    MeasurementFailed,
)
from expert.manifest.reader import read_manifest

Answer = Callable[[str], float | tuple[float, float] | str]
"""The rate of a setting, its rate and loss, or why there is none."""


def request(path: Path, *overrides: str, **more: Any) -> BenchmarkRequest:
    return BenchmarkRequest(
        read=lambda further: read_manifest(path, overrides=(*overrides, *further)),
        arguments=("--manifest", str(path)),
        command="expert benchmark",
        **{"minutes": 1000.0, **more},
    )


class Played:
    """The events of runs that are made up. `given`: rates of all settings, or of those by name; the
    others reach 100, 200, 300, … one after the other, and the repeated baseline the rate it had."""

    def __init__(self, given: Answer | Mapping[str, Any] = {}) -> None:  # noqa: B006 - only read
        self.given, self.rising = given, count(100, 100)
        self.rates: dict[str, Any] = {}
        self.arguments: dict[str, Sequence[str]] = {}

    def __call__(self, arguments: Sequence[str], runs: Path, **_: Any) -> Iterator[Event]:
        name = runs.name
        self.arguments[name] = arguments
        if callable(self.given):
            found = self.given(name)
        else:
            again = self.rates.get("baseline") if name == "baseline-again" else None
            found = self.given.get(name) or again or float(next(self.rising))
        self.rates[name] = found
        if isinstance(found, str):
            raise MeasurementFailed(found)
        rate, loss = found if isinstance(found, tuple) else (found, 2.0)
        for step in count(1):
            facts = {"tokens": rate, "seconds": 1.0, "updates": 1, "examples": 2, "targets": 9}
            yield {"event": "step", "step": step, "loss": loss, **facts}


def played(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    place: Path,
    given: Answer | Mapping[str, Any] = {},  # noqa: B006 - only read
    **more: Any,
) -> tuple[Ladder, Played, list[str]]:
    """A benchmark whose processes are made up, and what it showed."""
    events, shown = Played(given), list[str]()
    monkeypatch.setattr(benchmark, "events_of", events)
    made = Benchmark(request(path, **more), lambda text, style: shown.append(text), print)
    made.run(place)
    return made.ladder(), events, shown
