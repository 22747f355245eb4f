"""The one loop: step; record; time to evaluate? to save? to stop?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from expert.parallel.engine import Engine
from expert.training.evaluation import EvalResult
from expert.training.pressure import Sign
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
    """When what happens, all counted in steps; 0 means never."""

    schedule: Schedule
    max_norm: float
    seed: int
    total_steps: int | None
    steps_per_epoch: int | None
    """None where an epoch has ended only when the next one begins, as in a stream."""
    eval_every: int
    save_every: int
    save_best: bool
    stability: Stability
    eval_epochs: int = 0
    """Epochs between evaluations, where epochs are not counted in steps."""
    save_epochs: int = 0


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What the loop calls when it is time."""

    emit: Emit
    recorder: Recorder
    best: BestSoFar
    evaluate: Callable[[int], EvalResult | None]
    """Evaluates after so many steps; None where a signal came in between."""
    save: Callable[[TrainState, bool], None]
    """Told whether the manifest asks for one at this step."""
    reached: Callable[[TrainState], None]
    """Told of every state, so that it is known when something is raised."""
    stop_requested: Callable[[], int | None]
    """The exit code of a signal that has come."""
    save_requested: Callable[[], bool] = lambda: False
    """Whether somebody has asked for a checkpoint since the last time."""
    rows_of: RowsOf = lambda bins: []
    """Rows of the data that sequences were made of, as far as that is known."""
    same_everywhere: Callable[[Any], Any] = lambda found: found
    """Given what this rank has found, or None: what any rank has, for all of them to follow."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why the loop came back: all done, patience at its end, a signal, trouble, a better plan."""

    finished: bool = False
    early: bool = False
    exit_code: int | None = None
    trouble: Trouble | None = None
    verdict: str = ""
    """What the policy says about the trouble: rollback or stop."""
    sign: Sign | None = None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is to be done between two steps."""

    evaluate: bool = False
    save: bool = False
    asked: bool = False
    """Somebody has asked for a checkpoint."""
    epoch: int | None = None
    """The number of the epoch that has just ended."""
    last: bool = False


def train(
    engine: Engine, steps: Iterable[Any], state: TrainState, plan: LoopPlan, tools: Tools
) -> tuple[TrainState, Ending]:
    """Take step after step until something ends it; returns where the run stands and why."""
    coming = iter(steps)
    state, stop = _between_steps(state, _left_undone(state, plan), plan, tools)
    tools.reached(state)
    while stop is None and (plan.total_steps is None or state.done < plan.total_steps):
        tools.recorder.begin(state.done)
        with tools.recorder.waiting():
            fed = next(coming, None)
        if fed is None:
            break
        if plan.steps_per_epoch is None and state.done and fed.update.epoch > state.epoch:
            state, stop = _epoch_ended(state, plan, tools)
            tools.reached(state)
            if stop is not None:
                break
            tools.recorder.begin(state.done)  # what the device did since was not this step
        before = state.done
        state, troubles = _one_step(engine, fed, state, plan, tools)
        tools.reached(state)
        moment = replace(_moment(before, state, plan), asked=tools.save_requested())
        if moment != Moment() or tools.stop_requested() is not None:
            # Read what is still on its way before anything is judged or saved by it.
            troubles += tools.recorder.settle()
        stop = _answer(troubles, state, plan, tools)
        if stop is None:
            if moment.last:
                tools.recorder.report_rest()
            state, stop = _between_steps(state, moment, plan, tools)
            tools.reached(state)
        if stop is None and not moment.last:
            stop = _another_plan(tools)
    if stop is None:
        state, stop = _ended(state, plan, tools)
    if stop.finished or stop.exit_code is not None:
        tools.recorder.report_rest()  # after the checkpoint: a resumed run sums its line up whole
    return state, stop


def _one_step(
    engine: Engine, fed: Any, state: TrainState, plan: LoopPlan, tools: Tools
) -> tuple[TrainState, list[Trouble]]:
    number = fed.update.done
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
        epoch=(number + 1) / per_epoch if per_epoch else float(fed.update.epoch),
        rate=rate,
        targets=stats.targets,
        real_tokens=real_tokens,
        places=places,
        examples=examples,
        bins=tuple(map(int, fed.update.bins)),
        made_seconds=fed.made_seconds,
    )
    troubles = tools.recorder.end(facts, stats, fed.copied)
    update = fed.update
    state = replace(
        state,
        done=number + 1,
        epoch=update.epoch,
        place=(update.epoch, update.window, update.step + 1),
        tokens=state.tokens + real_tokens,
        examples=state.examples + examples,
    )
    return state, troubles


def _moment(before: int, state: TrainState, plan: LoopPlan) -> Moment:
    """What is due now; steps that were passed over may have been the ones it was due at."""

    def passed(every: int | None) -> bool:
        return bool(every) and before // every < state.done // every  # type: ignore[operator]

    last = state.done == plan.total_steps
    return Moment(
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
    """The work at the end of an epoch that was seen to be over only when the next one began."""
    stop = _answer(tools.recorder.settle(), state, plan, tools)
    if stop is not None:
        return state, stop
    return _between_steps(state, _epoch_over(state, plan), plan, tools)


def _epoch_over(state: TrainState, plan: LoopPlan) -> Moment:
    epoch = state.epoch + 1
    missing = state.evaluated != state.done
    return Moment(
        evaluate=missing and due(epoch, plan.eval_epochs),
        save=due(epoch, plan.save_epochs),
        epoch=epoch,
    )


def _left_undone(state: TrainState, plan: LoopPlan) -> Moment:
    """The evaluation that a signal kept from happening; a resumed run begins with it."""
    last = state.done == plan.total_steps
    was_due = due(state.done, plan.eval_every) or (last and _evaluates(plan))
    return Moment(evaluate=state.done > 0 and was_due and state.evaluated != state.done)


def _evaluates(plan: LoopPlan) -> bool:
    return plan.eval_every > 0 or plan.eval_epochs > 0


def _answer(
    troubles: list[Trouble], state: TrainState, plan: LoopPlan, tools: Tools
) -> Ending | None:
    """Report every trouble; an Ending with the first one that cannot be skipped."""
    found = judge(troubles, state, plan.stability, emit=tools.emit, rows_of=tools.rows_of)
    return Ending(trouble=found[0], verdict=found[1]) if found is not None else None


def judge(
    troubles: list[Trouble], state: TrainState, policy: Stability, *, emit: Emit, rows_of: RowsOf
) -> tuple[Trouble, str] | None:
    """Report every trouble with what the policy says about it: skip, ignore, rollback or stop; the
    first one that is neither skipped nor ignored, and its verdict."""
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


def _another_plan(tools: Tools) -> Ending | None:
    sign = tools.recorder.pressure.taken() if tools.recorder.pressure is not None else None
    sign = tools.same_everywhere(sign)
    return None if sign is None else Ending(sign=sign)


def _between_steps(
    state: TrainState, moment: Moment, plan: LoopPlan, tools: Tools
) -> tuple[TrainState, Ending | None]:
    """Evaluate and save when it is time; an Ending where the run is to stop here.

    Somebody who asks for an end does not wait for an evaluation: it is made up for on resuming.
    """
    improved = patience_gone = False
    eval_loss: float | None = None
    if moment.evaluate and tools.stop_requested() is None:
        with tools.recorder.meter.paused() as pause:
            result = tools.evaluate(state.done)
        if result is not None:
            verdict = tools.best.observe(state.done, result.metric(tools.best.metric))
            improved, patience_gone = verdict.improved, verdict.stop
            _report_evaluation(result, state, improved, pause.seconds, tools)
            state = replace(state, best=tools.best.state(), evaluated=state.done)
            eval_loss = result.loss
    if moment.epoch is not None:
        facts = tools.recorder.meter.epoch_line(moment.epoch, eval_loss)
        tools.emit("epoch", step=state.done, **facts)
    exit_code = tools.stop_requested() if state.done else None
    wanted = moment.save or moment.asked or (improved and plan.save_best)
    if wanted or patience_gone or exit_code is not None:
        kept = tools.recorder
        state = replace(state, **kept.state())
        with tools.recorder.meter.paused():
            tools.save(state, moment.save)
        exit_code = tools.stop_requested()  # one that came while saving need not wait
    if exit_code is not None:
        return state, Ending(exit_code=exit_code)
    if patience_gone and not moment.last:
        return state, Ending(finished=True, early=True)
    return state, None


def _report_evaluation(
    result: EvalResult, state: TrainState, best: bool, seconds: float, tools: Tools
) -> None:
    tools.emit(
        "eval",
        step=state.done,
        split="validation",
        loss=result.loss,
        perplexity=result.perplexity,
        token_accuracy=result.token_accuracy,
        tokens=result.targets,
        best=best,
        seconds=seconds,
    )


def _ended(state: TrainState, plan: LoopPlan, tools: Tools) -> tuple[TrainState, Ending]:
    """No step is left. Where nobody knew that the last one was the last, its work is done now."""
    stop = _answer(tools.recorder.settle(), state, plan, tools)
    if stop is None and state.done != plan.total_steps:
        tools.recorder.report_rest()
        missing = _evaluates(plan) and state.evaluated != state.done
        epoch = state.epoch + 1 if plan.steps_per_epoch is None else None
        moment = Moment(evaluate=missing, save=True, epoch=epoch, last=True)
        state, stop = _between_steps(state, moment, plan, tools)
    return state, stop or Ending(finished=True)
