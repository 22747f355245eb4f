"""`expert plan --gpus N [--nodes M]`: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest

ROW = json.dumps({"instruction": "x " * 300, "response": "y " * 200}) + "\n"


@pytest.fixture
def large(tmp_path) -> str:
    """A manifest of an 8B model with rows that are counted."""
    (tmp_path / "train.jsonl").write_text(ROW * 2000, encoding="utf-8")
    file = tmp_path / "m.yaml"
    text = "name: large\nbase_model: Llama-3.1-8B\ntraining:\n  dataset: {path: train.jsonl}\n"
    file.write_text(text + "  config: {batch_size: 128}\n", encoding="utf-8")
    return str(file)


def test_several_cards_are_planned_with_engine_and_memory_of_each(run, large):
    ran = run("plan", large, "--gpu", "rtx-4090", "--gpus", "4", "--full")
    assert ran.code == 0
    assert "large on 4 × GeForce RTX 4090" in ran.out
    assert "peak memory of a step on each card, of " in ran.out
    assert "replicated on 4 × GeForce RTX 4090" in ran.out
    assert ran.out.splitlines()[0].endswith(" 4 × GeForce RTX 4090")
    full = ("--gpu", "h100", "--gpus", "8", "--nodes", "2", "--set", "adapter_type=full")
    assert "sharded on 2 machines with 8 × H100 SXM each" in run("plan", large, *full).out
    plan = json.loads(run("plan", large, *full, "--json").out)
    assert (plan["parallel"]["ranks"], plan["parallel"]["nodes"]) == (16, 2)
    reasons = {each["path"]: each["because"] for each in plan["decisions"]}
    assert all(reasons[f"parallel.{key}"] for key in plan["parallel"])
    assert "parallel." not in run("plan", large, "--gpu", "rtx-4090", "--gpus", "1").out


def test_offloading_is_shown_as_slow(run, large):
    ran = run("plan", large, "--gpu", "rtx-4090", "--set", "adapter_type=full")
    assert ran.code == 0
    assert "sharded, offloaded on GeForce RTX 4090" in ran.out
    assert "warning: parallel.offload: slow: " in ran.out
