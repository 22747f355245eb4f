from __future__ import annotations

import pytest
import torch

from expert.core.errors import ExpertError
from tests.training.toys import ToyModel, accumulate, toy_batches, toy_engine

BATCH = toy_batches(4, 4)[0]


def copy_of(groups):
    return {g: {n: t.detach().clone() for n, t in named.items()} for g, named in groups.items()}


def update(engine):
    accumulate(engine, BATCH, divisor=4)
    return engine.step(step=1, rate=1e-2, max_norm=1.0)


def overflowing(model, engine):
    """One step whose scaled gradients are not finite."""
    accumulate(engine, BATCH, divisor=4)
    model.gate.grad[0] = float("inf")
    return engine.step(step=1, rate=1e-2, max_norm=1.0)


def scale_of(learner):
    return float(learner.tensors()["optimizer"]["loss_scale.scale"])


def test_a_scaled_loss_gives_the_same_step():
    """The scale is a power of two: multiplying and dividing by it loses nothing."""
    plain, scaled = ToyModel(), ToyModel()
    first = update(toy_engine(plain)[2])
    second = update(toy_engine(scaled, loss_scaling=True)[2])
    assert torch.equal(plain.matrix, scaled.matrix)
    assert float(first.grad_norm) == float(second.grad_norm)


def test_an_overflow_halves_the_scale_and_changes_no_weight():
    model, learner, engine = toy_engine(loss_scaling=True)
    update(engine)
    before = copy_of(learner.tensors())
    assert not bool(overflowing(model, engine).applied)
    after = learner.tensors()
    assert scale_of(learner) == float(before["optimizer"]["loss_scale.scale"]) / 2
    assert torch.equal(after["model"]["matrix"], before["model"]["matrix"])
    assert torch.equal(after["optimizer"]["matrix.exp_avg"], before["optimizer"]["matrix.exp_avg"])
    assert bool(update(engine).applied)


def test_the_scale_is_part_of_the_state_and_continues_as_it_was():
    model, learner, engine = toy_engine(loss_scaling=True)
    update(engine)
    overflowing(model, engine)
    update(engine)
    saved = copy_of(learner.tensors())
    assert float(saved["optimizer"]["loss_scale.scale"]) == 32_768.0
    assert int(saved["optimizer"]["loss_scale.growth"]) == 1
    twin_model, twin, twin_engine = toy_engine(loss_scaling=True)
    twin.load(saved)
    for group, named in copy_of(twin.tensors()).items():
        for name, tensor in named.items():
            assert torch.equal(tensor, saved[group][name]), name
    update(engine)
    update(twin_engine)
    assert torch.equal(model.matrix, twin_model.matrix)
    assert scale_of(twin) == scale_of(learner)


def test_small_steps_on_bfloat16_weights_add_up_in_their_masters():
    """Half the spacing of bfloat16 at 1 is 2e-3: single steps of 1e-5 would be rounded away."""
    model = ToyModel(torch.bfloat16)
    _, learner, engine = toy_engine(model)
    start = model.gate.detach().clone()
    for _ in range(10):
        accumulate(engine, BATCH, divisor=4)
        engine.step(step=1, rate=1e-5, max_norm=1.0)
    master = learner.tensors()["model"]["gate"]
    assert master.dtype == torch.float32
    assert torch.equal(model.gate, start)
    # AdamW's first steps are about one rate each, and its decay is ten thousandths of that.
    assert (master - start.float()).abs().max() == pytest.approx(1e-4, rel=0.2)
    assert torch.equal(master.bfloat16(), model.gate)


def test_weights_of_another_model_are_refused():
    _, learner, engine = toy_engine()
    update(engine)
    saved = copy_of(learner.tensors())
    saved["model"]["gate"] = torch.ones(4)
    with pytest.raises(ExpertError, match=r"gate: saved as \(4,\), the model has \(3,\)"):
        toy_engine()[1].load(saved)
    del saved["model"]["gate"]
    with pytest.raises(ExpertError, match="gate: saved as absent"):
        toy_engine()[1].load(saved)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_counts_although_its_gradients_are(bad):
    model, learner, engine = toy_engine()
    update(engine)
    before = copy_of(learner.tensors())
    for more in (0.0, bad):
        loss = model.loss_sum(BATCH) / 4 + more
        learner.backpropagate(loss)
        learner.collect(loss.detach())
    stats = engine.step(step=2, rate=1e-2, max_norm=1.0)
    assert not bool(stats.applied)
    assert torch.equal(learner.tensors()["model"]["matrix"], before["model"]["matrix"])
    assert bool(update(engine).applied)  # and is forgotten with the step
