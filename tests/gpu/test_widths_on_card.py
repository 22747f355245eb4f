"""Packed batches as wide as their fullest sequence learn on a card what batches of one width do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.real_model import note
from tests.gpu.real_texts import TEXTS
from tests.gpu.test_recovery_on_card import FIRST_LOSS, LATER_LOSSES
from tests.gpu.trainer import in_own_process
from tests.jobs.runs import events_of, plan_of, write_expert

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def trained(folder: Path, **config: Any) -> Path:
    """Eight updates of two rows each; one row is eight times as long as the others."""
    rows = [{"text": text[start : start + 200]} for text in TEXTS for start in range(0, 1400, 200)]
    rows = [row for row in rows if row["text"].strip()] + [{"text": TEXTS[0][:1600]}]
    settings = {
        "train_on_prompt": True,
        "max_seq_length": 1024,
        "batch_size": 2,
        "max_steps": 8,
        "epochs": 20,
        "evaluation_strategy": "no",
        "dropout": 0.0,
        **config,
    }
    made = write_expert(folder, "tiny", settings, rows=rows, model={"quantization": "none"})
    done = in_own_process(made)
    assert done["exit_code"] == 0
    return Path(done["folder"])


def test_batches_that_vary_in_width_learn_what_batches_of_one_width_learn(tmp_path, request):
    one = trained(tmp_path / "one", torch_compile=False, use_cuda_graphs=True)
    varied = trained(tmp_path / "varied", torch_compile=False, use_cuda_graphs=False)
    assert (plan_of(one)["data"]["flat"], plan_of(varied)["data"]["flat"]) == (False, True)
    losses = [[float(e["loss"]) for e in events_of(run, "step")] for run in (one, varied)]
    apart = [abs(a / b - 1) for a, b in zip(*losses, strict=True)]
    padding = [max(e["padding"] for e in events_of(run, "step")) for run in (one, varied)]
    note("widths.jsonl", request.node.name, {"losses apart": apart, "padding": padding})
    assert apart[0] <= FIRST_LOSS
    assert max(apart) <= LATER_LOSSES
    assert padding[1] < padding[0]
