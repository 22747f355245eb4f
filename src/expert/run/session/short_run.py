"""A short run: the real training loop, nothing is saved."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.interrupts import Interrupted
from expert.core.rundir import RunFolder

if TYPE_CHECKING:  # this module is imported before torch
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened
    from expert.run.session.execute import StepWrapper

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
    opened: Opened,
    *,
    updates: int,
    allow_remote_code: bool = False,
    through: StepWrapper = iter,
) -> ShortRun:
    """Train for `updates` steps, fewer if a stream ends, in a temporary folder.

    The plan is that of the full run, so it compiles the same; only its end differs, and may exceed
    that of a shorter run.
    """
    from expert.run.session.execute import run_session
    from expert.run.session.session import open_session

    cut = {"length.total_steps": updates, "length.max_steps": updates, **WITHOUT_PAUSES}
    plan = opened.plan.with_values(cut, "a short run", "machine")
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="expert-short-run-") as place:
        folder = RunFolder.create(Path(place), plan.expert)
        session_open = open_session(
            replace(opened, plan=plan),
            folder=folder,
            sinks=(events.append,),
            allow_remote_code=allow_remote_code,
            keep=False,
        )
        with folder.locked(), session_open as session:
            done = run_session(session, through=through)
    if done.exit_code:  # Ctrl-C also ends the command around this run
        raise Interrupted(done.exit_code - 128)
    return ShortRun(plan=session.plan, events=tuple(events), updates=done.steps)
