"""Passes captured as CUDA graphs train like eager ones on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.real_model import SMOLLM2, card_only, needs_card, note
from tests.gpu.test_recovery_on_card import FIRST_LOSS, expert_of
from tests.gpu.trainer import run_of
from tests.jobs.runs import events_of, plan_of

pytestmark = [pytest.mark.gpu, needs_card, card_only]
# Micro-batches that lack sequences are padded where they are captured and laid end to end where
# they are launched: gradients are sums of other numbers of rows, which tips roundings to bfloat16.
# On an H200 a later loss moved by 0.19 %, and by nothing where both had one layout
# (test_widths_on_card). This is what bfloat16 may cost a mean loss in test_real_weights.
LATER_LOSSES = 5e-3


def trained(folder: Path, model: str, *, waits: bool = False, **config: Any) -> Path:
    """A run of eight updates of several batches each, with dropout."""
    settings = {
        "max_seq_length": 256,
        "batch_size": 8,
        "micro_batch_size": 2,
        "epochs": 20,
        "max_steps": 8,
        "evaluation_strategy": "no",
        **config,
    }
    return run_of(expert_of(folder, model, **settings), waits=waits)


def losses(folder: Path, model: str, *, graphs: bool, **config: Any) -> list[float]:
    run = trained(folder, model, use_cuda_graphs=graphs, **config)
    assert not events_of(run, "fell_back")
    assert plan_of(run)["kernels"]["cuda_graphs"] is graphs
    assert plan_of(run)["batch"]["accumulation"] > 1
    return [float(event["loss"]) for event in events_of(run, "step")]


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("tiny", {"attention": "sdpa"}),
        ("tiny", {"attention": "flash"}),
        ("tiny", {"attention": "flex", "torch_compile": True}),
        ("tiny", {"adapter_type": "full", "learning_rate": 1e-4}),
        ("tiny", {"quantization": "int4"}),
        (SMOLLM2, {"attention": "flash"}),
    ],
    ids=["sdpa", "flash", "compiled flex", "all weights", "NF4", "smollm2"],
)
def test_recorded_updates_learn_what_run_ones_learn(tmp_path, request, model, config):
    run, recorded = (
        losses(tmp_path / str(graphs), model, graphs=graphs, **config) for graphs in (False, True)
    )
    apart = [abs(one / other - 1) for one, other in zip(run, recorded, strict=True)]
    note("graphs.jsonl", request.node.name, {"losses apart": apart})
    assert apart[0] <= FIRST_LOSS
    assert max(apart) <= LATER_LOSSES


def test_a_model_that_cannot_be_recorded_goes_on_without_and_learns_the_same(tmp_path, request):
    """With dropout: a recording that fails must leave the generator of the card as it was."""
    plain = losses(tmp_path / "plain", "tiny", graphs=False)
    run = trained(tmp_path / "waits", "tiny", waits=True, use_cuda_graphs=True)
    (told,) = events_of(run, "fell_back")
    assert "cannot be captured" in told["reason"]
    assert plan_of(run)["kernels"]["cuda_graphs"] is False
    found = [float(event["loss"]) for event in events_of(run, "step")]
    apart = [abs(one / other - 1) for one, other in zip(plain, found, strict=True)]
    note("graphs.jsonl", request.node.name, {"losses apart": apart})
    assert max(apart) <= LATER_LOSSES
