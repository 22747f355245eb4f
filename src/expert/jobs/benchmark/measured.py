"""One setting: `expert train` in a process of its own, and what the events of its run show."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.events import follow
from expert.core.process import Child, describe_exit
from expert.insight.ladder import Measured
from expert.planning.memory.workload import CAPTURED_WIDTHS
from expert.planning.run_plan import RunPlan
from expert.run.session.short_run import SETTLING

Event = dict[str, Any]
POLL_SECONDS = 0.1
WINDOW_SECONDS = 0.5
"""A rate is taken over as many steps as last this long."""
CAPTURE_STEPS = 6
"""Steps: CUDA graphs are captured at the third batch, the optimizer's once its gradients have kept
their addresses for two."""
CAPTURE_STEPS_PER_WIDTH = 8
"""More of them for each width that is captured when it first comes: most come within 30 steps."""


class MeasurementFailed(ExpertError):
    """A setting that cannot be measured; the message says why."""


def events_of(
    arguments: Sequence[str], runs: Path, *, log: Path, env: Mapping[str, str], limit: float
) -> Generator[Event, None, None]:
    """Run `expert train` in a process that writes below `runs`, and yield the events of its run;
    closing this kills it. Raises MeasurementFailed if it fails or takes longer than `limit`."""
    child = Child([sys.executable, "-m", "expert", "train", *arguments], log=log, env=env)
    ends_at = time.monotonic() + limit

    def is_over() -> bool:
        return child.has_ended or time.monotonic() > ends_at

    try:
        while (file := next(runs.glob("*/events.jsonl"), None)) is None and not is_over():
            time.sleep(POLL_SECONDS)
        if file is not None:
            yield from follow(file, is_over, POLL_SECONDS)
        if not child.has_ended:
            raise MeasurementFailed(f"not finished after {limit:.0f} s")
        code = child.wait()
        if code or file is None:
            words = child.stderr_tail() or "it printed nothing"
            raise MeasurementFailed(f"its process {describe_exit(code)}: {words}")
    finally:  # also on Ctrl-C: nothing may be left behind
        child.stop()


def environment_of(home: Path, plan: RunPlan) -> dict[str, str]:
    """The environment of such a process: no benchmark of this machine affects its plan, and it ends
    with this one."""
    from expert.parallel.launch import FOLLOWED

    env = {"EXPERT_HOME": str(home), FOLLOWED: str(os.getpid())}
    if plan.model.place == "models folder":  # which may be that of the usual home
        env["EXPERT_MODELS"] = str(Path(plan.model.location).absolute().parent)
    return env


def first_timed_step(plan: RunPlan) -> int:
    """Steps before the first timed one: they compile, fill caches and capture graphs."""
    if not plan.kernels.cuda_graphs:
        return SETTLING
    return CAPTURE_STEPS + CAPTURE_STEPS_PER_WIDTH * (CAPTURED_WIDTHS if plan.data.flat else 0)


def measured_of(
    plan: RunPlan, events: Sequence[Event], first: int, *, rows: int, loss_steps: int
) -> Measured:
    """What the events of a run show: rates over windows of steps after the `first` ones, and the
    training loss of the `loss_steps` first steps."""
    steps = [event for event in events if event["event"] == "step"]
    timed = [event for event in steps if event["step"] > first]
    if not timed:
        raise MeasurementFailed("the run ended before a step could be timed")

    def mean(key: str) -> float | None:
        known = [event[key] for event in timed if event.get(key) is not None]
        return statistics.fmean(known) if known else None

    rates, tokens, seconds = [], 0, 0.0
    for event in timed:
        tokens, seconds = tokens + event["tokens"], seconds + event["seconds"]
        if seconds >= WINDOW_SECONDS:
            rates.append(tokens / seconds)
            tokens, seconds = 0, 0.0
    if not rates:  # too fast for a whole window
        rates = [tokens / seconds]
    low, middle, high = (
        statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates * 3
    )
    samples = sum(e["examples"] for e in timed) / sum(e["seconds"] for e in timed)
    changed = [change for e in events if e["event"] == "fell_back" for change in e["changes"]]
    sizes = [each["value"] for each in changed if each["path"] == "batch.micro_batch"]
    peaks = [e["peak_reserved_bytes"] for e in steps if e.get("peak_reserved_bytes")]
    peaks = peaks or [e["cpu_peak_memory_bytes"] for e in steps if e.get("cpu_peak_memory_bytes")]
    learnt = [event for event in steps if event["step"] <= loss_steps]
    targets = sum(int(event["targets"]) for event in learnt)
    losses = sum(float(event["loss"]) * int(event["targets"]) for event in learnt)
    return Measured(
        tokens_per_second=middle,
        spread=high - low,
        samples_per_second=samples,
        seconds_per_epoch=rows / samples,
        gpu_utilization=mean("gpu_utilization"),
        peak_memory_bytes=max(peaks, default=None),
        mfu=mean("mfu"),
        updates_learnt=learnt[-1]["step"],
        loss=losses / targets if targets else None,
        micro_batch=int(sizes[-1]) if sizes else plan.batch.micro_batch,
    )
