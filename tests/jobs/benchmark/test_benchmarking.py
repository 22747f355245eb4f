"""Benchmarks: with real processes on a CPU, and with made-up ones what is kept and remembered."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from expert.core.interrupts import Interrupted
from expert.insight.ladder.ladder import read_ladder
from expert.jobs.benchmark import benchmark as job
from expert.jobs.benchmark.benchmark import Benchmark, benchmark
from expert.jobs.benchmark.request import (
    THOROUGH,
    CannotBenchmark,
    Watcher,
    new_folder,
    pace_of,
    write_result,
)
from expert.planning.benchmark_settings import BASELINE, SETTINGS, TOLERANCE_FP32
from expert.planning.choose.sequences import Packing
from expert.planning.measurements import read_rates
from expert.planning.models.model_files import InvalidModelFolder
from tests.each import each
from tests.forked import start_server
from tests.jobs.benchmark.fake_processes import BRISK, Heard, Played, be_brisk, played, request
from tests.jobs.runs import events_of, write_expert
from tests.jobs.trained_runs import CORPUS

NAMES = [setting.name for setting in (BASELINE, *SETTINGS)]


@pytest.fixture(autouse=True)
def brisk(monkeypatch, tmp_path):
    be_brisk(monkeypatch)
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))


@pytest.fixture
def path(tmp_path, base):
    return write_expert(tmp_path / "expert", base, {"max_seq_length": 64})


@pytest.mark.slow
def test_every_setting_of_an_expert_on_a_cpu(tmp_path, base, monkeypatch):
    # Whether a setting is faster is not for a test: all are kept, and nothing is noisy.
    start_server()
    monkeypatch.setattr("expert.insight.ladder.ladder.EQUAL_WITHIN", 1000.0)
    monkeypatch.setattr("expert.jobs.benchmark.benchmark.cost_of", lambda before, after: "")
    monkeypatch.setattr("expert.jobs.benchmark.benchmark.doubts_of", lambda ladder: [])
    path = write_expert(tmp_path / "expert", base, {"batch_size": 8, "epochs": 1})
    (tmp_path / "home").write_text("a file, not a folder", encoding="utf-8")
    heard = Heard()
    found = benchmark(request(path), folder=tmp_path / "out", watcher=heard)
    assert "home" in heard.forgotten  # what cannot be remembered is not lost
    by = {setting.name: setting for setting in found.rungs}
    assert list(by) == NAMES == heard.ended
    passed = {name: setting.status for name, setting in by.items() if setting.measured is None}
    assert passed == dict.fromkeys(
        ["bf16 + TF32", "fused AdamW", "compile", "fused blocks", "CUDA graphs"], "not here"
    ) | {name: "not here" for name in ("batch size",) if name in passed}
    measured = [name for name in NAMES if name not in passed]
    assert heard.started == [*measured, "baseline again"]
    assert {"opening the data", "loading the model", "training"} <= heard.doing
    same = {setting.name: setting for setting in found.kept[1:] if setting.tolerance is not None}
    assert "packing" not in same  # its weights come from other rows
    assert {setting.tolerance for setting in same.values()} == {TOLERANCE_FP32}
    assert all(abs(setting.loss_difference) <= TOLERANCE_FP32 for setting in same.values())
    # What is judged is trained: the loss of the first step was that of the untrained model.
    first = events_of(min((tmp_path / "out" / "runs").glob("baseline-2*")), "step")[0]["loss"]
    assert by["baseline"].measured.loss < 0.99 * first
    # The same rows in the same order: not one bit may differ.
    assert by["pre-tokenised"].measured.loss == by["baseline"].measured.loss
    assert (
        len({setting.measured.updates_learnt for setting in found.rungs if setting.measured}) == 1
    )
    assert by["pre-tokenised"].changes == {"data.tokenize": ("late", "ahead")}
    assert 0 < found.held_out_rows <= BRISK.held_out
    assert found.drift is not None
    assert read_ladder(tmp_path / "out").rungs == found.rungs
    # Settings are real runs, and leave no weights.
    runs = {run.name.partition("-20")[0]: run for run in (tmp_path / "out" / "runs").iterdir()}
    assert len(runs) == len(heard.started)
    for name, kind in (("baseline", "late"), ("pre-tokenised", "padded"), ("packing", "packed")):
        assert {event["kind"] for event in events_of(runs[name], "feed")} == {kind}
    for run in runs.values():
        assert events_of(run, "saved", "finished") == []
        assert not (run / "checkpoints").exists()
        assert not (run / "final").exists()


@pytest.mark.slow
def test_the_character_model_can_be_benchmarked_too(tmp_path):
    start_server()
    (tmp_path / "corpus.txt").write_text(CORPUS, encoding="utf-8")
    shape = {"layers": 1, "heads": 2, "width": 32, "block_size": 16}
    data = {
        "name": "letters",
        "base_model": {"name": "char-gpt", "architecture": shape},
        "training": {
            "dataset": {"path": "corpus.txt"},
            "config": {"adapter_type": "full", "batch_size": 16},
        },
    }
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    named = ("baseline", "pre-tokenised", "packing", "attention")
    found = benchmark(request(path, only=named, remember=False), folder=tmp_path / "out")
    by = {setting.name: setting for setting in found.rungs}
    assert by["baseline"].status == "kept"
    assert by["attention"].measured is not None
    assert by["pre-tokenised"].because == "a corpus of characters needs no tokenizer"
    assert by["packing"].because == "a corpus of characters is cut into blocks"
    assert found.examples_per_update == 16
    assert found.held_out_rows == BRISK.held_out  # blocks of the corpus, not its one document
    assert not (tmp_path / "home").exists()


# --- with processes that are made up --------------------------------------------------------------


def test_settings_that_fail_are_slower_or_disagree_are_left_out_of_later_ones(
    path, tmp_path, monkeypatch
):
    given = {"loader": "out of memory", "attention": 1.0, "fused-loss": (10_000.0, 3.0)}
    found, events, made = played(monkeypatch, path, tmp_path / "out", given)
    by = {setting.name: setting for setting in found.rungs}
    assert (by["loader"].status, by["loader"].because) == ("failed", "out of memory")
    assert by["attention"].status == "slower"
    assert by["fused loss"].status == "disagrees"
    full_plan = events.plans["no-checkpointing"]
    assert full_plan.loader.workers == 0
    assert full_plan.kernels.attention == "eager"
    assert full_plan.kernels.fused_loss is False
    assert full_plan.kernels.checkpointing == "none"
    assert by["packing"].below == "pre-tokenised"
    assert by["batch size"].below == "packing"
    assert by["batch size"].gain == pytest.approx(4 / 3)
    assert by["no checkpointing"].cumulative == pytest.approx(5.0)
    assert found.drift == 0.0
    made.remember(found)
    [kept] = read_rates(tmp_path / "home" / "measurements.json")
    assert kept.settings == {
        "kernels.attention": "eager",
        "kernels.checkpointing": "none",
        "batch.micro_batch": 2,
    }
    assert kept.gains.keys() == {"kernels.checkpointing", "batch.micro_batch"}
    assert kept.tokens_per_second == found.winner.measured.tokens_per_second
    again = Benchmark(request(path), Watcher())
    assert all(decision.source != "measurement" for decision in again.full_plan.decisions)


def test_an_interrupted_benchmark_keeps_the_settings_so_far(path, tmp_path, monkeypatch):
    class Impatient(Heard):
        def setting_started(self, name: str, *rest: Any) -> None:
            if name == "loader":
                raise Interrupted(signal.SIGINT)

        def benchmark_interrupted(self, ladder: Any) -> None:
            self.started = [one.name for one in ladder.rungs]

    monkeypatch.setattr(job, "events_of", Played())
    heard = Impatient()
    with pytest.raises(Interrupted):
        benchmark(request(path), folder=tmp_path / "out", watcher=heard)
    assert heard.started == ["baseline", "pre-tokenised"]


def test_a_baseline_that_fails_does_not_end_the_benchmark(path, tmp_path, monkeypatch):
    def answer(name: str, plan: Any) -> float | str:
        return "out of memory" if plan.kernels.attention == "eager" else 100.0

    found, events, _ = played(monkeypatch, path, tmp_path / "out", answer)
    by = {setting.name: setting for setting in found.rungs}
    assert by["packing"].status == "failed"
    assert (by["attention"].status, by["attention"].gain) == ("kept", None)
    # Nothing before it could be measured: packing is not to blame, and stays.
    assert events.plans["attention"].data.packing == "best-fit"
    assert by["no checkpointing"].cumulative is None
    assert found.drift is None


def test_only_measures_a_setting_and_the_one_below(path, tmp_path, monkeypatch):
    asked = ("fused loss", "loader")
    found, events, _ = played(monkeypatch, path, tmp_path, lambda *_: 100.0, only=asked)
    assert list(events.plans) == ["pre-tokenised", "loader", "attention", "fused-loss"]
    by = {setting.name: setting for setting in found.rungs}
    assert (by["loader"].below, by["loader"].gain) == ("pre-tokenised", 1.0)
    assert (by["attention"].below, by["fused loss"].below) == (None, "attention")
    assert by["fused loss"].cumulative is None


def test_settings_without_time_are_listed_and_measured_together(path, tmp_path, monkeypatch):
    """Each of the first three settings takes as long as the whole benchmark should."""
    now = [0.0]

    class Slow(Heard):
        def setting_started(self, name: str, *rest: Any) -> None:
            now[0] += BRISK.total_seconds / 3

    monkeypatch.setattr(job, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(job, "events_of", Played())
    heard = Slow()
    found = benchmark(request(path), folder=tmp_path / "out", watcher=heard)
    by = {setting.name: setting for setting in found.rungs}
    assert by["baseline"].status == "kept"
    for name in ("packing", "attention", "fused loss", "batch size", "no checkpointing"):
        assert (by[name].status, by[name].measured) == ("no time", None)
        assert name in by["the rest"].adds
    assert "--minutes N for more" in by["packing"].because
    assert by["compile"].status == "not here"  # on a CPU, however much time there is
    assert found.winner == by["the rest"]
    assert any(note.startswith("the rest: ") for note in found.notes)
    assert "no setting was measured by itself" in heard.forgotten
    assert not (tmp_path / "home" / "measurements.json").exists()


def test_the_best_on_a_machine_that_drifts_is_not_remembered(path, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "events_of", Played({"baseline-again": 50.0}))
    heard = Heard()
    found = benchmark(request(path), folder=tmp_path / "out", watcher=heard)
    assert found.drift == -0.5
    assert heard.forgotten == "the baseline's rate changed by -50% meanwhile"
    assert not (tmp_path / "home" / "measurements.json").exists()


@each(
    "event",
    [
        {"event": "fell_back", "reason": "no memory", "changes": [{"path": "kernels.x"}]},
        {"event": "not_finite", "step": 3},
        {"event": "failed", "error": "no memory"},
    ],
)
def test_a_run_that_becomes_another_setting_is_not_measured(path, tmp_path, monkeypatch, event):
    monkeypatch.setattr(job, "events_of", lambda job, **_: (each for each in [event]))
    made = Benchmark(request(path, only=("baseline",)), Watcher())
    [result] = made.run(tmp_path / "out").rungs
    assert result.status == "failed"
    assert "no memory" in result.because or "not finite" in result.because


@each(("minutes", "seconds", "thorough"), [(None, 600, True), (1.2, 72, False), (30.0, 1800, True)])
def test_a_benchmark_takes_as_long_as_was_asked_for(minutes, seconds, thorough):
    found = pace_of(quick=False, minutes=minutes)
    assert found.total_seconds == pytest.approx(seconds)
    assert (found.timed_seconds == THOROUGH.timed_seconds) is thorough


# --- rows and files -------------------------------------------------------------------------------


def test_a_step_has_the_rows_of_the_manifest_packed_or_not(tmp_path, base, monkeypatch):
    path = write_expert(tmp_path / "expert", base, {"batch_size": 2, "max_seq_length": 128})
    made = Benchmark(request(path), Watcher())
    ground = made.ground
    assert made.examples == round(ground.sequences_per_update * ground.rows_per_sequence)
    assert (made.examples, made.notes) == (2, [])
    assert made._planned(made.values)[1].batch.micro_batch == 2
    plain = Packing(1, 128, None)  # as though no better one had been found
    monkeypatch.setattr("expert.data.pack.packing.best_packing", lambda *_, **__: plain)
    path = write_expert(tmp_path / "other", base, {"batch_size": 2, "max_seq_length": 128})
    made = Benchmark(request(path), Watcher())
    assert made.examples > 2
    assert any("rows, not the 2 of the manifest" in note for note in made.notes)


def test_without_validation_rows_some_are_held_out_with_a_note(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {}, dataset={"validation_split": 0})
    made = Benchmark(request(path), Watcher())
    assert "training.dataset.validation_split=0.1" in made.overrides
    assert made.notes[0].startswith("the manifest has no validation rows: 10% of the rows")


def test_the_result_is_written_as_data_words_and_a_page(path, tmp_path, monkeypatch):
    found, _, _ = played(monkeypatch, path, tmp_path / "out", lambda *_: 100.0)
    files = write_result(found, tmp_path / "result.json")
    assert [file.name for file in files] == ["result.json", "result.md", "result.html"]
    assert read_ladder(files[0]) == found
    assert "| ✓ baseline | 100 |" in files[1].read_text(encoding="utf-8")
    assert "no checkpointing" in files[2].read_text(encoding="utf-8")


def test_a_stream_cannot_be_benchmarked(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {}, dataset={"streaming": True})
    with pytest.raises(CannotBenchmark, match="a stream has no rows"):
        benchmark(request(path), folder=tmp_path / "out")


def test_a_model_that_cannot_be_loaded_is_refused_before_anything_is_measured(tmp_path, base):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not weights")
    path = write_expert(tmp_path / "expert", broken, {})
    with pytest.raises(InvalidModelFolder, match=r"model\.safetensors"):
        benchmark(request(path, only=("pre-tokenised",)), folder=tmp_path / "out")


def test_two_that_start_at_once_have_folders_of_their_own(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {})
    places = {new_folder(request(path)) for _ in range(3)}
    assert len(places) == 3
    assert {place.parent for place in places} == {tmp_path / "expert" / "runs" / "benchmarks"}
