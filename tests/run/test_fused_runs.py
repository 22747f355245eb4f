"""Whole runs with fused blocks: the losses of other blocks, resumed bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from expert.model.fused.block import FusedForward
from expert.run.stored.load import fuse_to_answer
from tests.each import each
from tests.jobs.runs import copied, losses_of, plan_of, run, saved_steps, weights_of, write_expert
from tests.model.models import load, tiny_model
from tests.parallel.test_worlds import numbers_of

SETTINGS: dict[str, Any] = {"epochs": 1, "micro_batch_size": 2, "save_steps": 2}


@each(
    "config",
    [{"gradient_checkpointing": "selective"}, {"packing": False, "adapter_type": "dora"}],
    ids=str,
)
def test_a_run_with_fused_blocks_has_the_losses_of_other_blocks(tmp_path, base, config):
    losses = []
    for fused in (True, False):
        settings = {**SETTINGS, **config, "fused_blocks": fused, "max_steps": 3}
        done = run(write_expert(tmp_path / str(fused), base, settings)).folder
        assert plan_of(done)["kernels"]["fused_blocks"] is fused
        losses.append(numbers_of(done))
    # Float32 keeps 24 bits; other orders of sums, through a few blocks and steps.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 3


def test_a_run_with_fused_blocks_resumes_bit_for_bit(tmp_path, base):
    manifest = write_expert(tmp_path / "whole", base, {**SETTINGS, "fused_blocks": True})
    whole = run(manifest).folder
    half = copied(whole, whole.with_name("demo-29990101-000000"))
    for step in saved_steps(half)[1:]:
        shutil.rmtree(half / "checkpoints" / f"step-{step:06d}")
    assert run(manifest, resume=str(half)).folder == half
    assert losses_of(half) == {s: loss for s, loss in losses_of(whole).items() if s > 2}
    assert weights_of(half) == weights_of(whole)


@pytest.mark.parametrize(("precision", "fused"), [("fp32", True), ("bf16", False)])
def test_float32_weights_that_are_rounded_by_autocast_answer_with_plain_blocks(
    precision, fused, tmp_path, monkeypatch
):
    """As a checkpoint of full training has them."""
    loaded = load(tiny_model(tmp_path / "model", "llama"), "full")
    loaded = replace(loaded, kernels=loaded.kernels.model_copy(update={"precision": precision}))
    monkeypatch.setattr("expert.model.fused.kernels.triton_failure", lambda device: "")
    fuse_to_answer(loaded, torch.device("cuda"))
    assert isinstance(loaded.blocks[0].forward, FusedForward) == fused
