"""Made-up runs of events and a plan, with the numbers that a GPU reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expert.core.events import Event
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding
from expert.insight.findings.table import find
from expert.insight.findings.verdict import Verdict, judge
from expert.insight.record import RunRecord
from expert.insight.step.anatomy import dissect

GIB = 2**30
_HEALTHY = json.loads(Path(__file__).with_name("healthy.json").read_text(encoding="utf-8"))
HEALTHY_STEP: Event = _HEALTHY["step"]
"""A step of a 0.6B model on an H200 (docs/benchmarks/training-speed-h200.json)."""
PLAN: dict[str, Any] = _HEALTHY["plan"]
H200: dict[str, Any] = {
    name: {"value": value, "source": "NVML"} for name, value in _HEALTHY["gpu"].items()
}
CPU = {"device": "cpu", "precision": "fp32", "tf32": False, "attention": "sdpa"}


def step_events(count: int = 12, /, *, every: Any = 5, **changes: Any) -> list[Event]:
    """Log lines of a healthy run, with changes; a value of None leaves a field out."""
    fields = {**HEALTHY_STEP, **changes}
    kept = {name: value for name, value in fields.items() if value is not None}
    return [
        {"event": "step", "time": 100.0 + line, "step": every * line, **kept}
        for line in range(1, count + 1)
    ]


def finished_events(steps: list[Event], *others: Event) -> list[Event]:
    """A run that starts, writes these log lines and finishes."""
    began: Event = {"event": "started", "time": 90.0, "step": 0, "pid": 7}
    loaded: Event = {"event": "loaded", "time": 99.0, "step": 0, "seconds": 9.0}
    feed: Event = {"event": "feed", "time": 99.0, "step": 0, "kind": "packed", "workers": 0}
    last = steps[-1]["time"] + 1 if steps else 100.0
    return [
        began,
        loaded,
        feed,
        *others,
        *steps,
        {"event": "finished", "time": last, "step": steps[-1]["step"] if steps else 0},
    ]


def planned(requested: tuple[str, ...] = (), /, **changes: Any) -> dict[str, Any]:
    """The plan of a healthy run with changed values by path; `asked`: set in the manifest."""
    tree = {name: dict(part) if isinstance(part, dict) else part for name, part in PLAN.items()}
    for path, value in changes.items():
        slice_name, _, key = path.partition("__")
        tree[slice_name][key] = value
    tree["decisions"] = [
        {"path": path, "because": "set in the manifest", "source": "manifest"} for path in requested
    ]
    return tree


def record(
    events: list[Event], plan: dict[str, Any] | None = None, *, gpus: tuple[Any, ...] = (H200,)
) -> RunRecord:
    return RunRecord(
        folder=Path("run"),
        plan=PLAN if plan is None else plan,
        environment={
            "cuda": "12.8",
            "machine": {"gpus": list(gpus), "cores_available": {"value": 16, "source": "x"}},
        },
        events=tuple(events),
    )


def evidence(run: RunRecord) -> Evidence:
    return Evidence(run=run, anatomy=dissect(run))


def found_in(run: RunRecord) -> dict[str, Finding]:
    return {finding.name: finding for finding in find(evidence(run))}


def judged(run: RunRecord) -> Verdict:
    found = evidence(run)
    return judge(found, find(found))
