"""Short runs behind `expert diagnose`: the time of a step, a profile, and a fix that is tried.

Each is a real run on this machine, with the plan of the full run, that saves nothing.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import sync_file
from expert.core.links import refuse_links
from expert.core.process import filtered_stderr
from expert.core.rundir import RunFolder
from expert.insight.findings.finding import Finding, worst_first
from expert.insight.ladder.ladder import Measured, verdict
from expert.jobs.benchmark.measured import measured_of
from expert.jobs.validate.test_sets import data_folder
from expert.manifest.reader import ReadManifest, read_manifest
from expert.planning.plan import folder_name
from expert.run.open import open_run
from expert.run.session.short_run import SETTLING, ShortRun, short_run
from expert.run.stored.load import read_plan

TIMED_STEPS = 5
TIMED_SECONDS = 60.0
"""Slow steps are timed for as long as this, and at least two of them."""
COMPARED_STEPS = 12
NOT_MEASURABLE = frozenset({"saves-only-at-the-end"})
"""Fixes that a short run cannot show."""
KINETO = b"USDT:"
"""Prefix of the profiler's start and stop messages on standard error; no log level hides them."""

Read = Callable[[tuple[str, ...]], ReadManifest]
"""Reads the manifest with these overrides."""


class NothingToTry(ExpertError):
    """No finding has a fix that is a manifest key."""


def run_briefly(
    read: ReadManifest, *, model: str | None = None, vram: str | None = None, **how: Any
) -> ShortRun:
    """A short run of a manifest; `how`: further arguments of `short_run`."""
    return short_run(open_run(read, model=model, vram=vram), **how)


def time_steps(read: ReadManifest, **how: Any) -> Measured:
    """Time a few steps; `how`: arguments of `run_briefly`."""
    began = time.monotonic()

    def limited(steps: Iterable[Any]) -> Iterator[Any]:
        for number, step in enumerate(steps):
            if number >= 2 and time.monotonic() - began > TIMED_SECONDS:
                return
            yield step

    return _measured(run_briefly(read, updates=SETTLING + TIMED_STEPS, through=limited, **how))


def _measured(done: ShortRun) -> Measured:
    steps = [event for event in done.events if event["event"] == "step"]
    first = min(SETTLING, len(steps) - 1)  # of a very short run the last step counts
    return measured_of(done.plan, done.events, first, window=0.0, rows=0)


# --- a fix before and after ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TriedFix:
    name: str
    title: str
    overrides: tuple[str, ...]
    device: str
    before: Measured
    after: Measured

    @property
    def gain(self) -> float:
        """Ratio of tokens per second."""
        return self.after.tokens_per_second / self.before.tokens_per_second

    @property
    def certain(self) -> bool:
        """Whether the difference exceeds the variation between steps of either run."""
        return verdict(self.before, self.after, "", tolerance=None)[0] != "no difference"

    def as_dict(self) -> dict[str, Any]:
        runs = {"before": self.before.model_dump(), "after": self.after.model_dump()}
        names = {"name": self.name, "title": self.title, "overrides": self.overrides}
        return {**names, "device": self.device, **runs, "gain": self.gain, "certain": self.certain}


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
    updates: int = COMPARED_STEPS,
    tell: Callable[[str], None] = lambda text: None,
    **how: Any,
) -> TriedFix:
    """Measure a fix in two runs on the same rows; `how`: arguments of `run_briefly`."""
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
        before=_measured(before),
        after=_measured(after),
    )


def read_run_manifest(run: Path, overrides: tuple[str, ...] = ()) -> ReadManifest:
    """The manifest of a run from its folder, with its paths resolved as they were then."""
    file = run / "manifest.json"
    if not file.is_file():
        raise NothingToTry(f"{run}: has no manifest.json to try a fix on  (name a run folder)")
    folder = RunFolder(run)
    try:
        place = data_folder(folder, read_plan(folder), None)
    except (ExpertError, OSError):  # a damaged plan, or none
        place = None
    read = read_manifest(file, overrides=overrides)
    return replace(read, folder=place or run.absolute().parent.parent)


# --- a profile -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What N steps spent their time on."""

    trace: str
    device: str
    updates: int
    kernels: tuple[tuple[str, float, int], ...]
    """Name, seconds and calls of each kernel (on a CPU: operator), the longest first."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def profile(read: ReadManifest, *, updates: int, folder: Path | None = None, **how: Any) -> Profile:
    """Run torch's profiler around some steps after warm-up, and write the trace for Perfetto to
    profile/ next to the manifest; `how`: arguments of `run_briefly`."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    place = folder or read.folder / "profile"
    refuse_links(place, below=place.parent)
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    profiler = torch_profile(activities=activities)
    seen = 0

    def profiled(steps: Iterable[Any]) -> Iterator[Any]:
        nonlocal seen
        for number, step in enumerate(steps):
            if number == SETTLING:
                switch(profiler.start)
            yield step  # it ends when the loop asks for the next one
            seen += number >= SETTLING
            if seen == updates:
                break
        if seen:
            switch(profiler.stop)

    def switch(action: Callable[[], None]) -> None:
        if cuda:
            torch.cuda.synchronize()
        with filtered_stderr(KINETO):
            action()

    done = run_briefly(read, updates=SETTLING + updates + 1, through=profiled, **how)
    if not seen:
        raise ExpertError(
            f"--profile: the run has too few steps: {SETTLING} warm up, then some are traced  "
            "(more epochs, or a smaller batch_size)"
        )
    name = f"{folder_name(done.plan.expert)}-{datetime.now(UTC):%Y%m%d-%H%M%S}.trace.json.gz"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-trace-", dir=place) as temporary:
        packed = Path(temporary) / "trace.json.gz"
        profiler.export_chrome_trace(str(packed))
        sync_file(packed)
        os.replace(packed, place / name)
    on_gpu = done.plan.kernels.device == "cuda"
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = [
        (event.key, getattr(event, time_of) / 1e6, event.count)
        for event in profiler.key_averages()
        if not on_gpu or str(event.device_type).endswith("CUDA")
    ]
    return Profile(
        trace=str(place / name),
        device=done.plan.target,
        updates=seen,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel[1])),
    )
