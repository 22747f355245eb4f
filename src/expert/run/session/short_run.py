"""A short run in a temporary folder: the real training loop, nothing is saved."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.interrupts import Interrupted
from expert.core.rundir import RunFolder
from expert.run.open import open_run
from expert.run.session.execute import StepWrapper, run_session
from expert.run.session.session import Start, open_session

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan

SETTLING = 3
"""Steps before measuring: the first compiles, the next fill buffers and caches."""

WITHOUT_PAUSES: dict[str, Any] = {
    "watch.evaluation_strategy": "no",
    "watch.save_strategy": "no",
    "watch.load_best": False,
    "watch.trackers": [],
    "watch.logging_steps": 1,
}
"""Plan values that leave nothing to do between steps."""


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    plan: RunPlan
    """At the end, including changes from fallbacks."""
    events: tuple[dict[str, Any], ...]
    updates: int


def short_run(
    read: ReadManifest,
    *,
    updates: int,
    model: str | None = None,
    vram: str | None = None,
    allow_remote_code: bool = False,
    through: StepWrapper = iter,
) -> ShortRun:
    """Train for `updates` steps, fewer if a stream ends, and keep only the events.

    The plan is that of the full run, so it compiles the same; only its end differs, and may exceed
    that of a shorter run.
    """
    full = open_run(read, model=model, vram=vram)
    cut = {"length.total_steps": updates, "length.max_steps": updates, **WITHOUT_PAUSES}
    plan = full.plan.with_values(cut, "a short run", "machine")
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="expert-short-run-") as place:
        folder = RunFolder.create(Path(place), plan.expert)
        opened = open_session(
            folder=folder,
            plan=plan,
            data=full.data,
            manifest=read.manifest,
            sinks=(events.append,),
            start=Start(allow_remote_code=allow_remote_code),
            keep=False,
        )
        with folder.locked(), opened as session:
            done = run_session(session, through=through)
        if done.exit_code:  # Ctrl-C also ends the command around this run
            raise Interrupted(done.exit_code - 128)
        return ShortRun(plan=session.plan, events=tuple(events), updates=done.steps)
