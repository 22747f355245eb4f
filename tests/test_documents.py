"""Outputs and counts in documents are those of the commands and the code."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from expert.planning.machine.cards import CARDS
from expert.planning.memory.memory import estimate
from expert.planning.models.known_models import KNOWN_MODELS
from tests.planning.test_memory import (
    guess_of,
    measured_runs,
    modelled_records,
    workload_of_run,
)
from tests.warm import python

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
README, PLAN, SPEED = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/PLAN.md", "docs/SPEED.md")
)


def shown_commands() -> list[tuple[str, str]]:
    """Every `$ expert …` of docs/PLAN.md with the output under it."""
    return re.findall(r"```\n\$ (expert [^\n]+)\n(.*?)```", PLAN, flags=re.DOTALL)


def test_the_page_on_plans_shows_three_commands_with_their_output():
    assert len(shown_commands()) == 3


@pytest.mark.parametrize(("command", "output"), shown_commands())
def test_the_output_on_the_page_on_plans_is_what_the_command_prints(
    command, output, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path))
    broken = "base_model: x\ndataset: a.jsonl\ntraining:\n  config:\n    epoch: 3\n    rank: two\n"
    (tmp_path / "broken.yaml").write_text(broken, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program = [python(), "-m", "expert"]
    words = [*program, *command.split()[1:]]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.stdout + ran.stderr == output


def test_the_python_example_on_the_page_on_plans_runs():
    [code] = re.findall(r"```python\n(.*?)```", PLAN, flags=re.DOTALL)
    words = [python(), "-c", code]
    ran = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.startswith("bf16 2 ")


def test_the_counts_in_the_readme_are_true():
    [counts] = re.findall(r"for more than (\d+) cards and (\d+) models", " ".join(README.split()))
    assert len(CARDS) > int(counts[0])
    assert len(KNOWN_MODELS) > int(counts[1])


def test_the_guide_leads_with_expert_new_and_links_every_page_of_its_topics():
    guide = (ROOT / "docs" / "TRAINING_GUIDE.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$? ?(expert [a-z-]+)", guide, flags=re.MULTILINE)
    assert commands[0] == "expert new"
    topics = {"DATA", "PLAN", "RUNS", "VALIDATION", "EXPORT", "PERFORMANCE", "EXAMPLES"}
    assert topics <= set(re.findall(r"\(([A-Z]+)\.md\)", guide))
    assert all(f"docs/{name}.md" in README for name in topics)


def test_the_measured_worst_case_of_the_memory_estimate_is_true():
    errors = [abs(guess_of(r) / r["peak"] - 1) for r in modelled_records()]
    runs = [(workload_of_run(run), run["allocated_bytes"]) for run in measured_runs()]
    errors += [abs(estimate(work).allocated / peak - 1) for work, peak in runs]
    assert f"{len(errors)} peaks measured" in SPEED
    assert f"off by {max(errors):.1%}".replace("%", " %") in SPEED


def test_the_range_of_plans_is_that_of_runs_that_calibrated_nothing():
    record = json.loads((BENCHMARKS / "memory-plans-h200.json").read_text(encoding="utf-8"))
    held = [run for run in record["results"] if run["role"] == "held to its plan"]
    apart = [run["planned_bytes"] / run["measured_bytes"] - 1 for run in held]
    told = f"between {-min(apart):.1%} below and {max(apart):.1%} above".replace("%", " %")
    text = " ".join(SPEED.split())
    assert f"{len(held)} plans of runs" in text
    assert told in text


EXPERTS_ON_A_CPU = json.loads((BENCHMARKS / "experts-cpu.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("one", EXPERTS_ON_A_CPU["results"], ids=lambda one: one["expert"])
def test_the_readme_of_an_expert_has_the_numbers_of_the_record(one):
    told = (ROOT / "experts" / one["expert"] / "README.md").read_text(encoding="utf-8")
    for side in ("tuned", "base"):
        judged = one[side]
        cases = judged["passed"] + judged["failed"] + judged["without_oracle"]
        assert f"{judged['passed']} of {cases}" in told
    assert f"{one['tuned']['accuracy']:.1%}".replace("%", " %") in told
    for task, found in one["tuned"]["tasks"].items():
        assert f"{task} {found['passed']} of {found['cases']}" in told
