"""Runs with captured passes (a stand-in for CUDA graphs) end bit for bit like eager ones."""

from __future__ import annotations

import pytest
import torch

from expert.planning.choose import fastest
from expert.run import build as building
from expert.training import learner
from tests.jobs.runs import events_of, losses_of, plan_of, run, weights_of, write_expert
from tests.parallel.fake_capture import FakeCapture, UndoneStep
from tests.parallel.test_worlds import numbers_of

SLOW_BF16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU emulates bfloat16: half a minute",
)


@pytest.mark.parametrize(
    "config",
    [
        {"micro_batch_size": 1, "dropout": 0.1},
        {"adapter_type": "full", "learning_rate": 1e-3, "micro_batch_size": 2},
        pytest.param({"adapter_type": "dora", "bf16": True}, marks=SLOW_BF16),
        {"gradient_checkpointing": True, "fused_loss": False},
    ],
    ids=["parts of an update", "all weights", "bf16", "recomputed"],
)
def test_a_recorded_run_equals_one_that_is_not(base, tmp_path, monkeypatch, config):
    config |= {"epochs": 1}
    plain = run(write_expert(tmp_path / "plain", base, config))
    recorder = FakeCapture()
    monkeypatch.setattr(building, "capture_for", lambda plan, device: recorder)
    recorded = run(write_expert(tmp_path / "recorded", base, config))
    assert recorder.replayed > 4
    assert losses_of(recorded.folder) == losses_of(plain.folder)
    assert weights_of(recorded.folder) == weights_of(plain.folder)


def test_a_run_whose_steps_are_recorded_learns_the_same(base, tmp_path, monkeypatch):
    config = {"optim": "adamw_torch_fused", "epochs": 3, "eval_steps": 4}
    plain = run(write_expert(tmp_path / "plain", base, config))
    recorder = FakeCapture()
    monkeypatch.setattr(building, "capture_for", lambda plan, device: recorder)
    monkeypatch.setattr(learner, "CapturedStep", UndoneStep)
    recorded = run(write_expert(tmp_path / "recorded", base, config))
    assert recorder.recorded == 3  # forward, backward, step
    # Rates are float32 on the device: 6e-8 of a step, over 18 steps of up to 1e-2.
    assert numbers_of(recorded.folder) == pytest.approx(numbers_of(plain.folder), rel=1e-5)


def test_a_run_that_cannot_be_recorded_continues_without(base, tmp_path, monkeypatch):
    plain = run(write_expert(tmp_path / "plain", base, {"epochs": 1}))

    def refuses(passes):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(fastest, "_obstacle", lambda *_, **__: "")
    monkeypatch.setattr(
        building, "capture_for", lambda plan, device: refuses if plan.kernels.cuda_graphs else None
    )
    done = run(write_expert(tmp_path / "expert", base, {"use_cuda_graphs": True, "epochs": 1}))
    (told,) = events_of(done.folder, "fell_back")
    assert "not permitted when stream is capturing" in told["reason"]
    assert plan_of(done.folder)["kernels"]["cuda_graphs"] is False
    assert losses_of(done.folder) == losses_of(plain.folder)
