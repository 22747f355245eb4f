"""A short run of a manifest in a folder that is thrown away: the real loop, nothing is kept."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.interrupts import Interrupted
from expert.core.rundir import RunFolder
from expert.run.open import open_run
from expert.run.session.execute import Through, run_session
from expert.run.session.session import Start, open_session

if TYPE_CHECKING:
    from expert.core.events import Sink
    from expert.data.feed.run_data import RunData
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan

SETTLING = 3
"""Steps before anything is measured: the first compiles, the next fill buffers and caches."""

WITHOUT_PAUSES: dict[str, Any] = {
    "watch.evaluation_strategy": "no",
    "watch.save_strategy": "no",
    "watch.load_best": False,
    "watch.trackers": [],
    "watch.logging_steps": 1,
}
"""Values of a plan that does nothing between its steps."""


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    """What a short run was and did."""

    plan: RunPlan
    """As it was at the end, with what a fallback has changed."""
    events: tuple[dict[str, Any], ...]
    updates: int


def prepared_plan(
    read: ReadManifest, *, model: str | None = None, vram: str | None = None
) -> tuple[RunPlan, RunData]:
    """The plan a run of this manifest would begin with, and its data, prepared."""
    opened = open_run(read, model=model, vram=vram)
    return opened.plan, opened.data


def short_run(
    read: ReadManifest,
    *,
    updates: int,
    model: str | None = None,
    vram: str | None = None,
    allow_remote_code: bool = False,
    through: Through = iter,
    sinks: Sequence[Sink] = (),
) -> ShortRun:
    """Train for so many steps and keep only the events; a stream may have fewer.

    The plan is that of the whole run, so what it would compile is compiled here too; only its end
    differs, and may lie beyond that of a run that is shorter.
    """
    plan, data = prepared_plan(read, model=model, vram=vram)
    cut = {"length.total_steps": updates, "length.max_steps": updates, **WITHOUT_PAUSES}
    plan = plan.with_values(cut, "a short run", "machine")
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="expert-short-run-") as place:
        folder = RunFolder.create(Path(place), plan.expert)
        opened = open_session(
            folder=folder,
            plan=plan,
            data=data,
            manifest=read.manifest,
            sinks=(events.append, *sinks),
            start=Start(allow_remote_code=allow_remote_code),
            keep=False,
        )
        with folder.locked(), opened as session:
            done = run_session(session, through=through)
        if done.exit_code:  # Ctrl-C ends what the run is a part of, too
            raise Interrupted(done.exit_code - 128)
        return ShortRun(plan=session.plan, events=tuple(events), updates=done.steps)
