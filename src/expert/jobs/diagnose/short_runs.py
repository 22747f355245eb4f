"""Short runs behind `expert diagnose`: the time of a step, and a profile.

Each is a real run on this machine, with the plan of the full run, that saves nothing.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import sync_file
from expert.core.links import refuse_links
from expert.core.process import filtered_stderr
from expert.core.rundir import RunFolder
from expert.jobs.validate.test_sets import data_folder
from expert.manifest.reader import ReadManifest, read_manifest
from expert.planning.plan import folder_name
from expert.run.open import open_run
from expert.run.session.short_run import SETTLING, ShortRun, short_run
from expert.run.stored.load import read_plan

TIMED_STEPS = 5
TIMED_SECONDS = 60.0
"""Slow steps are timed for as long as this, and at least two of them."""
KINETO = b"USDT:"
"""Prefix of the profiler's start and stop messages on standard error; no log level hides them."""


def run_briefly(
    read: ReadManifest, *, model: str | None = None, vram: str | None = None, **how: Any
) -> ShortRun:
    """A short run of a manifest; `how`: further arguments of `short_run`."""
    return short_run(open_run(read, model=model, vram=vram), **how)


def time_steps(read: ReadManifest, **how: Any) -> float:
    """Seconds of a step after warm-up; `how`: arguments of `run_briefly`."""
    began = time.monotonic()

    def limited(steps: Iterable[Any]) -> Iterator[Any]:
        for number, step in enumerate(steps):
            if number >= 2 and time.monotonic() - began > TIMED_SECONDS:
                return
            yield step

    done = run_briefly(read, updates=SETTLING + TIMED_STEPS, through=limited, **how)
    steps = [float(event["seconds"]) for event in done.events if event["event"] == "step"]
    if not steps:
        raise ExpertError("the run ended before a step could be timed")
    return statistics.fmean(steps[min(SETTLING, len(steps) - 1) :])  # at least the last


def read_run_manifest(run: Path, overrides: tuple[str, ...] = ()) -> ReadManifest:
    """The manifest of a run from its folder, with its paths resolved as they were then."""
    file = run / "manifest.json"
    if not file.is_file():
        raise ExpertError(f"{run}: has no manifest.json  (name a run folder)")
    folder = RunFolder(run)
    try:
        place = data_folder(folder, read_plan(folder), None)
    except (ExpertError, OSError):  # a damaged plan, or none
        place = None
    read = read_manifest(file, overrides=overrides)
    return replace(read, folder=place or run.absolute().parent.parent)


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

    place = folder or read.folder / "profile"
    refuse_links(place, below=place.parent)
    profiler = torch.profiler.profile()  # of the CPU, and of the card if there is one
    seen = 0

    def profiled(steps: Iterable[Any]) -> Iterator[Any]:
        nonlocal seen
        steps = iter(steps)
        yield from islice(steps, SETTLING)
        for step in islice(steps, updates):
            if not seen:
                switch(profiler.start)
            yield step  # it ends when the loop asks for the next one
            seen += 1
        if seen:
            switch(profiler.stop)

    def switch(action: Callable[[], None]) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with filtered_stderr(KINETO):
            action()

    done = run_briefly(read, updates=SETTLING + updates + 1, through=profiled, **how)
    if not seen:
        what = f"the run has too few steps: {SETTLING} warm up, then some are traced"
        raise ExpertError(f"--profile: {what}  (more epochs, or a smaller batch_size)")
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
    kernels.sort(key=lambda kernel: -kernel[1])
    return Profile(
        trace=str(place / name), device=done.plan.target, updates=seen, kernels=tuple(kernels)
    )
