"""A running session: its fixed parts and its current position."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from expert.core.events import EventLog, Sink
from expert.core.rundir import RunFolder
from expert.data.feed.run_data import RunData
from expert.data.splits import stream_of
from expert.manifest.schema.kinds import ON_POLICY
from expert.model.device_memory import release_memory
from expert.model.load import check_vocabulary
from expert.parallel.engine import Groups
from expert.parallel.group import Group
from expert.parallel.hang import NO_LIMIT, SAVED_BYTES_PER_SECOND
from expert.planning.memory.memory import with_new_estimate
from expert.planning.run_plan import ObjectivePlan, RunPlan
from expert.run.build import Built, build, device_of
from expert.run.open import Opened
from expert.run.session.identity import BaseWeights
from expert.run.session.instruments import Instruments, best_so_far, loop_plan
from expert.run.session.reference import Reference
from expert.run.stored.locate import plan_to_store
from expert.telemetry.trackers import close_trackers, open_trackers
from expert.training.loop import LoopPlan
from expert.training.objectives.judged import JudgedAnswers
from expert.training.objectives.next_token import NextToken
from expert.training.objectives.objective import EvalResult, Objective
from expert.training.objectives.preference import Preference
from expert.training.objectives.rewarded import RewardedAnswers
from expert.training.recorder import Emit, Recorder
from expert.training.state import TrainState
from expert.training.stopping import BestSoFar, Signals

Evaluating = Callable[[str, int, int], None]
"""Called during an evaluation with the split, its rows launched so far, and all of its rows."""
REBUILD = ("model.", "kernels.", "optim.", "adapter.")
"""Plan changes that require building the model again; others concern only the data."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Progress callbacks; none may take long."""

    acknowledge: Callable[[bool], None] = lambda again: None
    """Called from the handler of the first signal that asks to stop."""
    progress: Callable[[int], None] = lambda done: None
    """Called after every launched step."""
    evaluating: Evaluating = lambda split, rows, total: None


@dataclass(kw_only=True, eq=False)
class Session:
    """A running run: what it was opened with, then where it stands."""

    opened: Opened
    folder: RunFolder
    callbacks: Callbacks
    allow_remote_code: bool
    instruments: Instruments
    base: BaseWeights
    keeps: bool
    """False: a short run that saves nothing."""
    group: Group
    """The processes that train together; usually one."""
    early_warnings: list[str] | None
    """Of trackers, held back until the start is announced; None: it was."""
    objective: Objective
    closing: contextlib.ExitStack
    """Clean-up at the end of the run, however it ends."""

    # From here on: where the run stands.
    plan: RunPlan
    data: RunData
    state: TrainState
    best: BestSoFar
    recorder: Recorder
    built: Built | None = None
    """The model, once it is needed."""
    weights: Groups | None = None
    """Weights for the next built model: from a checkpoint, or from the model before it."""
    doing: Literal["training", "probe", "evaluation"] = "training"
    tried: object = None
    """The part of the plan that was found to fit."""
    final_step: int | None = None
    """The step of the final weights, if not the last one."""
    last_eval: EvalResult | None = None
    restarted_workers: int = 0

    @property
    def device(self) -> torch.device:
        return self.instruments.device

    @property
    def emit(self) -> Emit:
        return self.instruments.emit

    @property
    def evaluates(self) -> bool:
        return self.data.validation is not None and self.plan.watch.evaluation_strategy != "no"

    @property
    def loop_plan(self) -> LoopPlan:
        """When to evaluate, save and stop, from the current state."""
        return loop_plan(self.plan, self.data, self.state)


@contextlib.contextmanager
def open_session(
    opened: Opened,
    *,
    folder: RunFolder,
    sinks: Sequence[Sink] = (),
    callbacks: Callbacks | None = None,
    allow_remote_code: bool = False,
    keep: bool = True,
    group: Group | None = None,
) -> Iterator[Session]:
    """A session at the start of its run. `keep`: write checkpoints and the result.

    In a group only the first rank writes events and files.
    """
    plan, data = opened.plan, opened.data
    callbacks, group = callbacks or Callbacks(), group or Group()
    first = group.world.is_first
    state, early = TrainState(), list[str]()
    device = device_of(plan)
    session: Session | None = None

    def warn(text: str) -> None:
        if session is None or session.early_warnings is not None:
            early.append(text)
        else:
            session.emit("warning", text=text)

    def emit(event: str, *, step: int | None = None, **fields: Any) -> None:
        """Write an event, on the first rank only."""
        if log is not None:
            log.emit(event, step=step, **fields)

    with contextlib.ExitStack() as closing:
        log: EventLog | None = None
        if first:
            trackers = open_trackers(plan.watch.trackers, folder.path, warn)
            log = closing.enter_context(EventLog(folder.events, (*sinks, *trackers)))
            closing.callback(close_trackers, trackers)
        signals = closing.enter_context(
            Signals(
                acknowledge=callbacks.acknowledge,
                alone=not group.is_distributed,
                on_sigusr1=plan.watch.on_sigusr1,
            )
        )
        instruments = Instruments(plan, device=device, emit=emit)
        if instruments.gpu is not None:
            closing.enter_context(instruments.gpu)
        session = Session(
            opened=opened,
            folder=folder,
            callbacks=callbacks,
            allow_remote_code=allow_remote_code,
            instruments=instruments,
            base=BaseWeights(plan),
            keeps=keep,
            group=group,
            early_warnings=early,
            objective=objective_of(plan.objective),
            closing=closing,
            plan=plan,
            data=data,
            state=state,
            best=best_so_far(plan, state),
            recorder=instruments.recorder(plan, state),
        )
        group.listen(lambda: signals.requested, signals.take_save_request)
        yield session


def objective_of(plan: ObjectivePlan) -> Objective:
    if plan.method == ON_POLICY:
        return RewardedAnswers(plan.beta)
    if plan.loss is None:
        return NextToken()
    return JudgedAnswers(plan) if plan.loss == "kto" else Preference(plan)


def model_of(session: Session) -> Built:
    """The model of the plan, built on first use and after each change to it."""
    if session.built is not None:
        return session.built
    plan, data = session.plan, session.data
    if session.keeps:  # not earlier: busy cores would count as others'
        session.base.begin(first=session.group.world.is_first)
    # Download time is unknown.
    hub = plan.model.place == "hub"
    seconds = NO_LIMIT if hub else loading_seconds(Path(plan.model.location))
    session.group.progress(seconds)
    built = session.built = build(
        plan,
        data.encoder,
        device=session.device,
        allow_remote_code=session.allow_remote_code,
        group=session.group,
    )
    session.group.progress()
    for prepared in (folder for split in data.splits() for folder in split.folders):
        check_vocabulary(built.loaded, prepared.statistics.largest_id)
    session.recorder = session.instruments.recorder(plan, session.state, built)
    session.instruments.recompiling.restart()
    if plan.objective.needs_reference and data.prepared[0].reference is None:
        reference = Reference(  # before any trained weights are loaded
            plan=plan,
            data=data,
            built=built,
            device=session.device,
            group=session.group,
            emit=session.emit,
            show=session.callbacks.evaluating,
        )
        validation = data.validation if session.evaluates else None
        test = data.test if session.keeps else None
        session.data = reference.measured(data.train, validation, test)
    session.objective.begin(built.loaded)
    if session.weights is not None:
        built.load(session.weights)
        session.weights = None
    return built


def loading_seconds(folder: Path) -> float:
    """How long loading the weights of a folder may take beyond the hang limit, on slow network
    storage; at least a second, since libraries that copy block other threads."""
    size = 0
    for path in folder.rglob("*.safetensors"):
        with contextlib.suppress(OSError):  # loading it reports the problem
            size += path.stat().st_size
    return 1.0 + size / SAVED_BYTES_PER_SECOND


def saving_seconds(session: Session, needed: int = 0) -> float:
    """How long writing weights may take beyond the hang limit; ranks other than the first, which
    wait for that, know it from the plan alone."""
    return max(needed, session.plan.disk.checkpoint_bytes or 0) / SAVED_BYTES_PER_SECOND


def change_plan(session: Session, after: RunPlan, changed: set[str]) -> None:
    """Continue with another plan, keeping weights, optimizer state and loss history."""
    session.plan = with_new_estimate(after)
    if session.group.world.is_first:
        try:
            session.folder.write_json("plan.json", plan_to_store(session.plan))
        except OSError as error:
            session.emit("warning", text=f"plan.json cannot be written: {error.strerror}")
    losses, skips = session.recorder.spikes.state(), session.recorder.skips
    session.state = replace(session.state, losses=losses, skips=skips)
    if session.built is not None:
        session.built.engine.discard()
        if any(path.startswith(REBUILD) for path in changed):
            if session.weights is None:
                session.weights = {
                    group: {name: tensor.detach().cpu().clone() for name, tensor in named.items()}
                    for group, named in session.built.tensors(everywhere=True).items()
                }
            session.built = None
        if any(path.startswith((*REBUILD, "batch.micro_batch")) for path in changed):
            session.recorder.meter.resettle()
    if any(path.startswith("loader.") for path in changed):
        settle_loader(session)
    release_memory(session.device)


def continue_from(session: Session, state: TrainState, groups: Groups | None) -> None:
    """Continue from this state with these tensors; without tensors the model starts over."""
    session.state = state
    if groups is None:
        session.built = session.weights = None
        session.recorder.meter.resettle()
        release_memory(session.device)
    elif session.built is None:
        session.weights = groups
    else:
        session.built.load(groups)
    session.best = best_so_far(session.plan, state)
    session.recorder = session.instruments.recorder(session.plan, state, session.built)
    session.recorder.meter.restore_losses(state.sums)


def settle_loader(session: Session) -> None:
    """Reopen a stream with the workers of the current plan."""
    if session.data.stream is not None:
        assert session.opened.line is not None
        stream = stream_of(replace(session.opened.line, plan=session.plan))
        session.data = replace(session.data, stream=stream)
