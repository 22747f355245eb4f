"""The job behind `expert diagnose --try`: the first fix of a diagnosis, measured before and after.

Two short runs on the same rows, one unchanged and one with the fix, in temporary folders.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.rundir import RunFolder
from expert.insight.findings.finding import Finding, worst_first
from expert.jobs.validate.test_sets import data_folder
from expert.manifest.reader import ReadManifest, read_manifest
from expert.run.open import open_run
from expert.run.session.short_run import SETTLING, ShortRun, short_run
from expert.run.stored.load import read_plan

MEASURED_STEPS = 12
NOT_MEASURABLE = frozenset({"saves-only-at-the-end"})
"""Fixes that a short run cannot show."""

Read = Callable[[tuple[str, ...]], "ReadManifest"]
"""Reads the manifest with these overrides."""


class NothingToTry(ExpertError):
    """No finding has a fix that is a manifest key."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Results of a short run after warm-up."""

    updates: int
    seconds: float
    tokens: int
    examples: int
    tokens_per_second: float | None
    spread: float | None
    """Interquartile range of the per-step rates over their median: the machine's own noise."""
    seconds_an_update: float | None
    loss: float | None
    """Mean over all steps, including warm-up."""
    data_wait: float | None
    """Share of the time in which the device waited for a batch."""
    gpu_utilization: float | None
    peak_reserved_bytes: int | None
    fallbacks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TriedFix:
    name: str
    title: str
    overrides: tuple[str, ...]
    device: str
    before: MeasuredRun
    after: MeasuredRun

    @property
    def gain(self) -> float | None:
        """Ratio of tokens per second."""
        before, after = self.before.tokens_per_second, self.after.tokens_per_second
        return after / before if before and after else None

    @property
    def certain(self) -> bool:
        """Whether the difference exceeds the variation between steps of either run."""
        spread = max(self.before.spread or 0.0, self.after.spread or 0.0)
        return self.gain is not None and abs(self.gain - 1) > spread

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain, "certain": self.certain}


def first_fix(findings: Sequence[Finding]) -> Finding:
    """The first finding, worst first, whose fix can be tried."""
    for finding in worst_first([each for each in findings if each.name not in NOT_MEASURABLE]):
        if finding.overrides and finding.severity in ("error", "warning"):
            return finding
    raise NothingToTry(
        "--try: no finding is fixed by a key of the manifest  (the fixes, if any, are in the table)"
    )


def try_fix(
    read: Read,
    *,
    name: str,
    title: str,
    overrides: tuple[str, ...],
    updates: int = MEASURED_STEPS,
    tell: Callable[[str], None] = lambda text: None,
    **how: Any,
) -> TriedFix:
    """Measure a fix in two runs; `how`: further arguments of `run_briefly`."""
    tell("a short run as it is")
    before = run_briefly(read(()), updates=SETTLING + updates, **how)
    gc.collect()  # the first run's model makes room for the second's
    tell(f"a short run with {' '.join(overrides)}")
    after = run_briefly(read(overrides), updates=SETTLING + updates, **how)
    return TriedFix(
        name=name,
        title=title,
        overrides=overrides,
        device=after.plan.target,
        before=measured(before),
        after=measured(after),
    )


def run_briefly(
    read: ReadManifest, *, model: str | None = None, vram: str | None = None, **how: Any
) -> ShortRun:
    """A short run of a manifest; `how`: further arguments of `short_run`."""
    return short_run(open_run(read, model=model, vram=vram), **how)


def measured(run: ShortRun) -> MeasuredRun:
    """Sums over the steps after warm-up; over all if there are no others."""
    steps = [event for event in run.events if event["event"] == "step"]
    settled = [event for event in steps if event["step"] > SETTLING] or steps
    seconds = sum(float(event["seconds"]) for event in settled)
    tokens = sum(int(event["tokens"]) for event in settled)
    targets = sum(int(event["targets"]) for event in steps)
    losses = sum(float(event["loss"]) * int(event["targets"]) for event in steps)
    updates = sum(int(event.get("updates") or 1) for event in settled)
    waits = _known(settled, "time_data_wait")
    uses = _known(settled, "gpu_utilization")
    peaks = _known(steps, "peak_reserved_bytes")
    fallbacks = tuple(
        str(event.get("text") or event.get("reason") or "a fallback")
        for event in run.events
        if event["event"] == "fell_back"
    )
    return MeasuredRun(
        updates=updates,
        seconds=seconds,
        tokens=tokens,
        examples=sum(int(event["examples"]) for event in settled),
        tokens_per_second=tokens / seconds if seconds else None,
        spread=_spread([event["tokens"] / event["seconds"] for event in settled]),
        seconds_an_update=seconds / updates if updates else None,
        loss=losses / targets if targets else None,
        data_wait=sum(waits) / seconds if waits and seconds else None,
        gpu_utilization=sum(uses) / len(uses) if uses else None,
        peak_reserved_bytes=max(peaks, default=None),
        fallbacks=fallbacks,
    )


def _known(events: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [event[key] for event in events if event.get(key) is not None]


def _spread(rates: list[float]) -> float | None:
    """Interquartile range over the median; None for fewer than four."""
    if len(rates) < 4:
        return None
    low, middle, high = statistics.quantiles(rates, n=4)
    return (high - low) / middle if middle else None


# --- the manifest of a run that was ---------------------------------------------------------------


def read_run_manifest(run: Path, overrides: tuple[str, ...] = ()) -> ReadManifest:
    """The manifest of a run from its folder, with its paths resolved as they were then."""
    file = run / "manifest.json"
    if not file.is_file():
        raise NothingToTry(f"{run}: has no manifest.json to try a fix on  (name a run folder)")
    folder = RunFolder(run)
    try:
        place = data_folder(folder, read_plan(folder), None)
    except (ExpertError, OSError):  # an older plan, or none
        place = None
    read = read_manifest(file, overrides=overrides)
    return replace(read, folder=place or run.absolute().parent.parent)
