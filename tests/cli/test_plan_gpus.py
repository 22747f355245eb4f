"""`expert plan --gpus N [--nodes M --link NAME]`: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest

from expert.planning.machine.links import LINKS
from tests.cli.running import EXPERT_JSON

ROW = json.dumps({"instruction": "x " * 300, "response": "y " * 200}) + "\n"


@pytest.fixture
def large(tmp_path) -> str:
    """A manifest of an 8B model with rows that are counted."""
    (tmp_path / "train.jsonl").write_text(ROW * 2000, encoding="utf-8")
    file = tmp_path / "m.yaml"
    text = "name: large\nbase_model: Llama-3.1-8B\ntraining:\n  dataset: {path: train.jsonl}\n"
    file.write_text(text + "  config: {batch_size: 128}\n", encoding="utf-8")
    return str(file)


def test_four_cards_are_planned_with_engine_memory_communication_and_rate(run, large):
    ran = run("plan", large, "--gpu", "rtx-4090", "--gpus", "4")
    assert ran.code == 0
    assert "large on 4 × GeForce RTX 4090" in ran.out
    for key in ("engine", "ranks", "link", "sent_bytes", "communication_seconds"):
        assert f"parallel.{key} " in ran.out
    assert "peak memory of a step on each card, of " in ran.out
    assert "replicated on 4 × GeForce RTX 4090: " in ran.out
    [rate] = [line for line in ran.out.splitlines() if line.startswith("replicated on ")]
    assert " tokens/s, efficiency " in rate
    assert ran.out.splitlines()[-1].endswith(" 4 × GeForce RTX 4090")
    plan = json.loads(run("plan", large, "--gpu", "rtx-4090", "--gpus", "4", "--json").out)
    parallel = plan["parallel"]
    assert (parallel["engine"], parallel["ranks"], parallel["link"]) == ("replicated", 4, "pcie4")
    assert parallel["tokens_per_second"][0] > 0
    reasons = {each["path"]: each["because"] for each in plan["decisions"]}
    assert all(reasons[f"parallel.{key}"] for key in parallel)
    for options in ((), ("--gpus", "1")):
        one = run("plan", large, "--gpu", "rtx-4090", *options).out
        assert "parallel." not in one
        assert "tokens/s, efficiency" not in one


def test_two_machines_are_planned_with_their_network(run, large):
    options = ("--gpu", "h100", "--gpus", "8", "--nodes", "2", "--link", "nvlink,ib400")
    ran = run("plan", large, *options, "--set", "adapter_type=full")
    assert "2 machines with 8 × H100 SXM each" in ran.out
    assert "sharded on 2 machines" in ran.out
    plan = json.loads(run("plan", large, *options, "--json").out)
    assert (plan["parallel"]["ranks"], plan["parallel"]["nodes"]) == (16, 2)
    assert (plan["parallel"]["link"], plan["parallel"]["network"]) == ("nvlink", "ib400")


def test_cards_are_compared_with_what_several_of_them_reach(run, large):
    ran = run("plan", large, "--gpu", "rtx-4090", "--gpu", "h200", "--gpus", "2")
    assert "2 × GeForce RTX 4090" in ran.out
    assert "parallel.tokens_per_second" in ran.out
    one = run("plan", large, "--gpu", "rtx-4090", "--gpu", "h200")
    assert "parallel." not in one.out


def test_a_rate_that_is_not_known_says_what_is_missing(run, large):
    ran = run("plan", large, "--gpu", "a100-80gb", "--gpus", "4")
    [line] = [each for each in ran.out.splitlines() if each.startswith("replicated on ")]
    assert line.endswith("--link")


def test_offloading_is_shown_with_its_cost(run, large):
    ran = run("plan", large, "--gpu", "rtx-4090", "--set", "adapter_type=full")
    assert ran.code == 0
    assert "sharded, offloaded on GeForce RTX 4090" in ran.out
    assert "warning: parallel.offload: slow: " in ran.out


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (("--gpus", "0"), 1),
        (("--gpus", "-2"), 1),
        (("--gpus", "some"), 1),
        (("--gpus", "all"), 1),  # there is none here
        (("--nodes", "2"), 1),
        (("--link", "pcie4"), 1),
        (("--gpus", "2", "--link", "eth100"), 1),
        (("--gpus", "0", "--nodes", "0", "--link", "foo"), 3),
        (("--nodes", "2", "--link", "foo"), 2),
    ],
)
def test_every_problem_of_the_options_is_reported_at_once(run, monkeypatch, options, lines):
    monkeypatch.setattr("expert.planning.machine.machine.visible_gpus", lambda *_: ((), ""))
    ran = run("plan", EXPERT_JSON, "--gpu", "rtx-4090", *options)
    assert ran.code == 2
    assert len(ran.err.strip().splitlines()) == lines
    if "foo" in options:
        assert all(name in ran.err for name in LINKS)


def test_gpus_alone_plans_for_the_cards_of_this_machine(run, monkeypatch):
    from tests.planning.planning import gpu

    cards = tuple(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9)) for _ in range(3))
    monkeypatch.setattr("expert.planning.machine.machine.visible_gpus", lambda *_: (cards, ""))
    plan = json.loads(run("plan", EXPERT_JSON, "--gpus", "all", "--json").out)
    assert (plan["target"], plan["parallel"]["ranks"]) == ("NVIDIA GeForce RTX 4090", 3)


def test_gpus_without_one_here_plans_processes_on_the_cpu_and_says_so(run, monkeypatch):
    monkeypatch.setattr("expert.planning.machine.machine.visible_gpus", lambda *_: ((), ""))
    ran = run("plan", EXPERT_JSON, "--gpus", "2")
    assert ran.code == 0
    assert "advice: kernels.device: " in ran.out
