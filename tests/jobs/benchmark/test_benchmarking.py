"""Benchmarks: one with real processes on a CPU, and with made-up ones what is kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from expert.core.process import Child
from expert.data.splits import NothingToPrepare
from expert.insight.ladder import read_ladder
from expert.jobs.benchmark import benchmark as job
from expert.jobs.benchmark.benchmark import (
    Benchmark,
    MeasurementFailed,
    benchmark,
    new_folder,
)
from expert.planning.benchmark_settings import BASELINE, SETTINGS, TOLERANCE_FP32
from expert.planning.choose.sequences import Packing
from tests.each import each
from tests.jobs.benchmark.fake_processes import Played, played, request
from tests.jobs.runs import events_of, write_expert


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))


@pytest.fixture
def path(tmp_path, base):
    return write_expert(tmp_path / "expert", base, {"max_seq_length": 64})


@pytest.mark.slow
def test_settings_of_an_expert_on_a_cpu(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {"batch_size": 8, "epochs": 1})
    named = ("pre-tokenised", "fused loss", "compile")
    found, files = benchmark(request(path, only=named, minutes=2.0))
    by = {setting.name: setting for setting in found.rungs}
    assert by["baseline"].measured.tokens_per_second > 0
    assert by["compile"].because == "compiling is not worth it on a CPU"
    # The same rows in the same order: not one bit may differ.
    assert by["pre-tokenised"].measured.loss == by["baseline"].measured.loss
    assert by["pre-tokenised"].changes == {"data.tokenize": ("late", "ahead")}
    assert by["fused loss"].tolerance == TOLERANCE_FP32
    assert abs(by["fused loss"].loss_difference) <= TOLERANCE_FP32
    assert found.drift is not None
    assert found.environment["versions"]["torch"]
    assert read_ladder(files[0]).rungs == found.rungs
    assert not (tmp_path / "home").exists()  # a partial benchmark has no winner
    # Settings are real runs, and leave no weights.
    runs = {run.parent.name: run for run in (files[0].parent / "runs").glob("*/*")}
    for name, kind in (("baseline", "late"), ("pre-tokenised", "padded")):
        assert {event["kind"] for event in events_of(runs[name], "feed")} == {kind}
        assert not list(runs[name].rglob("*.safetensors"))


# --- with processes that are made up --------------------------------------------------------------


def test_settings_that_fail_are_slower_or_disagree_are_left_out_of_later_ones(
    path, tmp_path, monkeypatch
):
    given = {"loader": "out of memory", "attention": 1.0, "fused-loss": (10_000.0, 3.0)}
    monkeypatch.setattr(job, "events_of", events := Played(given))
    shown = []
    found, _ = benchmark(request(path), show=lambda text, style: shown.append(text))
    by = {setting.name: setting for setting in found.rungs}
    assert list(by) == [BASELINE, *(setting.name for setting in SETTINGS)]
    assert (by["loader"].status, by["loader"].because) == ("failed", "out of memory")
    assert by["attention"].status == "slower"
    assert by["fused loss"].status == "disagrees"
    used = events.arguments["no-checkpointing"]
    for key in ("dataloader_num_workers=0", 'attention="eager"', "fused_loss=false"):
        assert f"training.config.{key}" in used
    assert by["batch size"].gain == pytest.approx(4 / 3)
    assert by["no checkpointing"].cumulative == pytest.approx(5.0)
    assert found.drift == 0.0
    assert "--set attention=eager" in shown[-1]  # what the plan would not choose by itself


def test_a_baseline_that_fails_does_not_end_the_benchmark(path, tmp_path, monkeypatch):
    given = dict.fromkeys(("baseline", "pre-tokenised", "loader", "packing"), "out of memory")
    found, events, _ = played(monkeypatch, path, tmp_path / "out", given)
    by = {setting.name: setting for setting in found.rungs}
    assert by["packing"].status == "failed"
    assert (by["attention"].status, by["attention"].gain) == ("kept", None)
    # Nothing before it could be measured: packing is not to blame, and stays.
    assert "training.config.packing=true" in events.arguments["attention"]
    assert by["no checkpointing"].cumulative is None
    assert found.drift is None


def test_only_measures_the_baseline_and_the_named_settings(path, tmp_path, monkeypatch):
    asked = ("Fused loss", "pre-tokenised")
    found, events, _ = played(monkeypatch, path, tmp_path, lambda _: 100.0, only=asked)
    assert list(events.arguments) == ["baseline", "pre-tokenised", "fused-loss", "baseline-again"]
    assert [setting.cumulative for setting in found.rungs] == [1.0, 1.0, 1.0]


def test_settings_without_time_are_listed(path, tmp_path, monkeypatch):
    now = [0.0]

    def slow(name):
        now[0] += 20_000.0
        return 100.0

    monkeypatch.setattr(job, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found, events, _ = played(monkeypatch, path, tmp_path, slow)
    by = {setting.name: setting for setting in found.rungs}
    assert list(events.arguments) == ["baseline", "pre-tokenised", "loader", "baseline-again"]
    assert (by["packing"].status, by["packing"].measured) == ("no time", None)
    assert "--minutes N for more" in by["packing"].because
    assert by["compile"].status == "not here"  # on a CPU, however much time there is


def test_the_best_on_a_machine_that_drifts_is_not_advised(path, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "events_of", Played({"baseline-again": 50.0}))
    shown = []
    found, files = benchmark(request(path), show=lambda text, style: shown.append(text))
    assert found.drift == -0.5
    assert "the baseline's rate changed by -50% meanwhile" in shown[-1]
    assert [file.name for file in files] == ["ladder.json", "ladder.html"]
    assert read_ladder(files[0]) == found
    page = files[1].read_text(encoding="utf-8")
    assert "✓ baseline" in page
    assert "no checkpointing" in page


@each(
    "event",
    [
        {"event": "fell_back", "reason": "no memory", "changes": [{"path": "kernels.x"}]},
        {"event": "not_finite", "step": 3},
        {"event": "failed", "error": "no memory"},
    ],
)
def test_a_run_that_becomes_another_setting_is_not_measured(path, tmp_path, monkeypatch, event):
    monkeypatch.setattr(job, "events_of", lambda *_, **__: (each for each in [event]))
    made = Benchmark(request(path, only=("baseline",)), lambda *_: None, print)
    made.run(tmp_path / "out")
    [result] = made.results
    assert result.status == "failed"
    assert "no memory" in result.because or "not finite" in result.because


# --- rows and files -------------------------------------------------------------------------------


def test_a_step_has_the_rows_of_the_manifest_packed_or_not(tmp_path, base, monkeypatch):
    path = write_expert(tmp_path / "expert", base, {"batch_size": 2, "max_seq_length": 128})
    made = Benchmark(request(path), print, print)
    assert (made.examples, made.notes) == (2, [])
    assert made.baseline.values["micro_batch_size"] == 2
    plain = Packing(1, 128, None)  # as though no better one had been found
    monkeypatch.setattr("expert.data.pack.packing.best_packing", lambda *_, **__: plain)
    path = write_expert(tmp_path / "other", base, {"batch_size": 2, "max_seq_length": 128})
    made = Benchmark(request(path), print, print)
    assert made.examples > 2
    assert any("rows, not the 2 of the manifest" in note for note in made.notes)


def test_a_stream_cannot_be_benchmarked(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {}, dataset={"streaming": True})
    with pytest.raises(NothingToPrepare, match="set streaming: false"):
        benchmark(request(path))


def test_two_that_start_at_once_have_folders_of_their_own(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {})
    places = {new_folder(request(path)) for _ in range(3)}
    assert len(places) == 3
    assert {place.parent for place in places} == {tmp_path / "expert" / "runs" / "benchmarks"}


# --- the process that measures a setting ----------------------------------------------------------

RUNS = """
import os, pathlib, sys, time
run = pathlib.Path(sys.argv[1]) / "demo-1"
run.mkdir(parents=True)
(run / "pid").write_text(str(os.getpid()))
(run / "events.jsonl").write_text('{"event": "step", "step": 1, "time": 1.0}\\n')
"""


def events(monkeypatch, place: Path, code: str, limit: float = 60.0):
    """The events of a process that runs this code instead of `expert train`."""

    def started(command, **how):
        return Child([sys.executable, "-c", code, *command[4:]], **how)

    monkeypatch.setattr(job, "Child", started)
    log = place / "log.txt"
    return job.events_of([str(place / "runs")], place / "runs", log=log, env={}, limit=limit)


@each(
    ("code", "words"),
    [
        ("import sys; sys.exit('no torch here')", "its process ended with code 1: no torch here"),
        ("import os; os.kill(os.getpid(), 11)", "its process was killed by SIGSEGV"),
        (f"{RUNS}\ntime.sleep(600)", "not finished after"),
    ],
)
def test_a_setting_that_fails_or_hangs_says_why(tmp_path, monkeypatch, code, words):
    limit = 2.0 if "sleep" in code else 60.0
    with pytest.raises(MeasurementFailed, match=words):
        list(events(monkeypatch, tmp_path, code, limit))


def test_a_setting_is_ended_with_the_measurement(tmp_path, monkeypatch):
    running = events(monkeypatch, tmp_path, f"{RUNS}\ntime.sleep(600)")
    assert next(running)["step"] == 1
    pid = int((tmp_path / "runs" / "demo-1" / "pid").read_text(encoding="utf-8"))
    running.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
