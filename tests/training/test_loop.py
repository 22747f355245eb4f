from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from expert.telemetry.meter import Meter
from expert.telemetry.timeline import Timeline
from expert.training import recorder as recorder_module
from expert.training.loop import LoopPlan, train
from expert.training.objectives.objective import EvalResult
from expert.training.recorder import DelayedValues, RecompileCounter, Recorder
from expert.training.schedule import Schedule
from expert.training.spikes import SkippedSteps, SpikeWatch
from expert.training.state import TrainState
from expert.training.stopping import BestSoFar
from tests.training.toys import CPU, OBJECTIVE, Counts, stability, toy_batches, toy_engine

PLAN = LoopPlan(
    schedule=Schedule(kind="constant", peak=1e-2, warmup_steps=0, total_steps=10),
    max_norm=1.0,
    seed=3,
    total_steps=10,
    steps_per_epoch=5,
    eval_every=0,
    save_every=0,
    save_best=False,
    stability=stability(),
)


@dataclass
class Run:
    """A loop over a toy model, and the events it emitted."""

    plan: LoopPlan = PLAN
    updates_per_epoch: int = 5
    epochs: int = 2
    stop_at: int | None = None
    """A signal arrives during this step, counted from 1."""
    stop_in_evaluation: bool = False
    log_every: int = 1

    def __post_init__(self):
        self.told, self.saved, self.evaluated = [], [], []
        self.model, _, self.engine = toy_engine()
        self.signal = None
        self.losses = iter(())

    def feed(self, state):
        for done in range(state.done, self.epochs * self.updates_per_epoch):
            if done in state.skipped:
                continue
            if done + 1 == self.stop_at:
                self.signal = 143
            epoch, step = divmod(done, self.updates_per_epoch)
            yield SimpleNamespace(
                step=SimpleNamespace(
                    done=done, epoch=epoch, in_epoch=step, window=0, bins=(0, 1, 2, 3)
                ),
                batches=toy_batches(4, 2, seed=done),
                counts=Counts(targets=4, real_tokens=24, examples=4),
                copied=None,
                facts={},
                made_seconds=0.0,
            )

    def evaluate(self):
        if self.stop_in_evaluation:
            self.signal = 143
            return None
        self.evaluated.append(self.state.done)
        loss = next(self.losses, 1.0)
        return EvalResult(loss=loss, token_accuracy=0.5, targets=4, examples=4)

    def go(self, state=None, **best):
        state = state or TrainState()

        def emit(event, *, step=None, **fields):
            self.told.append({"event": event, "step": step, **fields})

        recorder = Recorder(
            emit,
            device=CPU,
            meter=Meter(),
            timeline=Timeline(CPU),
            spikes=SpikeWatch(),
            log_every=self.log_every,
            recompiling=RecompileCounter(lambda: 0),
        )
        follow = {"greater_is_better": False, **best}
        self.emit, self.recorder, self.state = emit, recorder, state
        self.best = BestSoFar("eval_loss", state=state.best, **follow)
        return train(self.engine, OBJECTIVE, self.feed(state), state, self.plan, self)

    def save(self, state):
        self.saved.append(state)

    def reached(self, state):
        self.state = state

    def stop_requested(self):
        return self.signal

    def save_requested(self):
        return False

    def rows_in(self, bins):
        return []

    def events(self, name):
        return [fact for fact in self.told if fact["event"] == name]


def test_a_run_takes_every_step_once_and_saves_at_the_end():
    run = Run()
    state, ending = run.go()
    assert ending.finished
    assert [fact["step"] for fact in run.events("step")] == list(range(1, 11))
    assert (state.done, state.epoch, state.tokens, state.examples) == (10, 1, 240, 40)
    assert state.place == (1, 0, 5)
    assert [saved.done for saved in run.saved] == [10]
    assert run.state == state


@pytest.mark.parametrize(
    ("log_every", "told"),
    [(100, [(10, 10)]), (4, [(4, 4), (8, 4), (10, 2)]), (5, [(5, 5), (10, 5)])],
)
def test_the_steps_since_the_last_line_are_reported_at_the_end(log_every, told):
    run = Run(log_every=log_every, plan=replace(PLAN, eval_every=10))
    run.go()
    assert [(fact["step"], fact["updates"]) for fact in run.events("step")] == told
    names = [fact["event"] for fact in run.told]
    assert names.index("step") < names.index("eval")  # as where it was due
    assert run.recorder.meter.run_line()["loss"] is not None


def test_a_stopped_run_reports_its_steps_and_saves_the_unreported_sums():
    run = Run(log_every=100, stop_at=4)
    run.go()
    [line] = run.events("step")
    assert (line["step"], line["updates"]) == (4, 4)
    [saved] = run.saved
    assert saved.sums["line"]["loss_targets"] == 16  # as before the line was told


def test_an_epoch_is_reported_with_its_mean_and_its_evaluation():
    run = Run(plan=replace(PLAN, eval_every=5))
    run.losses = iter([0.5, 0.25])
    run.go()
    lines = run.events("epoch")
    assert [(line["epoch"], line["step"], line["eval_loss"]) for line in lines] == [
        (1, 5, 0.5),
        (2, 10, 0.25),
    ]
    losses = [fact["loss"] for fact in run.events("step")]
    assert lines[0]["loss"] == pytest.approx(sum(losses[:5]) / 5)
    assert lines[1]["loss"] == pytest.approx(sum(losses[5:]) / 5)


def test_what_was_due_at_a_skipped_step_happens_after_the_next():
    plan = replace(PLAN, eval_every=4, save_every=4)
    run = Run(plan=plan)
    state = TrainState(skipped=SkippedSteps().with_window(3, 4).with_window(9, 9))
    state, ending = run.go(state)
    assert [fact["step"] for fact in run.events("step")] == [1, 2, 3, 6, 7, 8, 9]
    assert run.evaluated == [6, 8, 9]
    assert [saved.done for saved in run.saved] == [6, 8, 9]
    assert [line["step"] for line in run.events("epoch")] == [6]
    assert ending.finished


def test_without_a_known_end_the_end_is_evaluated_and_saved_when_it_comes():
    plan = replace(PLAN, total_steps=None, steps_per_epoch=None, eval_epochs=1, save_epochs=2)
    run = Run(plan=plan, epochs=3, updates_per_epoch=4)
    _, ending = run.go()
    assert ending.finished
    assert run.evaluated == [4, 8, 12]
    assert [saved.done for saved in run.saved] == [8, 12]
    assert {line["epoch"]: line["step"] for line in run.events("epoch")} == {1: 4, 2: 8, 3: 12}


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_an_evaluation_that_was_given_up_comes_first_on_resuming(in_evaluation):
    plan = replace(PLAN, eval_every=4)
    run = Run(plan=plan, stop_at=None if in_evaluation else 4, stop_in_evaluation=in_evaluation)
    stopped, ending = run.go()
    assert (stopped.done, ending.exit_code, run.evaluated) == (4, 143, [])
    again = Run(plan=plan)
    state, _ = again.go(stopped)
    assert again.evaluated == [4, 8, 10]
    assert state.done == 10
    # A state in which it had happened does not evaluate twice.
    once = Run(plan=plan)
    once.go(replace(stopped, evaluated=4))
    assert once.evaluated == [8, 10]


def test_at_the_end_of_a_streams_epoch_late_numbers_are_read_first(monkeypatch):
    """On a card the numbers of the last step are still on their way then."""
    plan = replace(PLAN, total_steps=None, steps_per_epoch=None, eval_epochs=1, save_epochs=1)
    begun, begin = [], Recorder.begin
    monkeypatch.setattr(Recorder, "begin", lambda self, n: (begun.append(n), begin(self, n)))
    at_once = Run(plan=plan, epochs=2, updates_per_epoch=4)
    at_once.go()
    # The fourth again: the end of an epoch is not it.
    assert begun == [*range(5), *range(4, 9)]
    monkeypatch.setattr(recorder_module, "DelayedValues", lambda d: DelayedValues(d, lag=1))
    late = Run(plan=plan, epochs=2, updates_per_epoch=4)
    late.go()
    for run in (at_once, late):
        assert [line["step"] for line in run.events("epoch")] == [4, 8]
    assert [e["loss"] for e in late.events("epoch")] == [e["loss"] for e in at_once.events("epoch")]
    assert late.saved[0].losses == at_once.saved[0].losses

    broken = Run(plan=plan, epochs=2, updates_per_epoch=4)
    loss_sum = broken.model.loss_sum
    broken.model.loss_sum = lambda batch: loss_sum(batch) * (math.nan if begun[-1] == 3 else 1)
    _, ending = broken.go()
    assert (ending.verdict, broken.evaluated, broken.saved) == ("stop", [], [])
