"""A run from start to end: attempts, each with the plan adapted to the failure before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from expert.core.errors import ExpertError
from expert.data.feed.run_data import feed_facts, training_feed
from expert.data.processes import WorkersFailed
from expert.parallel.hang import NO_LIMIT
from expert.run.build import PlanUnsupported
from expert.run.session.checkpoints import check_room, save, upcoming_optimizer_bytes
from expert.run.session.evaluate import evaluate_validation, probe
from expert.run.session.failures import RunFailed, failure_of
from expert.run.session.finish import finished, stopped
from expert.run.session.recover import (
    apply_stored_failure,
    end_all,
    next_start_message,
    ranks_block_in_passes,
    recover_from_failure,
    recover_from_trouble,
    rows_in_bins,
    save_after_data_failure,
    shared_failure,
)
from expert.run.session.result import RunResult
from expert.run.session.session import Session, model_of
from expert.run.session.start import announce, report_data
from expert.training.checkpoint import bytes_needed
from expert.training.loop import Ending, TrainingRun, train
from expert.training.recovery import Failure
from expert.training.state import TrainState
from expert.training.step import StepInterrupted

MAX_WORKER_RESTARTS = 10
StepWrapper = Callable[[Iterable[Any]], Iterable[Any]]
"""Wraps the steps on their way to the loop, for observers outside the run."""


def run_session(session: Session, *, through: StepWrapper = iter) -> RunResult:
    """Train; after a failure adapt the plan and try again, until the run ends."""
    session.closing.enter_context(
        session.group.watched(
            session.folder.path,
            lambda text: session.emit("failed", step=session.state.done, error=text),
            limit=session.plan.watch.hang_seconds,
            computes=session.device.type == "cpu",
        )
    )
    announce(session)
    report_data(session)
    apply_stored_failure(session)
    while True:
        failure, interrupted, ending = None, False, None
        try:
            ending = attempt(session, through=through)
        except Exception as error:
            failure = failure_of(error, session.doing, session.plan)
            interrupted = isinstance(error, StepInterrupted)
            _end_if_peers_cannot_recover(session, failure, error, interrupted=interrupted)
            failure = shared_failure(session, failure, error)
            if failure is None:
                text = f"{type(error).__name__}: {error}"
                session.emit("failed", step=session.state.done, error=text)
                raise
        if failure is not None:
            # Outside the except block: a handled exception's traceback keeps tensors alive.
            recover_from_failure(session, failure, interrupted=interrupted)
            continue
        assert ending is not None
        if ending.trouble is not None:
            recover_from_trouble(session, ending)
        elif ending.exit_code is not None:
            return stopped(session, ending.exit_code)
        else:
            try:
                return finished(session, early=ending.early)
            except Exception as error:
                failure = failure_of(error, session.doing, session.plan)
                _end_if_peers_cannot_recover(session, failure, error)
                text = f"{type(error).__name__}: {error}"
                session.emit("failed", step=session.state.done, error=text)
                raise


def _end_if_peers_cannot_recover(
    session: Session, failure: Failure | None, error: Exception, *, interrupted: bool = False
) -> None:
    """Raise if the ranks cannot continue: one is gone, or others wait in the middle of a pass."""
    lost = session.group.lost(error)
    if lost is not None:
        session.emit("failed", step=session.state.done, error=str(lost))
        raise lost from error
    # All ranks notice before the first pass what a card cannot run.
    passing = ranks_block_in_passes(session) and not isinstance(error, PlanUnsupported)
    if passing or (interrupted and session.group.is_distributed):
        end_all(session, failure, error)
        if failure is None:
            raise error
        raise RunFailed(next_start_message(session, failure)) from error


def attempt(session: Session, *, through: StepWrapper = iter) -> Ending:
    """Train from the current state until something ends it."""

    def reached(state: TrainState) -> None:
        if state.done > session.state.done:
            session.callbacks.progress(state.done)
        session.state = state

    emit, device, world = session.emit, session.device, session.group.world
    began = time.monotonic()
    if session.built is None:  # check with the planned size before loading a model in vain
        check_room(session, session.plan.disk.checkpoint_bytes)
    built = model_of(session)
    _probe_once(session)
    emit("loaded", step=session.state.done, seconds=time.monotonic() - began)
    emit("feed", step=session.state.done, **feed_facts(session.plan, session.data))
    state = session.state
    feed = training_feed(
        session.plan,
        session.data,
        done=state.done,
        place=state.place,
        skipped=state.skipped,
        device=device,
        new_event=built.timeline.take_event if device.type == "cuda" else None,
        world=world,
        restart=lambda error: _restart_workers(session, error),
    )
    session.instruments.meter.start()
    with feed as fed:
        session.state, ending = train(
            built.engine,
            session.objective,
            _watched_steps(session, through(fed)),
            session.state,
            session.loop_plan,
            TrainingRun(
                emit=emit,
                recorder=session.recorder,
                best=session.best,
                evaluate=partial(evaluate_validation, session),
                save=partial(save, session),
                reached=reached,
                stop_requested=lambda: session.group.signal,
                save_requested=session.group.take_save_request,
                rows_in=lambda bins: rows_in_bins(session.data, bins),
            ),
        )
    return ending


def _watched_steps(session: Session, steps: Iterable[Any]) -> Iterator[Any]:
    """Pass on the steps and record for the watchdog which one this process is in. If the data
    fails, save the progress so far."""
    coming = iter(steps)
    # Workers have their own watchdog; a resumed stream first reads what was already read.
    slow = NO_LIMIT if session.plan.loader.workers or session.data.stream is not None else 0.0
    while True:
        session.group.progress(slow)
        try:
            fed = next(coming, None)
        except Exception as error:
            is_final = failure_of(error, "training", session.plan) is None
            kept = save_after_data_failure(session) if is_final else ""
            if kept and isinstance(error, ExpertError):
                error.args = (f"{error}{kept}", *error.args[1:])
            raise
        if fed is None:
            return
        session.group.progress()
        yield fed


def _restart_workers(session: Session, error: WorkersFailed) -> bool:
    """Restart the workers once per run, before saving and ending it; more often while other ranks
    are in the middle of a step and nothing could be saved."""
    if session.restarted_workers == (MAX_WORKER_RESTARTS if session.group.is_distributed else 1):
        return False
    session.restarted_workers += 1
    text = f"{error}; all workers were restarted from the same position"
    session.emit("warning", step=session.state.done, text=text)
    return True


def _probe_once(session: Session) -> None:
    """Once per plan, before the next step: check that it fits the device and the disk."""
    plan = session.plan
    trial = (plan.batch.micro_batch, plan.kernels, plan.model, plan.optim.optimizer)
    if session.tried == trial or session.state.done == plan.length.total_steps:
        return
    session.doing = "probe"
    built = model_of(session)
    check_room(session, bytes_needed(built.tensors()) + upcoming_optimizer_bytes(built, plan))
    probe(session)
    session.doing, session.tried = "training", trial
