"""Which settings are kept, decided on rates that are made up."""

from __future__ import annotations

import signal
from itertools import count
from typing import Any

import pytest

from expert.core.interrupts import Interrupted
from expert.insight.ladder.ladder import Measured, SettingResult, read_ladder
from expert.jobs.benchmark.benchmark import Watcher, benchmark, remember, write_result
from expert.jobs.benchmark.measure import Benchmark
from expert.jobs.benchmark.pace import THOROUGH, Clock, pace_of
from expert.planning.benchmark_settings import BASELINE, SETTINGS, Setting
from expert.planning.choose.sequences import Packing
from expert.planning.measurements import read_rates
from tests.each import each
from tests.insight.ladders import measured
from tests.jobs.benchmark.fake_processes import Heard, Played, be_brisk, benchmarked, request
from tests.jobs.runs import write_expert

NAMES = [setting.name for setting in (BASELINE, *SETTINGS)]


@pytest.fixture(autouse=True)
def brisk(monkeypatch, tmp_path):
    be_brisk(monkeypatch)
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))


@pytest.fixture
def path(tmp_path, base):
    return write_expert(tmp_path / "expert", base, {"max_seq_length": 64})


def test_settings_that_fail_are_slower_or_disagree_are_left_out_of_later_ones(path, tmp_path):
    given = {"loader": "out of memory", "attention": measured(1.0)}
    given["fused-loss"] = measured(10_000.0, loss=3.0)
    found, played, _ = benchmarked(path, tmp_path / "out", given)
    by = {setting.name: setting for setting in found.rungs}
    assert (by["loader"].status, by["loader"].because) == ("failed", "out of memory")
    assert by["attention"].status == "slower"
    assert by["fused loss"].status == "disagrees"
    full_plan = played.plans["no-checkpointing"]
    assert full_plan.loader.workers == 0
    assert full_plan.kernels.attention == "eager"
    assert full_plan.kernels.fused_loss is False
    assert full_plan.kernels.checkpointing == "none"
    assert by["packing"].below == "pre-tokenised"
    assert by["batch size"].below == "packing"
    assert by["batch size"].gain == pytest.approx(4 / 3)
    # Directly against the baseline, however the gains in between came about.
    assert by["no checkpointing"].cumulative == pytest.approx(5.0)
    assert (found.against_baseline.against, found.against_baseline.how) == ("baseline", "in turns")
    assert played.started[-1][:2] == ("baseline", True)


def test_a_setting_with_other_rows_is_judged_by_its_own_loss(path, tmp_path):
    """However far its weights are from those below, they must have one loss in both ways."""

    def climb(own_loss: float, place: str) -> SettingResult:
        given = {"packing": measured(200.0, loss=3.0, own_loss=own_loss)}
        found, _, _ = benchmarked(path, tmp_path / place, given, only=("packing",))
        return next(setting for setting in found.rungs if setting.name == "packing")

    right, wrong = climb(3.0, "right"), climb(3.1, "wrong")
    assert (right.status, right.loss_difference, right.own_difference) == ("kept", 0.5, 0.0)
    assert wrong.status == "disagrees"
    assert "when it is computed in this way" in wrong.because


def test_an_interrupted_benchmark_ends_its_processes(path, tmp_path):

    class Impatient(Watcher):
        def setting_progress(self, doing: str, done: int, of: int) -> None:
            if doing == "timing":
                raise Interrupted(signal.SIGINT)

    made, played = Benchmark(request(path), Impatient()), Played(lambda name, plan: measured(1.0))
    with pytest.raises(Interrupted):
        made.run(tmp_path, played)
    assert played.live == []
    assert made.partial_result is None  # it was stopped before the first setting was written down


def test_results_so_far_are_available_after_every_setting(path, tmp_path):
    kept: list[list[str]] = []

    class Curious(Watcher):
        def setting_started(self, setting: Setting, number: int, of: int, left: float) -> None:
            seen = made.partial_result
            kept.append([one.name for one in seen.rungs if one.measured] if seen else [])

    made, played = Benchmark(request(path), Curious()), Played(lambda name, plan: measured(1.0))
    made.run(tmp_path, played)
    assert kept[:2] == [[], ["baseline"]]
    assert len(kept[-1]) == len(kept) - 1


def test_a_baseline_that_fails_does_not_end_the_benchmark(path, tmp_path):
    rates = count(100, 100)

    def answer(name: str, plan: Any) -> Measured | str:
        eager = plan.kernels.attention == "eager"
        return "out of memory" if eager else measured(float(next(rates)))

    found, played, _ = benchmarked(path, tmp_path / "out", answer)
    by = {setting.name: setting for setting in found.rungs}
    assert by["packing"].status == "failed"
    assert (by["attention"].status, by["attention"].gain) == ("kept", None)
    # Nothing before it could be measured: packing is not to blame, and stays.
    assert played.plans["attention"].data.packing == "best-fit"
    assert by["no checkpointing"].cumulative is None


def test_only_measures_a_setting_and_the_one_below(path, tmp_path):
    found, played, _ = benchmarked(
        path,
        tmp_path / "out",
        lambda name, plan: measured(100.0),
        only=("fused loss", "loader"),
    )
    assert list(played.plans) == ["pre-tokenised", "loader", "attention", "fused-loss"]
    by = {setting.name: setting for setting in found.rungs}
    assert (by["loader"].below, by["loader"].gain) == ("pre-tokenised", 1.0)
    assert (by["attention"].below, by["fused loss"].below) == (None, "attention")
    assert by["fused loss"].cumulative is None


def test_the_best_is_remembered_with_what_was_measured_and_no_more(path, tmp_path):
    found, _, made = benchmarked(path, tmp_path / "out")
    remember(made, found)
    [kept] = read_rates(tmp_path / "home" / "measurements.json")
    assert kept.settings == {
        "kernels.attention": "sdpa",
        "kernels.checkpointing": "none",
        "batch.micro_batch": 4,
    }
    assert kept.gains.keys() == kept.settings.keys()
    assert kept.tokens_per_second == found.winner.measured.tokens_per_second
    again = Benchmark(request(path), Watcher())
    assert all(decision.source != "measurement" for decision in again.full_plan.decisions)


def test_a_machine_that_slows_down_rejects_nothing(path, tmp_path):
    """Each window takes longer than the one before; in turns every setting is as fast."""
    passed: list[str] = []

    def slower_and_slower(name: str) -> float:
        passed.append(name)
        return 1.01 ** len(passed)

    found, played, made = benchmarked(
        path, tmp_path / "out", lambda name, plan: measured(100.0), slowness=slower_and_slower
    )
    seen = [setting for setting in found.rungs[1:] if setting.measured]
    assert {setting.status for setting in seen} == {"no difference"}
    # What no difference was measured of counts for nothing, however its pairs fell.
    assert any(setting.gain != 1.0 for setting in seen)
    assert {setting.cumulative for setting in seen[:-1]} == {1.0}
    assert made.kept_settings.gains == {}
    assert 1.01 ** len(passed) > 1.3
    # Alone, then in turns with the one below.
    assert played.windows[:6] == ["baseline"] * 2 + [
        *("baseline", "pre-tokenised"),
        *("pre-tokenised", "baseline"),
    ]


def test_where_memory_does_not_hold_both_a_doubt_times_the_other_again(path, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "expert.jobs.benchmark.compare.fit_together", lambda *plans: len(plans) == 1
    )

    def answer(name: str, plan: Any) -> Measured | str:
        return measured({"baseline": 100.0, "pre-tokenised": 150.0}.get(name, 75.0))

    found, played, _ = benchmarked(path, tmp_path / "out", answer)
    by = {setting.name: setting for setting in found.rungs}
    assert {setting.paired.how for setting in found.rungs if setting.paired} == {
        "one after the other"
    }
    # Clearly faster is believed; slower than minutes ago is not, before the other was timed again.
    assert [begun[:2] for begun in played.started[:4]] == [
        ("baseline", False),
        ("pre-tokenised", False),
        ("loader", False),
        ("pre-tokenised", True),
    ]
    assert (by["pre-tokenised"].status, by["loader"].status) == ("kept", "slower")
    assert by["loader"].because.endswith("as fast as 'pre-tokenised', the last kept setting")


def time_for(settings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are measured one by one."""
    up = iter([False] * settings)
    monkeypatch.setattr(Clock, "is_used_up", lambda clock, to_come=0: next(up, True))


def test_a_short_benchmark_keeps_what_a_long_one_settled(path, tmp_path, monkeypatch):
    kept, rates = [], count(100, 100)
    for name in ("long", "short"):
        found, _, made = benchmarked(path, tmp_path / name, lambda *_: measured(float(next(rates))))
        remember(made, found)
        kept += read_rates(tmp_path / "home" / "measurements.json")
        time_for(2, monkeypatch)
    long, short = kept
    assert short.tokens_per_second > long.tokens_per_second
    assert short.settings == long.settings != {}
    assert short.gains == long.gains


def test_the_last_setting_and_those_that_are_named_are_measured_however_late_it_is(
    path, tmp_path, monkeypatch
):
    monkeypatch.setattr(Clock, "is_used_up", lambda clock, to_come=0: to_come == 0)
    found, _, _ = benchmarked(path, tmp_path / "out")
    by = {setting.name: setting for setting in found.rungs}
    assert by["no checkpointing"].status == "kept"
    assert "the rest" not in by
    time_for(0, monkeypatch)
    found, played, _ = benchmarked(
        path, tmp_path / "two", lambda name, plan: measured(100.0), only=("loader", "attention")
    )
    assert list(played.plans) == ["pre-tokenised", "loader", "packing", "attention"]
    assert all(setting.measured for setting in found.rungs)


def test_settings_without_time_are_listed_and_measured_together(path, tmp_path, monkeypatch):
    time_for(3, monkeypatch)
    found, played, _ = benchmarked(path, tmp_path / "out")
    by = {setting.name: setting for setting in found.rungs}
    assert by["loader"].status == "kept"
    for name in ("packing", "attention", "fused loss", "batch size", "no checkpointing"):
        assert (by[name].status, by[name].measured) == ("no time", None)
        assert name in by["the rest"].adds
    assert "without --quick there is more time" in by["packing"].because
    assert by["compile"].status == "not here"  # on a CPU, however much time there is
    rest = by["the rest"]
    assert (rest.status, rest.below) == ("kept", "loader")
    full_plan = played.plans["the-rest"]
    assert full_plan.kernels.checkpointing == "none"
    assert full_plan.data.packing == "best-fit"
    assert found.winner == rest
    assert found.against_baseline is not None
    assert rest.cumulative == pytest.approx(4.0)
    assert any(note.startswith("the rest: packing, ") for note in found.notes)


def test_a_benchmark_without_single_settings_is_not_remembered(path, tmp_path, monkeypatch):
    heard = Heard()
    time_for(1, monkeypatch)
    monkeypatch.setattr("expert.jobs.benchmark.benchmark.SettingProcess", Played())
    found = benchmark(request(path), folder=tmp_path / "out", watcher=heard)
    assert found.winner.name == "the rest"
    assert "no setting was measured by itself" in heard.forgotten
    assert not (tmp_path / "home" / "measurements.json").exists()


def test_a_rest_that_fails_leaves_the_best_as_it_was(path, tmp_path, monkeypatch):
    time_for(2, monkeypatch)
    found, _, _ = benchmarked(path, tmp_path / "out", {"the-rest": "out of memory"})
    by = {setting.name: setting for setting in found.rungs}
    assert (by["the rest"].status, by["the rest"].because) == ("failed", "out of memory")
    assert found.winner.name == "pre-tokenised"


@each(("minutes", "seconds", "thorough"), [(None, 600, True), (1.2, 72, False), (30.0, 1800, True)])
def test_a_benchmark_takes_as_long_as_was_asked_for(minutes, seconds, thorough):
    found = pace_of(quick=False, minutes=minutes)
    assert found.total_seconds == pytest.approx(seconds)
    assert (found.window_seconds == THOROUGH.window_seconds) is thorough


def test_a_first_setting_on_crowded_cores_is_measured_again_with_fewer_threads(
    path, tmp_path, monkeypatch
):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    heard, busy = Heard(), {"others": 1.1, "cores": 2, "threads": 2}
    given = {"pre-tokenised": measured(100.0, **busy), "loader": measured(200.0, **busy)}
    found, played, _ = benchmarked(path, tmp_path / "out", given, watcher=heard, only=("loader",))
    assert [(name, threads) for name, _, threads in played.started] == [
        ("pre-tokenised", None),
        ("pre-tokenised", 1),
        ("loader", 1),
    ]
    assert heard.warned == [
        "other processes use so much of the 2 cores that only 2 threads could run"  # as was played
    ]
    assert found.doubts == heard.warned


def test_the_best_on_a_busy_machine_is_not_remembered(path, tmp_path, monkeypatch):
    heard, played = Heard(), Played(others=1.4, cores=2, threads=1)
    monkeypatch.setattr("expert.jobs.benchmark.benchmark.SettingProcess", played)
    found = benchmark(request(path), folder=tmp_path / "out", watcher=heard)
    assert heard.forgotten == "other processes used 1.4 of 2 cores meanwhile"
    assert found.doubts == [heard.forgotten]
    assert not (tmp_path / "home" / "measurements.json").exists()


def test_a_step_has_the_rows_of_the_manifest_packed_or_not(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {"batch_size": 2, "max_seq_length": 128})
    made = Benchmark(request(path), Watcher())
    ground = made.rows.ground
    assert made.rows.examples == round(ground.sequences_per_update * ground.rows_per_sequence)
    assert (made.rows.examples, made.rows.notes) == (2, ())
    assert made._planned(made.kept_settings.values)[1].batch.micro_batch == 2


def test_a_step_that_packs_to_other_rows_is_noted(tmp_path, base, monkeypatch):
    plain = Packing(1, 128, None)  # as though no better one had been found
    monkeypatch.setattr("expert.data.pack.packing.best_packing", lambda *_, **__: plain)
    path = write_expert(tmp_path / "expert", base, {"batch_size": 2, "max_seq_length": 128})
    made = Benchmark(request(path), Watcher())
    assert made.rows.examples > 2
    assert any("rows, not the 2 of the manifest" in note for note in made.rows.notes)


def test_without_validation_rows_some_are_held_out_with_a_note(tmp_path, base):
    dataset = {"validation_split": 0}
    path = write_expert(tmp_path / "expert", base, {}, dataset=dataset)
    made = Benchmark(request(path), Watcher())
    assert "training.dataset.validation_split=0.1" in made.rows.overrides
    assert made.rows.notes[0].startswith("the manifest has no validation rows: 10% of the rows")


def test_the_result_is_written_as_data_words_and_a_page(path, tmp_path):
    found, _, _ = benchmarked(path, tmp_path / "out", lambda name, plan: measured(100.0))
    files = write_result(found, tmp_path / "result.json")
    assert [file.name for file in files] == ["result.json", "result.md", "result.html"]
    assert read_ladder(files[0]) == found
    assert "| ✓ baseline | 100 |" in files[1].read_text(encoding="utf-8")
    page = files[2].read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") or page.lower().startswith("<!doctype html>")
    assert "no checkpointing" in page
