"""Problems planted in real runs on the CPU, found by a diagnosis that sees the run folder alone.

Waiting is planted with sleeps that are many times as long as the tiny model's steps (10 to 100 ms
on two idle cores), and longer where others use the cores. Runs that nothing waits in are timed by
what they compute.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from expert.core.errors import ExpertError
from expert.data.feed import feed
from expert.insight.page.facts import RunFacts
from expert.jobs.diagnose.diagnose import diagnose_run
from expert.jobs.diagnose.short_runs import profile, read_run_manifest, time_steps
from expert.manifest.reader import read_manifest
from expert.model import blocks
from expert.run.open import open_run
from expert.run.session import checkpoints, evaluate
from expert.run.session.short_run import short_run
from tests.jobs.runs import (
    base_model,
    events_of,
    inject,
    losses_of,
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
    slowed(monkeypatch, feed, "fill_batch", 0.4)


def slow_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations that take more than a second, and checkpoints that take most of one."""
    slowed(monkeypatch, evaluate, "evaluate", 1.4)
    slowed(monkeypatch, checkpoints, "save_checkpoint", 0.8)


def a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- short runs that leave nothing behind --------------------------------------------------------


def test_a_short_run_trains_like_the_run_and_leaves_only_tokens(tmp_path, base):
    config = {"lr_scheduler": "constant", "warmup_steps": 0, "eval_steps": 1, "save_steps": 1}
    manifest = write_expert(tmp_path, base, config | {"max_steps": 2})
    done = short_run(open_run(manifest), updates=3)  # one more than the run
    assert done.updates == 3
    assert {"eval", "saved"} & {event["event"] for event in done.events} == set()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"manifest.json", "train.jsonl", "datasets_optimized"}
    seen = {e["step"]: float(e["loss"]).hex() for e in done.events if e["event"] == "step"}
    real = losses_of(run(manifest).folder)
    assert {step: seen[step] for step in (1, 2)} == real


@pytest.fixture
def heeded():
    """A shell starts what runs in the background with SIGINT ignored; a run leaves that so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_more_than_the_first_of_two_short_runs(tmp_path, base, sent, code, heeded):
    manifest = write_expert(tmp_path, base, {})

    def stopping(updates: Any) -> Any:
        for update in updates:
            os.kill(os.getpid(), sent)
            yield update

    with pytest.raises(SystemExit) as left:
        short_run(open_run(manifest), updates=5, through=stopping)
    assert left.value.code == code


# --- profiles ------------------------------------------------------------------------------------


def test_a_profile_is_written_whole_and_summed_up_by_kernel(tmp_path, base, capfd):
    manifest = write_expert(tmp_path, base, {})
    found = profile(read_manifest(manifest), updates=2)
    assert "USDT" not in capfd.readouterr().err  # printed by torch's profiler
    trace = Path(found.trace)
    assert trace.parent == tmp_path / "profile"
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]
    with gzip.open(trace, "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert found.updates == 2
    calls = {name: calls for name, _, calls in found.kernels}
    assert calls["aten::mm"] % 2 == 0


def test_the_manifest_of_a_run_is_read_again_with_its_own_data(tmp_path, base):
    done = run(write_expert(tmp_path / "expert", base, {"max_steps": 1}))
    again = read_run_manifest(done.folder, ("training.config.batch_size=4",))
    assert again.folder == tmp_path / "expert"
    assert again.manifest.training.config.batch_size == 4
    assert short_run(open_run(again), updates=1).updates == 1
    with pytest.raises(ExpertError, match=r"has no manifest\.json"):
        read_run_manifest(tmp_path)


def test_slow_steps_are_timed_for_a_limited_time(tmp_path, base, monkeypatch):
    monkeypatch.setattr("expert.jobs.diagnose.short_runs.TIMED_SECONDS", 0.0)
    assert time_steps(read_manifest(write_expert(tmp_path, base, {}))) > 0
