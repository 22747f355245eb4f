"""Faults planted in real runs on the CPU, each found by a diagnosis that sees the run folder alone.

The thresholds stand beside the rules; insight/findings/table.py says which came from these runs.
Waiting is planted with sleeps that are many times as long as the tiny model's updates (10 to 100 ms
on two idle cores; up to 0.7 s were seen on busy ones).
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
from expert.jobs.diagnose.diagnose import Diagnosis, diagnose_run
from tests.jobs.runs import ROWS, base_model, inject, run, write_expert
from tests.jobs.trained_runs import finished, finished_characters
from tests.wording import wording

Plant = Callable[[pytest.MonkeyPatch], Any]
ALARMS = ("error", "warning")
PADDED: dict[str, Any] = {"packing": False, "group_by_length": False, "dataloader_num_workers": 0}


def slowed(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, seconds: float) -> None:
    """Let a function take so much longer."""
    real = getattr(place, name)

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **more)

    monkeypatch.setattr(place, name, slow)


def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes most of a second for what a batch reads."""
    from expert.data.feed import feed

    slowed(monkeypatch, feed, "fill_batch", 0.6)


def slow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that take long to make, in the loop itself."""
    from expert.data.feed.loader import PreparedBins

    slowed(monkeypatch, PreparedBins, "__getitems__", 0.2)


def slow_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    from expert.training import checkpoint

    slowed(monkeypatch, checkpoint, "save_checkpoint", 1.0)


def slow_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    from expert.training import evaluation

    slowed(monkeypatch, evaluation, "evaluate", 1.0)


def a_graph_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is left out, its count is not: two new graphs whenever somebody asks."""
    from expert.model import blocks

    asked = 0

    def recompiles(self: Any) -> int:
        nonlocal asked
        asked += 2
        return asked

    monkeypatch.setattr(blocks, "compile_blocks", lambda *a, **k: None)
    monkeypatch.setattr(blocks.CompileWatch, "recompiles", recompiles)


def a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from expert.model import blocks

    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(blocks, "compile_blocks", fail)


def a_loss_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, lambda loss, batch, now: loss * math.nan if now.update == 5 else loss)


def a_loss_that_leaps(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(
        monkeypatch, lambda loss, batch, now: loss + 5e3 if now.update in range(40, 45) else loss
    )


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
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    plant: Plant = nothing
    severity: str = "warning"
    verdict: str = "compute-bound"
    says: str = ""
    """Words of the evidence or the fix."""
    more: dict[str, Any] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    """Further alarms that this fault may draw."""


LONG = [{"instruction": "say " + "one two red cat " * 3000, "response": w} for w in "abcdefgh"] * 3
MIXED = [
    {"instruction": f"say {n}", "response": "cat and dog " * (12 if n % 4 == 0 else 0) + "end"}
    for n in range(48)
]
CASES = [
    Case(
        "tokenised-late",
        {**PADDED, "tokenize": "late", "max_steps": 8, "train_on_prompt": True},
        more={"rows": LONG},
        verdict="data-bound",
        says="tokenize: ahead",
    ),
    Case(
        "slow-disk", {"max_steps": 5}, plant=slow_reads, verdict="data-bound", says="kB/s were read"
    ),
    Case(
        "too-few-workers",
        PADDED,
        plant=slow_rows,
        verdict="data-bound",
        says="0 workers",
        also=frozenset({"padding-waste"}),
    ),
    Case("batch-1", {"batch_size": 1, "max_steps": 12}, says="you set batch_size: 1"),
    Case(
        "small-micro-batch",
        {"micro_batch_size": 1, "batch_size": 16},
        says="you set micro_batch_size: 1",
    ),
    Case("eager-attention", {"attention": "eager"}, says=wording("you-set-attention-eager")),
    Case(
        "needless-recomputing",
        {"gradient_checkpointing": True},
        says="you set gradient_checkpointing: full",
    ),
    Case(
        "recompiling",
        {"torch_compile": True, "epochs": 6},
        plant=a_graph_every_update,
        says="shapes vary",
    ),
    Case("compile-failed", {"torch_compile": True}, plant=a_compiler_that_fails, says="C compiler"),
    Case(
        "padding-waste",
        {**PADDED, "micro_batch_size": 8},
        more={"rows": MIXED},
        says="packing: true",
        also=frozenset({"too-few-workers"}),
    ),
    Case(
        "evaluation-often",
        {"eval_steps": 1, "max_steps": 5},
        plant=slow_evaluations,
        verdict="evaluation-bound",
        says="you set eval_steps: 1",
    ),
    Case(
        "saving-often",
        {"save_steps": 1, "max_steps": 5},
        plant=slow_saves,
        verdict="saving-bound",
        says="you set save_steps: 1",
    ),
    Case("not-finite", {"on_not_finite": "skip"}, plant=a_loss_that_is_not_finite, says="update 6"),
    Case(
        "not-finite",
        {"on_not_finite": "stop"},
        plant=a_loss_that_is_not_finite,
        severity="error",
        says="learning_rate",
    ),
    Case(
        "loss-spikes",
        {"epochs": 10, "batch_size": 8, "save_steps": 10},
        plant=a_loss_that_leaps,
        says=wording("times-back-to-checkpoint"),
        also=frozenset({"saving-often"}),
    ),
    Case(
        "out-of-memory", plant=memory_for_one, verdict="memory-bound", says=wording("out-of-memory")
    ),
    Case("always-clipped", {"max_grad_norm": 0.01}, says="above max_grad_norm 0.01"),
    Case("whole-logits", {"fused_loss": False}, severity="note", says="you set fused_loss: false"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("models"))


def diagnosed(folder: Path, elsewhere: Path) -> Diagnosis:
    """The diagnosis of a copy; whatever else belonged to the run is out of reach."""
    place = elsewhere / "moved" / folder.name
    shutil.copytree(folder, place)
    return diagnose_run(place)


def test_there_are_enough_faults():
    assert len({case.name for case in CASES}) >= 12


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.severity}")
def test_a_planted_fault_is_found_and_nothing_else(case, tmp_path, models, monkeypatch):
    manifest = write_expert(tmp_path / "made", models, {"epochs": 3, **case.config}, **case.more)
    case.plant(monkeypatch)
    try:
        folder = run(manifest).folder
    except ExpertError:
        [folder] = (tmp_path / "made" / "runs").iterdir()
    found = diagnosed(folder, tmp_path)
    shutil.rmtree(tmp_path / "made")
    [fault] = [finding for finding in found.findings if finding.name == case.name]
    assert fault.severity == case.severity
    assert case.says in f"{fault.evidence} {fault.fix}"
    assert fault.fix
    alarms = {each.name for each in found.findings if each.severity in ALARMS}
    assert alarms <= {case.name, *case.also}
    assert found.verdict.kind == case.verdict


@pytest.mark.parametrize("kind", ["lora", "full", "dora", "soft", "int8", "characters"])
def test_a_healthy_run_draws_no_alarm(kind, tmp_path):
    folder = finished_characters() if kind == "characters" else finished(kind)
    found = diagnosed(folder, tmp_path)
    assert [each.name for each in found.findings if each.severity in ALARMS] == []
    assert found.step_verdict.kind == "compute-bound"


def test_a_healthy_run_with_rows_alone_draws_no_alarm(tmp_path, models):
    same = [{"instruction": f"say {n:02}", "response": "cat and dog"} for n in range(48)]
    config = {**PADDED, "epochs": 3, "micro_batch_size": 8, "group_by_length": True}
    folder = run(write_expert(tmp_path / "made", models, config, rows=same)).folder
    found = diagnosed(folder, tmp_path)
    assert [each.name for each in found.findings if each.severity in ALARMS] == []


def test_rows_are_enough():
    assert len(ROWS) == 48  # six or more updates of 8 rows in three epochs: some have settled
