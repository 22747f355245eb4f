"""A benchmark with real processes on a CPU, and what keeps it from starting."""

from __future__ import annotations

import json

import numpy as np
import pytest

from expert.data.feed.order import DataOrder
from expert.data.pack import pack
from expert.insight.ladder.ladder import read_ladder, rows_of_one_length
from expert.jobs.benchmark.benchmark import CannotBenchmark, benchmark, new_folder
from expert.jobs.benchmark.numbers import _clumping
from expert.planning.benchmark_settings import BASELINE, SETTINGS, TOLERANCE_FP32
from expert.planning.models.model_files import InvalidModelFolder
from tests.forked import start_server
from tests.insight.ladders import measured
from tests.jobs.benchmark.fake_processes import BRISK, Heard, be_brisk, request
from tests.jobs.runs import events_of, write_expert
from tests.jobs.trained_runs import CORPUS

NAMES = [setting.name for setting in (BASELINE, *SETTINGS)]


@pytest.fixture(autouse=True)
def brisk(monkeypatch, tmp_path):
    start_server()
    be_brisk(monkeypatch)
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))


@pytest.mark.slow
def test_every_setting_of_an_expert_on_a_cpu(tmp_path, base, monkeypatch):
    # Whether a setting is faster is not for a test: on a busy machine all are kept, nothing is
    # costly, and other processes are no doubt.
    monkeypatch.setattr("expert.insight.ladder.pairs.EQUAL_WITHIN", 1000.0)
    monkeypatch.setattr("expert.jobs.benchmark.result.cost_of", lambda before, after: "")
    monkeypatch.setattr("expert.jobs.benchmark.measure.doubts_of", lambda ladder: [])
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
    assert heard.started == [name for name in NAMES if name not in passed]
    assert {"opening the data", "loading the model", "training"} <= heard.doing
    for setting in found.kept[1:]:
        held = setting.loss_difference if setting.own_difference is None else setting.own_difference
        assert abs(held) <= setting.tolerance, setting.name
    same = [setting for setting in found.kept[1:] if setting.same_rows]
    assert {setting.tolerance for setting in same} == {TOLERANCE_FP32}
    assert by["packing"].same_rows is False
    # Its weights come from other rows: it is judged by its own loss.
    assert [setting.name for setting in found.rungs if setting.own_difference is not None] == [
        "packing"
    ]
    # What is judged is trained, on a busy machine for two steps; the loss of the first step was
    # that of the untrained model.
    run = min((tmp_path / "out" / "runs").glob("baseline-*"))
    first = events_of(run, "step")[0]["loss"]
    assert by["baseline"].measured.loss < 0.99 * first
    # The same rows in the same order: not one bit may differ.
    assert by["pre-tokenised"].measured.loss == by["baseline"].measured.loss
    learnt = {setting.measured.updates_learnt for setting in found.rungs if setting.measured}
    assert len(learnt) == 1
    assert by["pre-tokenised"].changes == {"data.tokenize": ("late", "ahead")}
    assert read_ladder(tmp_path / "out").rungs == found.rungs
    # Settings are real runs, and leave no weights.
    made = sorted((tmp_path / "out" / "runs").iterdir())
    runs = {run.name.partition("-20")[0]: run for run in made}
    assert len(runs) == len(heard.started)
    # The best was compared with the baseline at the end, in a run that only timed it.
    assert found.against_baseline.against == "baseline"
    assert len([run for run in made if run.name.startswith("baseline-")]) > 1
    for name, kind in (("baseline", "late"), ("pre-tokenised", "padded"), ("packing", "packed")):
        assert {event["kind"] for event in events_of(runs[name], "feed")} == {kind}
    for run in runs.values():
        assert events_of(run, "saved", "eval", "finished") == []
        assert not (run / "checkpoints").exists()
        assert not (run / "final").exists()
        assert (run / "plan.json").is_file()


def test_packing_that_sorts_rows_by_length_is_seen(monkeypatch):
    """Planted: rows are laid longest first, and a step is a sequence of rows of one length."""
    lengths, said = np.array([20 + 2 * (number % 3) for number in range(160)]), {}
    for name, fit in (("sorted", pack._fit_longest_first), ("mixed", pack._fit)):
        monkeypatch.setattr(pack, "_fit", fit)
        index = pack.pack_best_fit(lengths, 256, 42)
        seen = _clumping(index, DataOrder(index.bins, 1, 42))
        said[name] = rows_of_one_length(measured(100.0, clumping=seen))
    assert "rows of one length share a step" in said["sorted"]
    assert said["mixed"] == ""


@pytest.mark.slow
def test_the_character_model_can_be_benchmarked_too(tmp_path):
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


def test_a_stream_cannot_be_benchmarked(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {}, dataset={"streaming": True})
    with pytest.raises(
        CannotBenchmark, match="a stream has no rows that every setting could see again"
    ):
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
