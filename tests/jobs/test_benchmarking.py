"""The ladder climbed for real on a CPU, and how it goes on where a rung does not hold."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expert.core.interrupts import Interrupted
from expert.insight.ladder import Ladder, Measured, RungResult, read_ladder
from expert.jobs import rungs
from expert.jobs.benchmarking import (
    Asked,
    CannotClimb,
    NothingMeasured,
    Watcher,
    benchmark,
    ended_by_sigterm,
    new_folder,
    remember,
    write_result,
)
from expert.jobs.climb_time import ClimbTime
from expert.jobs.climbing import Climb
from expert.jobs.rig import Begun, RungLost, Seen
from expert.jobs.rung_windows import Window
from expert.jobs.rungs import THOROUGH
from expert.manifest.reader import read_manifest
from expert.planning.ladder import BASELINE, RUNGS, TOLERANCE_FP32, Rung
from expert.planning.measurements import read_rates
from expert.planning.sequences import Packing
from tests.insight.ladders import measured
from tests.jobs.rigs import BRISK, be_brisk
from tests.jobs.runs import base_model, events_of, write_expert
from tests.jobs.trained_runs import CORPUS

NAMES = [rung.name for rung in (BASELINE, *RUNGS)]


@pytest.fixture(autouse=True)
def brisk(monkeypatch, tmp_path):
    be_brisk(monkeypatch)
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("models"))


def asked(path: Path, *overrides: str, **more: Any) -> Asked:
    return Asked(
        read=lambda further: read_manifest(path, overrides=(*overrides, *further)),
        command="expert benchmark",
        quick=True,
        **more,
    )


class Heard(Watcher):
    """Keeps what was told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []
        self.doing: set[str] = set()
        self.forgotten = ""
        self.warned: list[str] = []

    def begins(self, rung: Any, number: int, of: int, left: float) -> None:
        self.begun.append(rung.name)

    def crowded(self, words: str) -> None:
        self.warned.append(words)

    def goes_on(self, doing: str, done: int, of: int) -> None:
        self.doing.add(doing)

    def ends(self, result: RungResult) -> None:
        self.done.append(result.name)

    def not_remembered(self, because: str) -> None:
        self.forgotten = because


def test_the_ladder_of_an_expert_on_a_cpu(tmp_path, base, monkeypatch):
    # Whether a rung is faster is not for a test: on a machine that does other things all hold,
    # nothing is costly, and neighbours are no doubt.
    monkeypatch.setattr("expert.insight.pairs.AS_FAST", 1000.0)
    monkeypatch.setattr("expert.jobs.climbing.cost_of", lambda before, after: "")
    monkeypatch.setattr("expert.jobs.climb_result.doubts_of", lambda ladder: [])
    path = write_expert(tmp_path / "expert", base, {"batch_size": 8, "epochs": 1})
    (tmp_path / "home").write_text("a file, not a folder", encoding="utf-8")
    heard = Heard()
    found = benchmark(asked(path), folder=tmp_path / "out", watcher=heard)
    assert "home" in heard.forgotten  # what cannot be remembered is not lost
    by = {rung.name: rung for rung in found.rungs}
    assert list(by) == NAMES == heard.done
    passed = {name: rung.status for name, rung in by.items() if rung.measured is None}
    assert passed == dict.fromkeys(
        ["bf16 + TF32", "fused AdamW", "compile", "CUDA graphs"], "not here"
    ) | {name: "not here" for name in ("batch size",) if name in passed}
    assert heard.begun == [name for name in NAMES if name not in passed]
    # "starting" only where no test has started it before
    assert {"opening the data", "loading the model", "training"} <= heard.doing
    for rung in found.kept[1:]:
        held = rung.loss_difference if rung.own_difference is None else rung.own_difference
        assert rung.tolerance is not None
        assert held is not None
        assert abs(held) <= rung.tolerance, rung.name
    same = [rung for rung in found.kept[1:] if rung.same_rows]
    assert {rung.tolerance for rung in same} == {TOLERANCE_FP32}
    assert by["packing"].same_rows is False
    # Its weights come from other rows: it is held to itself.
    assert [rung.name for rung in found.rungs if rung.own_difference is not None] == ["packing"]
    assert by["baseline"].measured is not None
    assert by["pre-tokenised"].measured is not None
    # What is judged has learnt: the loss of the first update was that of the untrained model.
    run = min((tmp_path / "out" / "runs").glob("baseline-*"))
    first = events_of(run, "step")[0]["loss"]
    assert by["baseline"].measured.loss is not None
    assert by["baseline"].measured.loss < 0.95 * first
    # The same rows in the same order: not one bit may differ.
    assert by["pre-tokenised"].measured.loss == by["baseline"].measured.loss
    learnt = {rung.measured.updates_learnt for rung in found.rungs if rung.measured}
    assert len(learnt) == 1
    assert by["pre-tokenised"].changes == {"data.tokenize": ("late", "ahead")}
    assert read_ladder(tmp_path / "out").rungs == found.rungs
    # Rungs are real runs, and leave no weights.
    made = sorted((tmp_path / "out" / "runs").iterdir())
    runs = {run.name.partition("-20")[0]: run for run in made}
    assert len(runs) == len(heard.begun)
    # What won was held against the baseline at the end, in a run that only timed it.
    assert found.against_baseline is not None
    assert found.against_baseline.against == "baseline"
    assert len([run for run in made if run.name.startswith("baseline-")]) > 1
    for name, kind in (("baseline", "late"), ("pre-tokenised", "padded"), ("packing", "packed")):
        assert {event["kind"] for event in events_of(runs[name], "feed")} == {kind}
    for run in runs.values():
        assert events_of(run, "saved", "eval", "finished") == []
        assert not (run / "checkpoints").exists()
        assert not (run / "final").exists()
        assert (run / "plan.json").is_file()


def test_the_character_model_has_a_ladder_too(tmp_path):
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
    found = benchmark(asked(path, only=named, remember=False), folder=tmp_path / "out")
    by = {rung.name: rung for rung in found.rungs}
    assert by["baseline"].status == "kept"
    assert by["attention"].measured is not None
    assert by["pre-tokenised"].because == "a corpus of characters needs no tokenizer"
    assert by["packing"].because == "a corpus of characters is cut into blocks"
    assert found.examples_per_update == 16
    assert found.held_out_rows == BRISK.held_out  # blocks of the corpus, not its one document
    assert not (tmp_path / "home").exists()


def test_a_stream_cannot_be_climbed_on(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {}, dataset={"streaming": True})
    with pytest.raises(CannotClimb, match="a stream has no rows that every rung could see again"):
        benchmark(asked(path), folder=tmp_path / "out")


def test_an_unknown_rung_is_refused_with_those_there_are(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {})
    with pytest.raises(CannotClimb, match=r"--only rocket: .*rungs: baseline, pre-tokenised"):
        benchmark(asked(path, only=("rocket",)), folder=tmp_path / "out")


def test_a_model_that_cannot_be_loaded_fails_every_rung_and_the_first_says_why(tmp_path, base):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not weights")
    path = write_expert(tmp_path / "expert", broken, {})
    with pytest.raises(NothingMeasured, match="no rung could be measured: "):
        benchmark(asked(path, only=("pre-tokenised",)), folder=tmp_path / "out")


def test_two_that_begin_at_once_have_folders_of_their_own(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {})
    places = {new_folder(asked(path)) for _ in range(3)}
    assert len(places) == 3
    assert {place.parent for place in places} == {tmp_path / "expert" / "runs" / "benchmarks"}


def test_sigterm_leaves_as_ctrl_c_does_and_is_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, ended_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("before", [signal.SIG_IGN, lambda *_: None])
def test_sigterm_that_is_ignored_or_heard_by_somebody_stays_so(before):
    mine = signal.signal(signal.SIGTERM, before)
    try:
        with ended_by_sigterm():
            assert signal.getsignal(signal.SIGTERM) is before
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, mine)


def test_sigterm_that_is_heard_outside_of_python_stays_so(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("it cannot be put back"))
    with ended_by_sigterm():
        pass


def test_a_second_sigterm_ends_the_process_however_long_tidying_up_takes():
    def tidied_up() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    with pytest.raises(SystemExit), ended_by_sigterm():
        tidied_up()


# --- what holds, decided on rates that are made up -----------------------------------------------


Answer = Callable[[str, dict[str, Any]], Measured | str]
"""What is measured of a rung, or why nothing is."""


class PlayedSeat:
    """Answers with what a function of the plan says, at once."""

    environment: dict[str, Any] = {}

    def __init__(self, rig: PlayedRig) -> None:
        self.rig = rig
        self.name = ""
        self.measured: Measured | None = None
        self.begun = Begun(seconds_per_update=0.1, updates_learnt=10, cores=2, threads=2)

    @property
    def taken(self) -> bool:
        return self.measured is not None

    def begin(self, work: rungs.Work, tell: Any) -> Begun:
        assert not self.taken
        self.rig.begun.append((work.name, work.only_rate, work.threads))
        if not work.only_rate:
            self.rig.plans[work.name] = work.plan
            self.rig.answers[work.name] = self.rig.answer(work.name, work.plan)
        found = self.rig.answers[work.name]
        if isinstance(found, str):
            raise RungLost(found)
        if work.own_way and found.own_loss is None:
            found = found.model_copy(update={"own_loss": found.loss})
        self.name, self.measured = work.name, found
        return self.begun

    def window(self, updates: int, skip: int, tell: Any) -> Window:
        assert self.measured is not None
        self.rig.windows.append(self.name)
        return Window(
            first=10,
            updates=1,
            tokens=round(1000 * self.measured.tokens_per_second),
            examples=1,
            seconds=1000.0 * self.rig.speed(self.name),
            others=0.0,
        )

    def seen(self, tell: Any, *, stays: bool) -> Seen:
        assert self.measured is not None
        measured, self.measured = self.measured, self.measured if stays else None
        return Seen(measured=measured)

    def leave(self) -> None:
        self.measured = None


class PlayedRig:
    """Two played seats, and what they were asked for."""

    environment: dict[str, Any] = {}

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.answers: dict[str, Measured | str] = {}
        self.plans: dict[str, dict[str, Any]] = {}
        self.begun: list[tuple[str, bool, int | None]] = []
        self.windows: list[str] = []
        self.seats = (PlayedSeat(self), PlayedSeat(self))
        self.speed: Callable[[str], float] = lambda name: 1.0
        """Times as long as it should take."""

    def free_seat(self) -> PlayedSeat:
        return next(seat for seat in self.seats if not seat.taken)


def climbed(
    path: Path,
    place: Path,
    answer: Answer,
    *,
    speed: Callable[[str], float] | None = None,
    watcher: Watcher | None = None,
    **more: Any,
) -> tuple[Ladder, PlayedRig, Climb]:
    climb = Climb(asked(path, **more), watcher or Watcher())
    rig = PlayedRig(answer)
    rig.speed = speed or rig.speed
    place.mkdir(parents=True)
    found = climb.run(rig, place)  # type: ignore[arg-type]
    assert not any(seat.taken for seat in rig.seats)
    return found, rig, climb


def rising() -> Callable[[str], float]:
    """100, 200, 300, … for one rung after the other."""
    seen: list[str] = []

    def rate(name: str) -> float:
        seen.append(name)
        return 100.0 * len(seen)

    return rate


def test_rungs_that_fail_are_slower_or_disagree_are_left_out_of_those_above(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})
    rate = rising()

    def answer(name: str, plan: dict[str, Any]) -> Measured | str:
        if name == "loader":
            return "out of memory"
        if name == "attention":
            return measured(1.0)
        if name == "fused-loss":
            return measured(10_000.0, loss=3.0)
        return measured(rate(name))

    found, rig, _ = climbed(path, tmp_path / "out", answer)
    by = {rung.name: rung for rung in found.rungs}
    assert (by["loader"].status, by["loader"].because) == ("failed", "out of memory")
    assert by["attention"].status == "slower"
    assert by["fused loss"].status == "disagrees"
    top = rig.plans["no-checkpointing"]
    assert top["loader"]["workers"] == 0
    assert top["kernels"]["attention"] == "eager"
    assert top["kernels"]["fused_loss"] is False
    assert top["kernels"]["checkpointing"] == "none"
    assert by["packing"].below == "pre-tokenised"
    assert by["batch size"].below == "packing"
    assert by["batch size"].gain == pytest.approx(4 / 3)
    # Directly against the baseline, however the gains in between came about.
    assert by["no checkpointing"].cumulative == pytest.approx(5.0)
    assert found.against_baseline is not None
    assert (found.against_baseline.against, found.against_baseline.how) == ("baseline", "in turns")
    assert rig.begun[-1][:2] == ("baseline", True)


def test_a_rung_with_other_rows_is_held_to_itself(tmp_path, base):
    """However far its weights are from those below, they must have one loss in both ways."""
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})

    def climb(own_loss: float, place: str) -> RungResult:
        rate = rising()

        def answer(name: str, plan: dict[str, Any]) -> Measured | str:
            if name == "packing":
                return measured(rate(name), loss=3.0, own_loss=own_loss)
            return measured(rate(name))

        found, _, _ = climbed(path, tmp_path / place, answer, only=("packing",))
        return next(rung for rung in found.rungs if rung.name == "packing")

    right, wrong = climb(3.0, "right"), climb(3.1, "wrong")
    assert (right.status, right.loss_difference, right.own_difference) == ("kept", 0.5, 0.0)
    assert wrong.status == "disagrees"
    assert "when it is computed in this way" in wrong.because


def test_an_end_that_is_asked_for_waits_for_no_window(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})

    class Impatient(Watcher):
        def ends(self, result: RungResult) -> None:
            raise Interrupted(signal.SIGINT)

    climb, rig = Climb(asked(path), Impatient()), PlayedRig(lambda name, plan: measured(1.0))
    with pytest.raises(Interrupted):
        climb.run(rig, tmp_path)
    assert any(seat.taken for seat in rig.seats)  # their processes are ended, not asked to leave
    assert climb.so_far is None  # it was stopped before the first rung was written down


def test_what_was_measured_is_at_hand_after_every_rung(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})
    kept: list[list[str]] = []

    class Curious(Watcher):
        def begins(self, rung: Rung, number: int, of: int, left: float) -> None:
            seen = climb.so_far
            kept.append([one.name for one in seen.rungs if one.measured] if seen else [])

    climb, rig = Climb(asked(path), Curious()), PlayedRig(lambda name, plan: measured(1.0))
    climb.run(rig, tmp_path)
    assert kept[:2] == [[], ["baseline"]]
    assert len(kept[-1]) == len(kept) - 1


def test_a_baseline_that_fails_does_not_end_the_climb(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {})
    rate = rising()

    def answer(name: str, plan: dict[str, Any]) -> Measured | str:
        if plan["kernels"]["attention"] == "eager":
            return "out of memory"
        return measured(rate(name))

    found, rig, _ = climbed(path, tmp_path / "out", answer)
    by = {rung.name: rung for rung in found.rungs}
    assert by["packing"].status == "failed"
    assert (by["attention"].status, by["attention"].gain) == ("kept", None)
    # Nothing below could be measured: packing is not to blame, and stays.
    assert rig.plans["attention"]["data"]["packing"] == "best-fit"
    assert by["no checkpointing"].cumulative is None


def test_only_measures_a_rung_and_the_one_below(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {})
    found, rig, _ = climbed(
        path,
        tmp_path / "out",
        lambda name, plan: measured(100.0),
        only=("fused loss", "loader"),
    )
    assert list(rig.plans) == ["pre-tokenised", "loader", "attention", "fused-loss"]
    by = {rung.name: rung for rung in found.rungs}
    assert (by["loader"].below, by["loader"].gain) == ("pre-tokenised", 1.0)
    assert (by["attention"].below, by["fused loss"].below) == (None, "attention")
    assert by["fused loss"].cumulative is None


def test_the_winner_is_remembered_with_what_was_tried_and_no_more(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {})
    rate = rising()
    found, _, climb = climbed(path, tmp_path / "out", lambda name, plan: measured(rate(name)))
    remember(climb, found)
    [kept] = read_rates(tmp_path / "home" / "measurements.json")
    assert kept.settings == {
        "kernels.attention": "sdpa",
        "kernels.checkpointing": "none",
        "batch.micro_batch": 4,
    }
    assert kept.gains.keys() == kept.settings.keys()
    assert found.winner is not None
    assert found.winner.measured is not None
    assert kept.tokens_per_second == found.winner.measured.tokens_per_second
    again = Climb(asked(path), Watcher())
    assert all(decision.source != "measurement" for decision in again.top.decisions)


def test_a_machine_that_slows_down_throws_out_nothing(tmp_path, base):
    """Each window takes longer than the one before; side by side every rung is as fast."""
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})
    passed: list[str] = []

    def slower_and_slower(name: str) -> float:
        passed.append(name)
        return 1.01 ** len(passed)

    found, rig, _ = climbed(
        path, tmp_path / "out", lambda name, plan: measured(100.0), speed=slower_and_slower
    )
    seen = [rung.status for rung in found.rungs[1:] if rung.measured]
    assert seen
    assert set(seen) == {"no difference"}
    assert 1.01 ** len(passed) > 1.3
    # Alone, then in turns with the one below.
    assert rig.windows[:6] == ["baseline"] * 2 + [
        *("baseline", "pre-tokenised"),
        *("pre-tokenised", "baseline"),
    ]


def test_where_memory_holds_not_both_a_doubt_has_the_one_below_timed_again(
    tmp_path, base, monkeypatch
):
    monkeypatch.setattr("expert.jobs.holding.fit_together", lambda *plans: len(plans) == 1)
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})

    def answer(name: str, plan: dict[str, Any]) -> Measured | str:
        return measured({"baseline": 100.0, "pre-tokenised": 150.0}.get(name, 75.0))

    found, rig, _ = climbed(path, tmp_path / "out", answer)
    by = {rung.name: rung for rung in found.rungs}
    assert {rung.paired.how for rung in found.rungs if rung.paired} == {"one after the other"}
    # Clearly faster is believed; slower than minutes ago is not, before the other was timed again.
    assert [begun[:2] for begun in rig.begun[:4]] == [
        ("baseline", False),
        ("pre-tokenised", False),
        ("loader", False),
        ("pre-tokenised", True),
    ]
    assert (by["pre-tokenised"].status, by["loader"].status) == ("kept", "slower")
    assert by["loader"].because.endswith("as fast as 'pre-tokenised', the last that stays")


def test_rungs_for_which_there_is_no_time_are_named_and_what_won_is_a_product(
    tmp_path, base, monkeypatch
):
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})
    rate = rising()
    up = iter([False] * 4)
    monkeypatch.setattr(ClimbTime, "is_up", property(lambda time: next(up, True)))
    found, _, _ = climbed(path, tmp_path / "out", lambda name, plan: measured(rate(name)))
    by = {rung.name: rung for rung in found.rungs}
    assert by["packing"].status == "kept"
    assert (by["attention"].status, by["attention"].measured) == ("no time", None)
    assert "without --quick there is more time" in by["attention"].because
    assert found.against_baseline is None
    assert found.winner is not None
    assert found.winner.cumulative == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("more", "seconds", "thorough"),
    [({}, 600, True), ({"minutes": 1.2}, 72, False), ({"minutes": 30.0}, 1800, True)],
)
def test_a_climb_takes_as_long_as_was_asked_for(tmp_path, base, more, seconds, thorough):
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})
    climb = Climb(replace(asked(path), quick=False, **more), Watcher())
    assert climb.time.total == pytest.approx(seconds)
    assert (climb.pace.window_seconds == THOROUGH.window_seconds) is thorough


def test_a_first_rung_on_crowded_cores_is_measured_again_with_fewer_threads(
    tmp_path, base, monkeypatch
):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})
    rate, heard = rising(), Heard()

    def answer(name: str, plan: dict[str, Any]) -> Measured | str:
        return measured(rate(name), others=1.1, cores=2, threads=2)

    found, rig, _ = climbed(path, tmp_path / "out", answer, watcher=heard, only=("loader",))
    assert [(name, threads) for name, _, threads in rig.begun] == [
        ("pre-tokenised", None),
        ("pre-tokenised", 1),
        ("loader", 1),
    ]
    assert heard.warned == [
        "other processes use so much of the 2 cores that 2 threads had to do"  # as was played
    ]
    assert found.doubts == heard.warned


def test_what_won_on_a_busy_machine_is_not_remembered_and_it_is_said_why(
    tmp_path, base, monkeypatch
):
    path = write_expert(tmp_path / "expert", base, {"max_seq_length": 64})
    rate, heard = rising(), Heard()
    rig = PlayedRig(lambda name, plan: measured(rate(name), others=1.4, cores=2, threads=1))
    monkeypatch.setattr("expert.jobs.rig.Rig", lambda **_: nullcontext(rig))
    found = benchmark(asked(path), folder=tmp_path / "out", watcher=heard)
    assert heard.forgotten == "other processes used 1.4 of 2 cores meanwhile"
    assert found.doubts == [heard.forgotten]
    assert not (tmp_path / "home" / "measurements.json").exists()


def test_an_update_has_the_rows_of_the_manifest_packed_or_not(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {"batch_size": 2, "max_seq_length": 128})
    climb = Climb(asked(path), Watcher())
    ground = climb.footing.ground
    assert climb.footing.examples == round(ground.sequences_per_update * ground.rows_per_sequence)
    assert (climb.footing.examples, climb.footing.notes) == (2, ())
    assert climb._planned(climb.standing.values)[1].batch.micro_batch == 2


def test_an_update_that_packs_to_other_rows_is_told(tmp_path, base, monkeypatch):
    plain = Packing(1, 128, None)  # as though no better one had been found
    monkeypatch.setattr("expert.jobs.packing.tried_packing", lambda *_, **__: plain)
    path = write_expert(tmp_path / "expert", base, {"batch_size": 2, "max_seq_length": 128})
    climb = Climb(asked(path), Watcher())
    assert climb.footing.examples > 2
    assert any("rows and not the 2 of the manifest" in note for note in climb.footing.notes)


def test_without_held_out_rows_some_are_held_out_and_it_is_said(tmp_path, base):
    dataset = {"validation_split": 0}
    path = write_expert(tmp_path / "expert", base, {}, dataset=dataset)
    climb = Climb(asked(path), Watcher())
    assert "training.dataset.validation_split=0.1" in climb.footing.overrides
    assert climb.footing.notes[0].startswith("the manifest holds no rows out: 10% were")


def test_the_result_is_written_as_data_words_and_a_page(tmp_path, base):
    path = write_expert(tmp_path / "expert", base, {})
    found, _, _ = climbed(path, tmp_path / "out", lambda name, plan: measured(100.0))
    files = write_result(found, tmp_path / "result.json")
    assert [file.name for file in files] == ["result.json", "result.md", "result.html"]
    assert read_ladder(files[0]) == found
    assert "| ✓ baseline | 100 |" in files[1].read_text(encoding="utf-8")
    page = files[2].read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") or page.lower().startswith("<!doctype html>")
    assert "no checkpointing" in page
