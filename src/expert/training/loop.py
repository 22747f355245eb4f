"""The training loop: take a batch, step, record; evaluate, save and stop when due."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from expert.parallel.engine import Engine
from expert.planning.run_plan import StabilityPlan
from expert.training.objectives.objective import EvalResult, Objective
from expert.training.recorder import Emit, Recorder, Trouble, due
from expert.training.recovery import LossSpike, NotFinite
from expert.training.schedule import Schedule, learning_rate
from expert.training.spikes import after_not_finite, after_spike
from expert.training.state import TrainState
from expert.training.step import seed_step, train_step
from expert.training.stopping import BestSoFar

RowsIn = Callable[[tuple[int, ...]], list[int | str]]
"""The data rows in these packed sequences, if known."""


@dataclass(frozen=True, kw_only=True)
class Due:
    """What to do between two steps."""

    evaluate: bool = False
    save: bool = False
    epoch: int | None = None
    """The epoch that has just ended."""
    last: bool = False


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
    stability: StabilityPlan
    eval_epochs: int = 0
    """Epochs between evaluations, if epochs are not counted in steps."""
    save_epochs: int = 0

    @property
    def evaluates(self) -> bool:
        return self.eval_every > 0 or self.eval_epochs > 0

    def due_after(self, before: int, done: int) -> Due:
        """What is due after `done` steps, also if it was due at steps that were skipped since
        `before`."""

        def passed(every: int | None) -> bool:
            return bool(every) and before // every < done // every  # type: ignore[operator]

        last, per_epoch = done == self.total_steps, self.steps_per_epoch
        return Due(
            evaluate=passed(self.eval_every) or (last and self.evaluates),
            save=passed(self.save_every) or last,
            epoch=done // per_epoch if per_epoch and passed(per_epoch) else None,
            last=last,
        )

    def missed_evaluation(self, state: TrainState) -> bool:
        """Whether a signal prevented the evaluation of this state."""
        last = state.done == self.total_steps
        was_due = due(state.done, self.eval_every) or (last and self.evaluates)
        return state.done > 0 and was_due and state.evaluated != state.done


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The run around the loop: what records, evaluates and saves it, and who asks it to stop."""

    emit: Emit
    recorder: Recorder
    best: BestSoFar
    evaluate: Callable[[], EvalResult | None]
    """Of the validation rows; None if a signal interrupted it."""
    save: Callable[[TrainState], None]
    reached: Callable[[TrainState], None]
    """Called with every new state, so that it is known if an error is raised."""
    stop_requested: Callable[[], int | None]
    """The exit code of a received signal."""
    save_requested: Callable[[], bool]
    """Whether a checkpoint was requested since the last call."""
    rows_in: RowsIn


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why the loop ended: finished, out of patience, a signal, or trouble."""

    finished: bool = False
    early: bool = False
    exit_code: int | None = None
    trouble: Trouble | None = None
    verdict: str = ""
    """What the policy says about the trouble: rollback or stop."""


def train(
    engine: Engine,
    objective: Objective,
    steps: Iterable[Any],
    state: TrainState,
    plan: LoopPlan,
    run: TrainingRun,
) -> tuple[TrainState, Ending]:
    """Train until the plan, the data, a signal or trouble ends it; returns the state and why."""
    feed, ending = iter(steps), None
    if plan.missed_evaluation(state):
        state, ending = evaluate_and_save(state, Due(evaluate=True), plan, run)
    run.reached(state)
    while ending is None and (plan.total_steps is None or state.done < plan.total_steps):
        run.recorder.begin(state.done)
        with run.recorder.waiting():
            fed = next(feed, None)  # the micro-batches of one step, already on the device
        if fed is None:
            if run.stop_requested() is not None and plan.total_steps is not None:
                state, ending = evaluate_and_save(state, Due(), plan, run)
                ending = ending or Ending(exit_code=run.stop_requested())
            break
        if plan.steps_per_epoch is None and state.done and fed.step.epoch > state.epoch:
            state, ending = end_epoch(state, plan, run)
            run.reached(state)
            if ending is not None:
                break
            run.recorder.begin(state.done)  # the time of the epoch's end is not this step's

        number, before = fed.step.done, state.done
        seed_step(plan.seed, number, engine.world.rank)
        rate = learning_rate(number, plan.schedule)
        stats = train_step(
            engine, objective, fed.batches, step=number + 1, rate=rate, max_norm=plan.max_norm
        )
        state = state.after(fed.step, stats.real_tokens, stats.examples)
        per_epoch = plan.steps_per_epoch
        epoch = state.done / per_epoch if per_epoch else float(fed.step.epoch)
        troubles = run.recorder.end(fed, stats, rate=rate, epoch=epoch)
        run.reached(state)

        work, asked = plan.due_after(before, state.done), run.save_requested()
        if work != Due() or asked or run.stop_requested() is not None:
            # Read outstanding numbers before they are needed to evaluate or save.
            troubles += run.recorder.wait_for_numbers()
        ending = judge(troubles, state, plan.stability, emit=run.emit, rows_in=run.rows_in)
        if ending is None:
            if work.last:
                run.recorder.report_remaining()
            state, ending = evaluate_and_save(state, work, plan, run, asked=asked)
            run.reached(state)
    if ending is None:  # no steps are left
        ending = judge_pending(state, plan, run)
        if ending is None and state.done != plan.total_steps:
            # The last step was not known to be the last: do its work now.
            run.recorder.report_remaining()
            missing = plan.evaluates and state.evaluated != state.done
            last = state.epoch + 1 if plan.steps_per_epoch is None else None
            work = Due(evaluate=missing, save=True, epoch=last, last=True)
            state, ending = evaluate_and_save(state, work, plan, run)
        ending = ending or Ending(finished=True)
    if ending.finished or ending.exit_code is not None:
        run.recorder.report_remaining()  # after saving: a resumed run reports the whole line
    return state, ending


def evaluate_and_save(
    state: TrainState, work: Due, plan: LoopPlan, run: TrainingRun, *, asked: bool = False
) -> tuple[TrainState, Ending | None]:
    """Evaluate and save if due or asked; returns an Ending if the run should stop here.

    A stop request does not wait for an evaluation; the resumed run catches up on it.
    """
    improved = patience_gone = False
    eval_loss: float | None = None
    if work.evaluate and run.stop_requested() is None:
        with run.recorder.meter.paused() as pause:
            result = run.evaluate()
        if result is not None:
            improved, patience_gone = run.best.observe(state.done, result.metric(run.best.metric))
            fields = {**result.fields(), "best": improved, "seconds": pause.seconds}
            run.emit("eval", step=state.done, split="validation", **fields)
            state = replace(state, best=run.best.state(), evaluated=state.done)
            eval_loss = result.loss
    if work.epoch is not None:
        run.emit("epoch", step=state.done, **run.recorder.meter.epoch_line(work.epoch, eval_loss))
    exit_code = run.stop_requested() if state.done else None
    wanted = work.save or asked or (improved and plan.save_best)
    if wanted or patience_gone or exit_code is not None:
        state = replace(state, **run.recorder.state())
        with run.recorder.meter.paused():
            run.save(state)
        exit_code = run.stop_requested()  # also one that came while saving
    if exit_code is not None:
        return state, Ending(exit_code=exit_code)
    if patience_gone and not work.last:
        return state, Ending(finished=True, early=True)
    return state, None


def end_epoch(
    state: TrainState, plan: LoopPlan, run: TrainingRun
) -> tuple[TrainState, Ending | None]:
    """Work at the end of a stream's epoch, noticed when the next one started."""
    ending = judge_pending(state, plan, run)
    if ending is not None:
        return state, ending
    epoch, missing = state.epoch + 1, state.evaluated != state.done
    work = Due(
        evaluate=missing and due(epoch, plan.eval_epochs),
        save=due(epoch, plan.save_epochs),
        epoch=epoch,
    )
    return evaluate_and_save(state, work, plan, run)


def judge_pending(state: TrainState, plan: LoopPlan, run: TrainingRun) -> Ending | None:
    """Wait for the numbers of all launched steps, and judge them."""
    troubles = run.recorder.wait_for_numbers()
    return judge(troubles, state, plan.stability, emit=run.emit, rows_in=run.rows_in)


def judge(
    troubles: list[Trouble],
    state: TrainState,
    policy: StabilityPlan,
    *,
    emit: Emit,
    rows_in: RowsIn,
) -> Ending | None:
    """Report every trouble with the policy's verdict: skip, ignore, rollback or stop; an Ending for
    the first one that is neither skipped nor ignored."""
    for trouble in troubles:
        match trouble.what:
            case NotFinite(step=step, bins=bins):
                verdict = after_not_finite(policy, skips=trouble.skips, rollbacks=state.rollbacks)
                rows = rows_in(bins)
                emit("not_finite", step=step + 1, bins=list(bins), rows=rows, policy=verdict)
            case LossSpike(step=step, loss=loss, median=median, z=z):
                verdict = after_spike(policy, rollbacks=state.rollbacks)
                emit("spike", step=step + 1, loss=loss, median=median, z=z, policy=verdict)
        if verdict not in ("skip", "ignore"):
            return Ending(trouble=trouble, verdict=verdict)
    return None
