"""A short run of a manifest in a folder that is thrown away: the real loop, nothing is saved."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.interrupts import Interrupted
from expert.run.checkpoints import Checkpoints, Groups
from expert.run.session import Session

if TYPE_CHECKING:
    from expert.core.events import Sink
    from expert.data.feed.run_data import RunData
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan
    from expert.run.build import Built
    from expert.training.evaluation import EvalResult
    from expert.training.state import TrainState

SETTLING = 3
"""Updates before anything is measured: the first compiles, the next fill buffers and caches."""

WITHOUT_PAUSES: dict[str, Any] = {
    "watch.evaluation_strategy": "no",
    "watch.save_strategy": "no",
    "watch.load_best": False,
    "watch.trackers": [],
    "watch.logging_steps": 1,
}
"""Values of a plan that does nothing between its updates."""

Passing = Callable[[Iterable[Any]], Iterable[Any]]


class Rehearsal(Session):
    """A run of which nothing is kept. `through` sees its updates on their way to the loop."""

    through: Passing = staticmethod(lambda updates: updates)

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.checkpoints = _NoCheckpoints(self.folder, self.emit)

    def passing(self, updates: Iterable[Any]) -> Iterable[Any]:
        return self.through(updates)

    def save(self, state: TrainState, due: bool = False) -> None:
        self.state = state

    def publish_final(self) -> Path:
        return self.folder.path

    def evaluate_test(self) -> EvalResult | None:
        return None


class _NoCheckpoints(Checkpoints):
    """None is written, so none needs room."""

    def check_room(self, built: Built, plan: RunPlan, saves: int | None) -> None:
        pass


def copied(groups: Groups) -> Groups:
    """Weights and states away from the device, as they are now."""
    return {
        group: {name: tensor.detach().cpu().clone() for name, tensor in named.items()}
        for group, named in groups.items()
    }


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What a short run was and did."""

    plan: RunPlan
    """As it was at the end, with what a fallback has changed."""
    events: tuple[dict[str, Any], ...]
    updates: int


def prepared_plan(
    read: ReadManifest, *, model: str | None = None, vram: str | None = None
) -> tuple[RunPlan, RunData]:
    """The plan a run of this manifest would begin with, and its data, prepared."""
    from expert.run.open import open_run

    opened = open_run(read, model=model, vram=vram)
    return opened.plan, opened.data


def rehearse(
    read: ReadManifest,
    *,
    updates: int,
    model: str | None = None,
    vram: str | None = None,
    allow_remote_code: bool = False,
    through: Passing | None = None,
    sinks: Sequence[Sink] = (),
) -> Rehearsed:
    """Train for so many updates and keep only the events; a stream may have fewer.

    The plan is that of the whole run, so what it would compile is compiled here too; only its end
    is another, and it may lie beyond that of a short run.
    """
    from expert.core.rundir import RunFolder
    from expert.jobs.train import run_session

    plan, data = prepared_plan(read, model=model, vram=vram)
    plan = shortened(plan, updates)
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="expert-rehearsal-") as place:
        folder = RunFolder.create(Path(place), plan.expert)
        session = Rehearsal(
            folder=folder,
            plan=plan,
            data=data,
            manifest=read.manifest,
            sinks=(events.append, *sinks),
            allow_remote_code=allow_remote_code,
        )
        if through is not None:
            session.through = through
        with folder.locked(), session:
            done = run_session(session)
        if done.exit_code:  # Ctrl-C ends what the run is a part of, too
            raise Interrupted(done.exit_code - 128)
        return Rehearsed(plan=session.plan, events=tuple(events), updates=done.steps)


def shortened(plan: RunPlan, updates: int) -> RunPlan:
    """The plan cut to so many updates, without what is done between them."""
    values: dict[str, Any] = {
        "length.total_steps": updates,
        "length.max_steps": updates,
        **WITHOUT_PAUSES,
    }
    return plan.with_values(values, "a rehearsal", "machine")
