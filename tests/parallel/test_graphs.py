"""Captured and replayed passes equal eager ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from expert.parallel import graphs
from expert.parallel.engine import Engine
from expert.parallel.graphs import (
    CAPTURE_AFTER,
    MAX_SHAPES,
    TARGET_COUNTS_PER_SHAPE,
    WARM_UPS,
    GraphsUnavailable,
)
from expert.planning.memory.workload import CAPTURED_WIDTHS
from expert.training import learner
from tests.model import models
from tests.parallel.fake_capture import FakeCapture, UndoneStep
from tests.training.toys import CPU, accumulate, optim_plan

PLACES, WORDS = 12, 5


class Batch(models.Batch):
    branch = key_places = key_boundaries = key_copies = answers = reference = None


def batch(number: int, places: int = PLACES, targets: int = 7) -> Batch:
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (1, places), generator=draw)
    labels = torch.randint(WORDS, (1, places), generator=draw)
    learnt = torch.randperm(places - 1, generator=draw)[:targets].sort().values
    rest = torch.full((places - targets,), places - 1)
    labels[0, [p for p in range(places) if p not in learnt.tolist()]] = -100
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=torch.arange(places)[None],
        boundaries=torch.tensor([0, places]),
        target_places=torch.cat([learnt, rest]),
        targets=targets,
        soft_mask=None,
        whole_rows=False,
    )


class Model:
    """Words to words, trained on the places that have a label; some of it is dropped.

    It counts the passes that are run on their own: each takes memory beside what is captured.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.run = 0
        draw = torch.Generator().manual_seed(1)
        self.table = Parameter(torch.randn(WORDS, 8, generator=draw).to(dtype))
        self.head = Parameter(torch.randn(8, WORDS, generator=draw))
        self.named = [("table", self.table), ("head", self.head)]

    def loss_sum(self, given: Any) -> Tensor:
        self.run += not isinstance(given, SimpleNamespace)
        places = given.target_places[: given.targets]
        hidden = torch.nn.functional.dropout(self.table[given.tokens.flatten()], 0.3)
        logits = hidden[places].float() @ self.head
        labels = given.labels.flatten()[places]
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    def evaluate(self, given: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def engine(
    dtype: torch.dtype, record: Any, *, warm_up_each_shape: bool = True, **plan: Any
) -> tuple[Model, Engine]:
    model, each = Model(dtype), warm_up_each_shape
    learns = learner.OptimizerLearner(model.named, optim_plan(**plan), device=CPU, capture=record)
    return model, Engine(model, learns, device=CPU, capture=record, warm_up_each_shape=each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_passes_train_bit_for_bit_like_eager_ones(dtype):
    recorder = FakeCapture()
    (one, run), (other, replayed) = engine(dtype, None), engine(dtype, recorder)
    losses: dict[Engine, list[float]] = {run: [], replayed: []}
    for update in range(5):
        for each in (run, replayed):
            torch.manual_seed(update)
            for part in range(3):  # the first of them is recorded within a step
                given = batch(10 * update + part, targets=7 - part)
                losses[each].append(float(accumulate(each, given, divisor=18)))
            each.step(step=update + 1, rate=1e-2, max_norm=1.0)
    assert recorder.replayed == 2 * (15 - WARM_UPS)
    assert losses[run] == losses[replayed]
    assert torch.equal(one.table, other.table)
    assert torch.equal(one.head, other.head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_step_changes_weights_as_one_that_is_run(dtype, monkeypatch):
    """The rate is a float32 number on the device, not a float64 one of the host: 6e-8 of a step."""
    monkeypatch.setattr(learner, "CapturedStep", UndoneStep)
    recorder = FakeCapture()
    (one, run), (other, replayed) = (
        engine(dtype, record, optimizer="adamw_torch_fused") for record in (None, recorder)
    )
    norms: dict[Engine, list[float]] = {run: [], replayed: []}
    for update in range(8):
        for each in (run, replayed):
            torch.manual_seed(update)
            for part in range(2):
                accumulate(each, batch(10 * update + part), divisor=14)
            stats = each.step(step=update + 1, rate=1e-2 / (update + 1), max_norm=0.5)
            assert bool(stats.applied)
            norms[each].append(float(stats.grad_norm))
    assert recorder.recorded == 3
    assert norms[run] == pytest.approx(norms[replayed], rel=1e-5)
    # bfloat16 weights are their masters rounded: one that lies on an edge may fall to either side.
    torch.testing.assert_close(one.head, other.head, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.table, other.table, rtol=2**-8, atol=1e-6)


def test_a_recorded_step_takes_no_step_that_is_not_finite_and_continues_after_it(monkeypatch):
    monkeypatch.setattr(learner, "CapturedStep", UndoneStep)
    model, replayed = engine(torch.float32, FakeCapture(), optimizer="adamw_torch_fused")
    for number in range(6):
        accumulate(replayed, batch(number), divisor=7)
        replayed.step(step=number + 1, rate=1e-2, max_norm=1.0)
    before = model.head.detach().clone()
    accumulate(replayed, batch(6), divisor=0)
    assert not bool(replayed.step(step=7, rate=1e-2, max_norm=1.0).applied)
    assert torch.equal(model.head, before)
    accumulate(replayed, batch(7), divisor=7)
    assert bool(replayed.step(step=8, rate=1e-2, max_norm=1.0).applied)
    assert not torch.equal(model.head, before)


def test_a_state_that_was_loaded_is_what_a_recorded_step_continues_with(monkeypatch):
    monkeypatch.setattr(learner, "CapturedStep", UndoneStep)
    model, replayed = engine(torch.float32, FakeCapture(), optimizer="adamw_torch_fused")

    def some_updates() -> Tensor:
        for number in range(6):
            torch.manual_seed(number)
            accumulate(replayed, batch(number), divisor=7)
            replayed.step(step=number + 1, rate=1e-2, max_norm=1.0)
        return model.head.detach().clone()

    some_updates()
    saved = {g: {n: t.clone() for n, t in named.items()} for g, named in replayed.tensors().items()}
    after = []
    for _ in range(2):
        replayed.load(saved)
        after.append(some_updates())
    assert torch.equal(*after)


def test_a_loss_that_was_given_back_is_not_changed_by_the_next_batch():
    _, replayed = engine(torch.float32, FakeCapture())
    given = [accumulate(replayed, batch(number), divisor=7) for number in range(WARM_UPS + 2)]
    assert len({float(loss) for loss in given}) == len(given)


def test_gradients_that_were_discarded_leave_no_trace():
    (_, run), (_, replayed) = engine(torch.float32, None), engine(torch.float32, FakeCapture())
    norms = []
    for each in (run, replayed):
        for number in range(WARM_UPS + 2):
            torch.manual_seed(number)
            accumulate(each, batch(number), divisor=7)
        each.discard()
        torch.manual_seed(9)
        accumulate(each, batch(9), divisor=7)
        norms.append(float(each.step(step=1, rate=0.0, max_norm=0.0).grad_norm))
    assert norms[0] == norms[1]


def test_every_shape_is_recorded_once_and_not_too_many_of_them():
    recorder = FakeCapture()
    _, replayed = engine(torch.float32, recorder)
    for _ in range(WARM_UPS + 3):
        for places in range(PLACES, PLACES + MAX_SHAPES + 3):
            accumulate(replayed, batch(0, places=places), divisor=7)
    assert recorder.recorded == 2 * MAX_SHAPES
    assert CAPTURED_WIDTHS + 1 <= MAX_SHAPES, "every width of a plan and all places have a graph"


def test_passes_that_are_not_compiled_warm_up_once_for_all_shapes():
    """A pass that is run takes as much memory beside what is captured."""
    recorder = FakeCapture()
    model, replayed = engine(torch.float32, recorder, warm_up_each_shape=False)
    for number, places in enumerate((16, 48, 32, 64, 16, 48)):
        accumulate(replayed, batch(number, places=places), divisor=7)
    assert model.run == WARM_UPS
    assert recorder.recorded == 2 * 4
    for number in range(WARM_UPS + 1):  # kernels are compiled again for such a number of places
        accumulate(replayed, batch(number, places=40), divisor=7)
    assert (model.run, recorder.recorded) == (2 * WARM_UPS, 2 * 5)


def test_once_a_shape_is_captured_no_number_of_targets_is_run_beside_it(monkeypatch):
    """As at the end of an epoch, where few rows are left and the rest of the batch is padding."""
    monkeypatch.setattr(graphs, "TARGET_MULTIPLE", 2)
    recorder = FakeCapture()
    (one, plain), (model, replayed) = (engine(torch.float32, each) for each in (None, recorder))
    for number, targets in enumerate((6, 6, 6, 6, 1, 6, 9, 3, 11, 1, 6)):
        losses = []
        for each in (plain, replayed):
            torch.manual_seed(number)
            losses.append(float(accumulate(each, batch(number, targets=targets), divisor=7)))
            each.step(step=number + 1, rate=1e-2, max_norm=1.0)
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert model.run == WARM_UPS
    assert recorder.recorded == 2 * (TARGET_COUNTS_PER_SHAPE + 1)  # 6, then 10, then all places
    torch.testing.assert_close(one.head, model.head, rtol=1e-5, atol=1e-6)


def test_fewer_targets_are_captured_for_themselves_where_they_come_often(monkeypatch):
    monkeypatch.setattr(graphs, "TARGET_MULTIPLE", 2)
    recorder = FakeCapture()
    model, replayed = engine(torch.float32, recorder)
    for number in range(WARM_UPS + 1):
        accumulate(replayed, batch(number, targets=9), divisor=7)
    for number in range(CAPTURE_AFTER):
        accumulate(replayed, batch(number, targets=3), divisor=7)
    assert recorder.recorded == 2
    accumulate(replayed, batch(50, targets=3), divisor=7)
    assert (recorder.recorded, model.run) == (4, WARM_UPS)


@pytest.mark.parametrize("error", [RuntimeError("not permitted"), torch.OutOfMemoryError("full")])
def test_a_failed_capture_leaves_the_gradients_and_lack_of_memory_is_raised_unchanged(error):
    def refuses(run: Any) -> Any:
        raise error

    model, replayed = engine(torch.float32, refuses)
    for number in range(WARM_UPS):
        accumulate(replayed, batch(number), divisor=7)
    assert model.head.grad is not None
    before = model.head.grad.clone()
    kind = type(error) if isinstance(error, torch.OutOfMemoryError) else GraphsUnavailable
    with pytest.raises(kind, match=str(error)):
        accumulate(replayed, batch(5), divisor=7)
    assert torch.equal(model.head.grad, before)
