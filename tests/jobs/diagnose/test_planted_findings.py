"""Problems planted in real runs on the CPU, found by a diagnosis that sees the run folder alone.

Waiting is planted with sleeps that are many times as long as the tiny model's steps (10 to 100 ms
on two idle cores), and longer where others use the cores. Runs that nothing waits in are timed by
what they compute.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from expert.core.errors import ExpertError
from expert.insight.page.facts import RunFacts
from expert.jobs.diagnose.diagnose import diagnose_run
from tests.jobs.runs import (
    base_model,
    events_of,
    inject,
    run,
    run_undisturbed,
    times_slower,
    write_expert,
)
from tests.jobs.trained_runs import finished, finished_characters

Plant = Callable[[pytest.MonkeyPatch], Any]
ALARMS = ("error", "warning")
WAITING = ("data-bound", "evaluation-bound")
PADDED: dict[str, Any] = {"packing": False, "group_by_length": False, "dataloader_num_workers": 0}


def slowed(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, seconds: float) -> None:
    """Slow a function down by this time; by more if each core has several processes."""
    real = getattr(place, name)

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(seconds * times_slower())
        return real(*args, **more)

    monkeypatch.setattr(place, name, slow)


def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes nearly half a second for what a batch reads."""
    from expert.data.feed import feed

    slowed(monkeypatch, feed, "fill_batch", 0.4)


def slow_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations that take more than a second, and checkpoints that take most of one."""
    from expert.run.session import checkpoints, evaluate

    slowed(monkeypatch, evaluate, "evaluate", 1.4)
    slowed(monkeypatch, checkpoints, "save_checkpoint", 0.8)


def a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from expert.model import blocks

    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(blocks, "compile_blocks", fail)


def a_loss_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, lambda loss, batch, now: loss * math.nan if now.update == 5 else loss)


def memory_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(loss: Any, batch: Any, now: Any) -> Any:
        if batch.tokens.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    inject(monkeypatch, fault)


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is the fault."""


@dataclass
class Case:
    says: dict[str, str]
    """The findings, and words of their evidence or fix."""
    config: dict[str, Any] = field(default_factory=dict)
    plant: Plant = nothing
    severity: str = "warning"
    verdict: str = "compute-bound"
    more: dict[str, Any] = field(default_factory=dict)


LONG = [{"instruction": "say " + "one two red cat " * 3000, "response": w} for w in "abcdefgh"] * 3
CASES = [
    Case(
        {"tokenised-late": "tokenize: ahead"},
        {**PADDED, "tokenize": "late", "max_steps": 6, "train_on_prompt": True},
        more={"rows": LONG},
        verdict="data-bound",
    ),
    Case({"slow-disk": "MB/s were read"}, {"max_steps": 5}, slow_reads, verdict="data-bound"),
    Case({"batch-1": "you set batch_size: 1"}, {"batch_size": 1, "max_steps": 8}),
    Case(
        {
            "small-micro-batch": "you set micro_batch_size: 1",
            "eager-attention": "you set attention: eager",
            "needless-recomputing": "you set gradient_checkpointing: full",
        },
        {"micro_batch_size": 1, "batch_size": 8, "attention": "eager",
         "gradient_checkpointing": True, "max_steps": 10},
    ),
    Case({"compile-failed": "C compiler"}, {"torch_compile": True}, a_compiler_that_fails),
    Case(
        {"evaluation-often": "you set eval_steps: 1", "saving-often": "you set save_steps: 1"},
        {"eval_steps": 1, "save_steps": 1, "max_steps": 3},
        slow_pauses,
        verdict="evaluation-bound",
    ),
    Case(
        {"not-finite": "learning_rate"}, {"on_not_finite": "stop"}, a_loss_that_is_not_finite,
        severity="error",
    ),
    Case(
        {"out-of-memory": "out of memory"}, {"max_steps": 6}, memory_for_one,
        verdict="memory-bound",
    ),
]  # fmt: skip


def diagnosed(folder: Path, elsewhere: Path) -> RunFacts:
    """The diagnosis of a copy, without access to the other files of the run."""
    place = elsewhere / "moved" / folder.name
    shutil.copytree(folder, place)
    return diagnose_run(place)


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: f"{'+'.join(case.says)}-{case.severity}",
)
def test_what_is_planted_is_found_and_nothing_else(case, tmp_path, base, monkeypatch):
    manifest = write_expert(tmp_path / "made", base, {"epochs": 2, **case.config}, **case.more)
    case.plant(monkeypatch)
    try:
        folder = (run if case.verdict in WAITING else run_undisturbed)(manifest).folder
    except ExpertError:
        [folder] = (tmp_path / "made" / "runs").iterdir()
    found = diagnosed(folder, tmp_path)
    shutil.rmtree(tmp_path / "made")
    by_name = {finding.name: finding for finding in found.findings}
    for name, words in case.says.items():
        assert by_name[name].severity == case.severity
        assert words in f"{by_name[name].evidence} {by_name[name].fix}"
        assert by_name[name].fix
    alarms = {each.name for each in found.findings if each.severity in ALARMS}
    assert alarms <= case.says.keys()
    assert found.verdict.kind == case.verdict


@pytest.mark.parametrize("kind", ["lora", "full", "dora", "soft", "int8", "characters"])
def test_a_healthy_run_draws_no_alarm(kind, tmp_path):
    folder = finished_characters() if kind == "characters" else finished(kind)
    found = diagnosed(folder, tmp_path)
    assert [each.name for each in found.findings if each.severity in ALARMS] == []
    assert found.verdict.kind in ("compute-bound", "start-bound")


def test_a_run_shorter_than_its_log_interval_can_be_diagnosed(tmp_path):
    config = {"max_steps": 5, "logging_steps": 1000}
    done = run(write_expert(tmp_path / "own", base_model(), config))
    [line] = events_of(done.folder, "step")
    assert (line["step"], line["updates"]) == (5, 5)
    found = diagnose_run(done.folder)
    assert found.verdict.kind != "unknown"
    assert found.anatomy.step.wall > 0
