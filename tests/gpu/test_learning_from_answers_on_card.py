"""`expert improve --method grpo` on a card: answers come from captured steps, and what the step
learns from is as likely as it was when it was drawn."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from expert import improve
from tests.gpu.real_model import DEVICE, needs_card, note
from tests.jobs.drawn import drawn_and_learnt
from tests.jobs.runs import run, write_expert
from tests.jobs.validated_runs import ROWS, TESTS, rows_file

pytestmark = [pytest.mark.gpu, needs_card]

MODES: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"adapter_type": "dora"},
    "NF4": {"quantization": "int4"},
    "full": {"adapter_type": "full"},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_learns_from_what_its_own_weights_drew(tmp_path, request, monkeypatch, mode):
    start = write_expert(
        tmp_path,
        "tiny",
        {"epochs": 1, "learning_rate": 2e-3, "torch_compile": False, "device": DEVICE}
        | MODES[mode],
        rows=ROWS,
        dataset={"test_path": "test.jsonl"},
        capabilities=["format:json"],
    )
    rows_file(tmp_path, TESTS, "test.jsonl")
    begun = run(start).folder
    judge = tmp_path / "short.py"
    judge.write_text("def judge(prompt, expected, answer):\n    return 1 / (1 + len(answer))\n")
    drawn, learnt = drawn_and_learnt(monkeypatch)
    done = improve(
        begun,
        method="grpo",
        rounds=1,
        answers=8,
        judge_command=str(judge),
        min_score=1.0,
        overrides=("batch_size=8", "learning_rate=1e-3"),
        device=DEVICE,
        output=tmp_path / "out",
    )
    curve = done.rounds[0].facts["steps"]
    assert any(each["mixed"] > 0.5 for each in curve)
    assert len(drawn) > 100
    change = [abs(one - other) for one, other in zip(drawn, learnt, strict=True)]
    note("learning.jsonl", request.node.name, {"mean": mean(change), "most": max(change)})
    # BF16 has 8 bits; what is drawn wrong is off by as much as the logarithms themselves.
    assert mean(change) < 0.03 < mean(abs(each) for each in drawn)
