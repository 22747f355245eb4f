"""The training loop: step, record, and evaluate, save or stop when due."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from expert.parallel.engine import Engine
from expert.training.evaluation import EvalResult
from expert.training.pressure import PlanHint
from expert.training.recorder import Emit, Recorder, StepFacts, Trouble, due
from expert.training.recovery import LossSpike, NotFinite
from expert.training.schedule import Schedule, learning_rate
from expert.training.spikes import Stability
from expert.training.state import TrainState
from expert.training.step import seed_step, train_step
from expert.training.stopping import BestSoFar

RowsOf = Callable[[tuple[int, ...]], list[int | str]]


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """When to do what, in steps; 0 means never."""

    schedule: Schedule
    max_norm: float
    seed: int
    total_steps: int | None
    steps_per_epoch: int | None
    """None if the end of an epoch is only known when the next one starts, as in a stream."""
    eval_every: int
    save_every: int
    save_best: bool
    stability: Stability
    eval_epochs: int = 0
    """Epochs between evaluations, if epochs are not counted in steps."""
    save_epochs: int = 0


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What the loop calls."""

    emit: Emit
    recorder: Recorder
    best: BestSoFar
    evaluate: Callable[[int], EvalResult | None]
    """Evaluates after this many steps; None if a signal interrupted it."""
    save: Callable[[TrainState, bool], None]
    """Also gets whether a checkpoint is due by the manifest."""
    reached: Callable[[TrainState], None]
    """Gets every new state, so that it is known if an error is raised."""
    stop_requested: Callable[[], int | None]
    """The exit code of a received signal."""
    save_requested: Callable[[], bool] = lambda: False
    """Whether a checkpoint was requested since the last call."""
    rows_of: RowsOf = lambda bins: []
    """The data rows in these packed sequences, if known."""
    share_with_ranks: Callable[[Any], Any] = lambda found: found
    """Shares a finding of any rank (None if this rank has none) with all ranks."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why the loop ended: finished, out of patience, a signal, trouble, or a better plan."""

    finished: bool = False
    early: bool = False
    exit_code: int | None = None
    trouble: Trouble | None = None
    verdict: str = ""
    """What the policy says about the trouble: rollback or stop."""
    hint: PlanHint | None = None


@dataclass(frozen=True, kw_only=True)
class DueWork:
    """What to do between two steps."""

    evaluate: bool = False
    save: bool = False
    asked: bool = False
    """A checkpoint was requested."""
    epoch: int | None = None
    """The epoch that has just ended."""
    last: bool = False


def train(
    engine: Engine, steps: Iterable[Any], state: TrainState, plan: LoopPlan, tools: Tools
) -> tuple[TrainState, Ending]:
    """Take steps until something ends the loop; returns the state and why it ended."""
    feed = iter(steps)
    state, stop = _between_steps(state, _missed_evaluation(state, plan), plan, tools)
    tools.reached(state)
    while stop is None and (plan.total_steps is None or state.done < plan.total_steps):
        tools.recorder.begin(state.done)
        with tools.recorder.waiting():
            fed = next(feed, None)
        if fed is None:
            break
        if plan.steps_per_epoch is None and state.done and fed.step.epoch > state.epoch:
            state, stop = _epoch_ended(state, plan, tools)
            tools.reached(state)
            if stop is not None:
                break
            tools.recorder.begin(state.done)  # the time of the epoch's end is not this step's
        before = state.done
        state, troubles = _one_step(engine, fed, state, plan, tools)
        tools.reached(state)
        due_work = replace(_due_work(before, state, plan), asked=tools.save_requested())
        if due_work != DueWork() or tools.stop_requested() is not None:
            # Read outstanding numbers before they are needed to evaluate or save.
            troubles += tools.recorder.wait_for_numbers()
        stop = _handle_troubles(troubles, state, plan, tools)
        if stop is None:
            if due_work.last:
                tools.recorder.report_remaining()
            state, stop = _between_steps(state, due_work, plan, tools)
            tools.reached(state)
        if stop is None and not due_work.last:
            hint = tools.share_with_ranks(tools.recorder.pressure.take_hint())
            stop = Ending(hint=hint) if hint is not None else None
    if stop is None:
        state, stop = _ended(state, plan, tools)
    if stop.finished or stop.exit_code is not None:
        tools.recorder.report_remaining()  # after saving: a resumed run reports the whole line
    return state, stop


def _one_step(
    engine: Engine, fed: Any, state: TrainState, plan: LoopPlan, tools: Tools
) -> tuple[TrainState, list[Trouble]]:
    number = fed.step.done
    seed_step(plan.seed, number, engine.world.rank)
    rate = learning_rate(number, plan.schedule)
    counts, places = fed.counts, sum(batch.tokens.numel() for batch in fed.batches)
    targets, real_tokens, places, examples = engine.total(
        counts.targets, counts.real_tokens, places, counts.examples
    )
    stats = train_step(
        engine, fed.batches, step=number + 1, rate=rate, max_norm=plan.max_norm, targets=targets
    )
    per_epoch = plan.steps_per_epoch
    facts = StepFacts(
        step=number,
        epoch=(number + 1) / per_epoch if per_epoch else float(fed.step.epoch),
        rate=rate,
        targets=stats.targets,
        real_tokens=real_tokens,
        places=places,
        examples=examples,
        bins=tuple(map(int, fed.step.bins)),
        made_seconds=fed.made_seconds,
    )
    troubles = tools.recorder.end(facts, stats, fed.copied)
    state = replace(
        state,
        done=number + 1,
        epoch=fed.step.epoch,
        place=(fed.step.epoch, fed.step.window, fed.step.in_epoch + 1),
        tokens=state.tokens + real_tokens,
        examples=state.examples + examples,
    )
    return state, troubles


def _due_work(before: int, state: TrainState, plan: LoopPlan) -> DueWork:
    """What is due now, also if it was due at steps that were skipped."""

    def passed(every: int | None) -> bool:
        return bool(every) and before // every < state.done // every  # type: ignore[operator]

    last = state.done == plan.total_steps
    return DueWork(
        evaluate=passed(plan.eval_every) or (last and _evaluates(plan)),
        save=passed(plan.save_every) or last,
        epoch=state.done // plan.steps_per_epoch
        if plan.steps_per_epoch and passed(plan.steps_per_epoch)
        else None,
        last=last,
    )


def _epoch_ended(
    state: TrainState, plan: LoopPlan, tools: Tools
) -> tuple[TrainState, Ending | None]:
    """Work at the end of an epoch, noticed when the next one started."""
    stop = _handle_troubles(tools.recorder.wait_for_numbers(), state, plan, tools)
    if stop is not None:
        return state, stop
    epoch, missing = state.epoch + 1, state.evaluated != state.done
    evaluate = missing and due(epoch, plan.eval_epochs)
    due_work = DueWork(evaluate=evaluate, save=due(epoch, plan.save_epochs), epoch=epoch)
    return _between_steps(state, due_work, plan, tools)


def _missed_evaluation(state: TrainState, plan: LoopPlan) -> DueWork:
    """An evaluation that a signal prevented; a resumed run starts with it."""
    last = state.done == plan.total_steps
    was_due = due(state.done, plan.eval_every) or (last and _evaluates(plan))
    return DueWork(evaluate=state.done > 0 and was_due and state.evaluated != state.done)


def _evaluates(plan: LoopPlan) -> bool:
    return plan.eval_every > 0 or plan.eval_epochs > 0


def _handle_troubles(
    troubles: list[Trouble], state: TrainState, plan: LoopPlan, tools: Tools
) -> Ending | None:
    """Report every trouble; an Ending for the first one that cannot be skipped."""
    unanswered = report_troubles(
        troubles, state, plan.stability, emit=tools.emit, rows_of=tools.rows_of
    )
    return Ending(trouble=unanswered[0], verdict=unanswered[1]) if unanswered is not None else None


def report_troubles(
    troubles: list[Trouble], state: TrainState, policy: Stability, *, emit: Emit, rows_of: RowsOf
) -> tuple[Trouble, str] | None:
    """Report every trouble with the policy's verdict: skip, ignore, rollback or stop; returns the
    first one that is neither skipped nor ignored."""
    for trouble in troubles:
        match trouble.what:
            case NotFinite(step=step, bins=bins):
                verdict: str = policy.after_not_finite(
                    skips=trouble.skips, rollbacks=state.rollbacks
                )
                rows = rows_of(bins)
                emit("not_finite", step=step + 1, bins=list(bins), rows=rows, policy=verdict)
            case LossSpike(step=step, loss=loss, median=median, z=z):
                verdict = policy.after_spike(rollbacks=state.rollbacks)
                emit("spike", step=step + 1, loss=loss, median=median, z=z, policy=verdict)
        if verdict not in ("skip", "ignore"):
            return trouble, verdict
    return None


def _between_steps(
    state: TrainState, due_work: DueWork, plan: LoopPlan, tools: Tools
) -> tuple[TrainState, Ending | None]:
    """Evaluate and save if due; returns an Ending if the run should stop here.

    A stop request does not wait for an evaluation; the resumed run catches up on it.
    """
    improved = patience_gone = False
    eval_loss: float | None = None
    if due_work.evaluate and tools.stop_requested() is None:
        with tools.recorder.meter.paused() as pause:
            result = tools.evaluate(state.done)
        if result is not None:
            verdict = tools.best.observe(state.done, result.metric(tools.best.metric))
            improved, patience_gone = verdict.improved, verdict.stop
            fields = {**result.fields(), "best": improved, "seconds": pause.seconds}
            tools.emit("eval", step=state.done, split="validation", **fields)
            state = replace(state, best=tools.best.state(), evaluated=state.done)
            eval_loss = result.loss
    if due_work.epoch is not None:
        facts = tools.recorder.meter.epoch_line(due_work.epoch, eval_loss)
        tools.emit("epoch", step=state.done, **facts)
    exit_code = tools.stop_requested() if state.done else None
    wanted = due_work.save or due_work.asked or (improved and plan.save_best)
    if wanted or patience_gone or exit_code is not None:
        state = replace(state, **tools.recorder.state())
        with tools.recorder.meter.paused():
            tools.save(state, due_work.save)
        exit_code = tools.stop_requested()  # also one that came while saving
    if exit_code is not None:
        return state, Ending(exit_code=exit_code)
    if patience_gone and not due_work.last:
        return state, Ending(finished=True, early=True)
    return state, None


def _ended(state: TrainState, plan: LoopPlan, tools: Tools) -> tuple[TrainState, Ending]:
    """No steps are left. If the last one was not known to be the last, finish its work now."""
    stop = _handle_troubles(tools.recorder.wait_for_numbers(), state, plan, tools)
    if stop is None and state.done != plan.total_steps:
        tools.recorder.report_remaining()
        missing = _evaluates(plan) and state.evaluated != state.done
        epoch = state.epoch + 1 if plan.steps_per_epoch is None else None
        due_work = DueWork(evaluate=missing, save=True, epoch=epoch, last=True)
        state, stop = _between_steps(state, due_work, plan, tools)
    return state, stop or Ending(finished=True)
