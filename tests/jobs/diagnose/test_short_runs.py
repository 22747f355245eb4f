"""Short runs that leave nothing behind, and profiles of them."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import ExpertError
from expert.jobs.diagnose.short_runs import profile, read_run_manifest, time_steps
from expert.manifest.reader import read_manifest
from expert.run.open import open_run
from expert.run.session.short_run import short_run
from tests.jobs.runs import losses_of, run, write_expert


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
