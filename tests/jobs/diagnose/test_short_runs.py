"""Short runs that leave nothing behind: profiles of them, and fixes tried in them."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from expert.insight.findings.finding import Finding
from expert.jobs.diagnose.short_runs import (
    NothingToTry,
    TriedFix,
    first_fix,
    profile,
    read_run_manifest,
    time_steps,
    try_fix,
)
from expert.manifest.reader import read_manifest
from expert.run.open import open_run
from expert.run.session.short_run import short_run
from tests.each import each
from tests.insight.ladders import measured
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


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
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


# --- trying a fix --------------------------------------------------------------------------------


def finding(name: str, severity: Any, overrides: tuple[str, ...], gain: float | None = None):
    return Finding(
        name=name, severity=severity, title=name, evidence="e", overrides=overrides, gain=gain
    )


def test_the_first_fix_is_the_worst_finding_fixed_by_a_manifest_key():
    found = [
        finding("note", "note", ("a=1",)),
        finding("small", "warning", ("b=1",), 1.1),
        finding("large", "warning", ("c=1",), 3.0),
        finding("by hand", "error", ()),
        finding("saves-only-at-the-end", "warning", ("d=1",), 9.0),
    ]
    assert first_fix(found).name == "large"
    with pytest.raises(NothingToTry, match="no finding is fixed by a key"):
        first_fix([finding("note", "note", ("a=1",)), finding("by hand", "error", ())])


def test_a_fix_is_measured_before_and_after_on_the_same_rows(tmp_path, base):
    manifest = write_expert(tmp_path, base, {"gradient_checkpointing": True, "dropout": 0.0})
    keys = ("training.config.gradient_checkpointing=none",)
    found = try_fix(
        lambda more: read_manifest(manifest, overrides=more),
        name="needless-recomputing",
        title="recomputed",
        overrides=keys,
        updates=2,
    )
    assert (found.before.updates_measured, found.after.updates_measured) == (2, 2)
    assert found.before.examples_per_update == found.after.examples_per_update
    # The same arithmetic: recomputing changes no bit of a float32 loss.
    assert found.before.loss == found.after.loss
    assert found.gain > 0
    assert found.as_dict()["overrides"] == keys


def test_the_manifest_of_a_run_is_read_again_with_its_own_data(tmp_path, base):
    done = run(write_expert(tmp_path / "expert", base, {"max_steps": 1}))
    again = read_run_manifest(done.folder, ("training.config.batch_size=4",))
    assert again.folder == tmp_path / "expert"
    assert again.manifest.training.config.batch_size == 4
    assert short_run(open_run(again), updates=1).updates == 1
    with pytest.raises(NothingToTry, match=r"has no manifest\.json"):
        read_run_manifest(tmp_path)


def test_slow_steps_are_timed_for_a_limited_time(tmp_path, base, monkeypatch):
    monkeypatch.setattr("expert.jobs.diagnose.short_runs.TIMED_SECONDS", 0.0)
    found = time_steps(read_manifest(write_expert(tmp_path, base, {})))
    assert found.updates_measured == 1  # of two, the first warmed up
    assert found.seconds_per_update > 0


@each(("rate", "spread", "certain"), [(120.0, 30.0, False), (150.0, 10.0, True)])
def test_a_gain_within_the_spread_is_not_certain(rate, spread, certain):
    names = {"name": "n", "title": "t", "overrides": ("a=1",), "device": "d"}
    after = measured(rate, spread=spread)
    tried = TriedFix(**names, before=measured(100.0, spread=5.0), after=after)
    assert tried.certain is certain
    assert tried.as_dict()["gain"] == rate / 100
