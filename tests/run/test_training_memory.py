"""Runs that lack memory or a kernel repeat the step with another plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from expert.model import load as model_load
from expert.model.attention import AttentionUnavailable
from expert.model.load import LoadedModel
from expert.parallel.engine import Engine
from expert.run.session.failures import RunFailed
from expert.training import optim
from expert.training.learner import OptimizerLearner
from expert.training.optim import OptimizerUnavailable
from tests.jobs.runs import (
    EVERY_STEP,
    base_model,
    copied,
    events_of,
    inject,
    losses_of,
    plan_of,
    run,
    weights_of,
    write_expert,
)

# Four sequences make a step; dropout is on, so that equal losses mean equal random numbers.
SETTINGS = EVERY_STEP | {"dropout": 0.2, "micro_batch_size": 4, "eval_steps": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base) -> tuple[Path, Path]:
    """All four sequences at once, with nothing in the way."""
    manifest = write_expert(tmp_path_factory.mktemp("whole"), base, SETTINGS)
    return manifest, run(manifest).folder


@pytest.fixture(scope="module")
def halved(tmp_path_factory, base) -> Path:
    """The run that begins with two sequences at once."""
    settings = SETTINGS | {"micro_batch_size": 2}
    return run(write_expert(tmp_path_factory.mktemp("halved"), base, settings)).folder


def no_room():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


def out_of_memory_above(rows):
    def fault(loss, batch, now):
        if batch.tokens.shape[0] > rows:
            raise no_room()
        return loss

    return fault


def fallbacks(folder):
    return [
        {change["path"]: change["value"] for change in event["changes"]}
        for event in events_of(folder, "fell_back")
    ]


@pytest.mark.fault(17)
def test_a_batch_too_large_is_halved_and_the_run_equals_one_that_began_so(
    base, halved, tmp_path, monkeypatch
):
    inject(monkeypatch, out_of_memory_above(2))
    done = run(write_expert(tmp_path, base, SETTINGS))
    assert fallbacks(done.folder) == [{"batch.micro_batch": 2, "batch.accumulation": 2}]
    told = events_of(done.folder, "fell_back")[0]
    assert told["failure"] == "OutOfMemory"
    assert "Tried to allocate 2.00 GiB" in told["reason"]
    assert plan_of(done.folder)["batch"]["micro_batch"] == 2
    assert losses_of(done.folder) == losses_of(halved)
    assert weights_of(done.folder) == weights_of(halved)
    examples = [event["examples"] for event in events_of(done.folder, "step")]
    assert examples == [event["examples"] for event in events_of(halved, "step")]


@pytest.mark.fault(17)
def test_memory_that_runs_out_in_the_middle_of_a_step_loses_nothing(
    base, whole, tmp_path, monkeypatch
):
    """Before the fault the run is the one with large batches. From that step on it is, bit by
    bit, the large run resumed at that step with small batches; it cannot equal a run that was
    small from the start, which adds in another order and draws another dropout."""
    manifest, folder = whole

    def fault(loss, batch, now):
        if (now.update, now.micro_batch) == (3, 1) and batch.tokens.shape[0] == 2:
            raise no_room()  # the first half of the step has its gradients already
        return out_of_memory_above(4 if (now.update or 0) < 3 else 2)(loss, batch, now)

    with monkeypatch.context() as patch:
        inject(patch, fault)
        done = run(write_expert(tmp_path / "faulty", base, SETTINGS))
    assert [sorted(each.values()) for each in fallbacks(done.folder)] == [[2, 2], [1, 4]]
    begun = copied(folder, tmp_path / "begun")
    small = run(
        manifest,
        resume=str(begun / "checkpoints" / "step-000003"),
        overrides=("training.config.micro_batch_size=1",),
    )
    expected = {step: loss for step, loss in losses_of(folder).items() if step <= 3}
    assert losses_of(done.folder) == expected | losses_of(small.folder)
    assert weights_of(done.folder) == weights_of(small.folder)


def test_a_fallback_is_part_of_the_checkpoint(whole, base, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        inject(patch, out_of_memory_above(1))
        manifest = write_expert(tmp_path, base, SETTINGS)
        folder = run(manifest).folder
    again = copied(folder, tmp_path / "again")
    seen = []
    inject(monkeypatch, lambda loss, batch, now: (seen.append(batch.tokens.shape[0]), loss)[1])
    done = run(manifest, resume=str(again / "checkpoints" / "step-000004"))
    assert set(seen) == {1}
    assert fallbacks(done.folder) == []  # nothing had to be learned a second time
    assert plan_of(done.folder)["batch"]["micro_batch"] == 1
    decisions = {each["path"]: each for each in plan_of(done.folder)["decisions"]}
    assert decisions["batch.micro_batch"]["source"] == "fallback"
    assert "out of memory in training" in decisions["batch.micro_batch"]["because"]
    rest = {step: loss for step, loss in losses_of(folder).items() if step > 4}
    assert losses_of(done.folder) == rest


def test_blocks_are_recomputed_where_one_sequence_does_not_fit(tmp_path, monkeypatch):
    def fault(loss, batch, now):
        if plan_of(folder())["kernels"]["checkpointing"] != "full":
            raise no_room()
        return loss

    def folder():
        return next((tmp_path / "runs").iterdir())

    inject(monkeypatch, fault)
    settings = {"micro_batch_size": 2, "max_steps": 2}
    done = run(write_expert(tmp_path, base_model(2), SETTINGS | settings))
    assert fallbacks(done.folder) == [
        {"batch.micro_batch": 1, "batch.accumulation": 4},
        {"kernels.checkpointing": "selective", "kernels.recomputed_blocks": 1},
        {"kernels.checkpointing": "full", "kernels.recomputed_blocks": 2},
    ]
    assert done.steps == 2


@pytest.mark.fault(17)
def test_a_model_that_never_fits_ends_with_a_sentence_and_a_code(base, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(LoadedModel, "evaluate", MagicMock(side_effect=no_room()))
        with pytest.raises(RunFailed, match="out of memory in evaluation with one sequence at a"):
            run(write_expert(tmp_path / "evaluated", base, SETTINGS))
    inject(monkeypatch, out_of_memory_above(0))
    with pytest.raises(RunFailed, match="out of memory in training with one sequence at a time"):
        run(write_expert(tmp_path, base, SETTINGS))
    assert RunFailed.exit_code == 4
    folder = next((tmp_path / "runs").iterdir())
    assert "Tried to allocate" in events_of(folder, "failed")[0]["error"]


@pytest.mark.fault(17)
def test_an_interrupted_step_is_repeated_from_a_checkpoint(base, whole, tmp_path, monkeypatch):
    _, folder = whole
    step, calls = OptimizerLearner.step, []

    def torn(self, **settings):
        calls.append(1)
        if len(calls) == 4:  # half of the weights are changed, then there is no room
            with torch.no_grad():
                self._parameters[0].add_(1.0)
            raise no_room()
        return step(self, **settings)

    monkeypatch.setattr(OptimizerLearner, "step", torn)
    settings = SETTINGS | {"save_steps": 2, "evaluation_strategy": "no"}
    done = run(write_expert(tmp_path, base, settings))
    steps = [event["step"] for event in events_of(done.folder, "step")]
    assert steps == [1, 2, 3, 3, 4, 5, 6]  # back at the checkpoint after two steps
    back = [(e["from_step"], e["to_step"]) for e in events_of(done.folder, "rolled_back")]
    assert back == [(3, 2)]
    assert fallbacks(done.folder) == [{"batch.micro_batch": 2, "batch.accumulation": 2}]
    first = {step: loss for step, loss in losses_of(folder).items() if step < 3}
    assert losses_of(done.folder).items() >= first.items()


@pytest.mark.fault(17)
def test_an_evaluation_too_large_is_halved_and_counts_the_same(base, whole, tmp_path, monkeypatch):
    evaluated = model_load.evaluated

    def narrow(hidden, head, labels, *rest, **more):
        if labels.shape[0] > 2:
            raise no_room()  # in the middle of it: the model has put its dropout aside
        return evaluated(hidden, head, labels, *rest, **more)

    monkeypatch.setattr(model_load, "evaluated", narrow)
    settings = SETTINGS | {"eval_batch_size": 21}  # rows: 8 sequences
    done = run(write_expert(tmp_path, base, settings))
    assert fallbacks(done.folder) == [{"batch.eval_batch": 4}, {"batch.eval_batch": 2}]
    # It was tried before the first step, not met after the third.
    told = [event["event"] for event in events_of(done.folder)]
    assert told.index("fell_back") < told.index("step")
    _, folder = whole
    assert losses_of(done.folder) == losses_of(folder)  # dropout stayed on
    found, expected = events_of(done.folder, "eval"), events_of(folder, "eval")
    assert [each["step"] for each in found] == [each["step"] for each in expected]
    # Sums of float32 batch sums in another order.
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in expected], rel=1e-6)
    assert [e["tokens"] for e in found] == [e["tokens"] for e in expected]


def test_the_widest_batch_is_tried_before_the_first_step(base, tmp_path, monkeypatch):
    """Rows alone: the wide ones come late, and would not fit then."""
    widths = []

    def fault(loss, batch, now):
        widths.append((now.update, batch.tokens.shape[1]))
        if batch.tokens.shape[1] * batch.tokens.shape[0] > 200:
            raise no_room()
        return loss

    settings = {"packing": False, "epochs": 1, "dataloader_num_workers": 0, "dropout": 0.2}
    with monkeypatch.context() as patch:
        inject(patch, fault)
        done = run(write_expert(tmp_path / "faulty", base, settings))
    assert fallbacks(done.folder) == [{"batch.micro_batch": 4, "batch.accumulation": 2}]
    assert events_of(done.folder, "fell_back")[0]["step"] == 0
    assert "out of memory in probe" in events_of(done.folder, "fell_back")[0]["reason"]
    tried = [width for update, width in widths if update is None]
    assert tried == [max(width for _, width in widths)] * 2
    began = run(write_expert(tmp_path / "began", base, settings | {"micro_batch_size": 4}))
    assert losses_of(done.folder) == losses_of(began.folder)


def test_a_kernel_that_cannot_run_makes_way_for_the_next(base, whole, tmp_path, monkeypatch):
    arguments = model_load.attention_kwargs

    def unavailable(kind, batch):
        if kind == "sdpa":
            raise AttentionUnavailable("sdpa", "cannot do this", "set attention: eager")
        return arguments(kind, batch)

    monkeypatch.setattr(model_load, "attention_kwargs", unavailable)
    manifest = write_expert(tmp_path, base, SETTINGS | {"dropout": 0.0, "max_steps": 2})
    done = run(manifest)
    assert fallbacks(done.folder) == [{"kernels.attention": "eager"}]
    assert "attention 'sdpa': cannot do this" in events_of(done.folder, "fell_back")[0]["reason"]
    assert list(losses_of(done.folder)) == [1, 2]
    # Another kernel chosen by a failure belongs to the run, also when it is resumed.
    copy = copied(done.folder, tmp_path / "copy")
    run(manifest, resume=str(copy / "checkpoints" / "step-000001"))
    assert events_of(copy, "resumed")[0]["changed"] == []
    assert weights_of(copy) == weights_of(done.folder)


def test_an_optimizer_that_cannot_run_makes_way_for_the_plain_one(base, tmp_path, monkeypatch):
    unavailable = OptimizerUnavailable("adamw_torch_fused", "no kernel")
    monkeypatch.setattr(optim, "_try_fused", MagicMock(side_effect=unavailable))
    settings = {"optim": "adamw_torch_fused", "max_steps": 2}
    done = run(write_expert(tmp_path, base, settings))
    assert fallbacks(done.folder) == [{"optim.optimizer": "adamw_torch"}]
    assert done.steps == 2


def test_a_run_continues_uncompiled_if_compiling_fails(base, whole, tmp_path, monkeypatch):
    def broken_backend(graph, inputs):
        raise RuntimeError("this backend makes nothing")

    compiled = partial(torch.compile, dynamic=False, backend=broken_backend)
    monkeypatch.setattr(
        torch, "compile", lambda function, **more: compiled(function, fullgraph=more["fullgraph"])
    )
    done = run(write_expert(tmp_path, base, SETTINGS | {"torch_compile": True}))
    assert fallbacks(done.folder) == [{"kernels.compile": False}]
    assert "this backend makes nothing" in events_of(done.folder, "fell_back")[0]["reason"]
    assert losses_of(done.folder) == losses_of(whole[1])


def test_an_error_that_no_plan_fixes_is_raised_as_it_is(base, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "total", MagicMock(side_effect=ZeroDivisionError("a mistake")))
    with pytest.raises(ZeroDivisionError):
        run(write_expert(tmp_path, base, SETTINGS))
    folder = next((tmp_path / "runs").iterdir())
    assert events_of(folder, "failed")[0]["error"] == "ZeroDivisionError: a mistake"
