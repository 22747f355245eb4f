"""A short run: the real training loop, nothing is saved."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
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
    values: Mapping[str, Any] | None = None,
    folder: RunFolder | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    allow_remote_code: bool = False,
    through: StepWrapper = iter,
) -> ShortRun:
    """Train for `updates` steps, fewer if a stream ends, in a temporary folder unless one is given.

    The plan is that of the full run, so it compiles the same; only its end differs, and may exceed
    that of a shorter run. `values`: plan values that differ as well.
    """
    from expert.run.session.execute import run_session
    from expert.run.session.session import open_session

    if folder is None:
        with tempfile.TemporaryDirectory(prefix="expert-short-run-") as place:
            return short_run(
                opened,
                updates=updates,
                values=values,
                folder=RunFolder.create(Path(place), opened.plan.expert),
                on_event=on_event,
                allow_remote_code=allow_remote_code,
                through=through,
            )
    cut = {"length.total_steps": updates, "length.max_steps": updates, **WITHOUT_PAUSES}
    plan = opened.plan.with_values(cut | dict(values or {}), "a short run", "machine")
    events: list[dict[str, Any]] = []
    session_open = open_session(
        replace(opened, plan=plan),
        folder=folder,
        sinks=(events.append, on_event),
        allow_remote_code=allow_remote_code,
        keep=False,
    )
    with folder.locked(), session_open as session:
        done = run_session(session, through=through)
    if done.exit_code:  # Ctrl-C also ends the command around this run
        raise Interrupted(done.exit_code - 128)
    return ShortRun(plan=session.plan, events=tuple(events), updates=done.steps)
