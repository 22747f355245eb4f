"""Signals at random moments of every phase of a run: the exit code, and an equal end."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from expert.core.publish import damage
from expert.core.rundir import RunFolder, runs_in
from tests.faults.counting import cases
from tests.jobs.runs import events_of, losses_of, weights_of
from tests.jobs.trainer import PHASES, begun, ended
from tests.run.test_training_signals import assert_equal_in_the_end, own, whole  # noqa: F401 - fixtures

CALLS = {"step": 12, "evaluation": 4, "saving": 6}
"""How often a phase begins in an undisturbed run, where that is more than once."""


class Runs:
    """Commands that train the same manifest, each in a folder of its own."""

    def __init__(self, whole: tuple[Path, Path], folder: Path) -> None:  # noqa: F811
        self.whole, self.folder = whole, folder
        self.output = folder / "output.txt"

    def interrupted(self, number: int, chance: random.Random, *, twice: bool = False) -> None:
        """One run with a signal; then again until it has finished, equal to the undisturbed."""
        phase = chance.choice(list(PHASES))
        told = {
            "phase": phase,
            "call": chance.randint(1, CALLS.get(phase, 1)),
            "number": number,
            "delays": [chance.uniform(0.0, 0.05) for _ in range(1 + twice)],
        }
        manifest = own(self.whole, self.folder)
        if phase == "preparing":
            shutil.rmtree(manifest.parent / "datasets_optimized")
        code = self.train(manifest, told)
        text = self.output.read_text()
        allowed = (0, 128 + number) if number != signal.SIGUSR1 else (0,)
        assert code in allowed, f"{told}: exit code {code}: {text[-2000:]}"
        assert "Traceback" not in text, f"{told}: {text[-3000:]}"
        self.sound(manifest, told)
        if code:
            code = self.train(manifest, {})
            assert code == 0, f"{told}: not resumed: {self.output.read_text()[-2000:]}"
        (run,) = runs_in(manifest.parent / "runs")
        assert_equal_in_the_end(run.path, self.whole)
        shutil.rmtree(manifest.parent)

    def train(self, manifest: Path, signals: dict[str, Any]) -> int:
        found = runs_in(manifest.parent / "runs")
        words = ["train", "-m", str(manifest), "--device", "cpu"]
        words += ["--resume", str(found[0].path)] if found else []
        return ended(begun(words=words, signals=signals, output=str(self.output)))

    def sound(self, manifest: Path, told: object) -> None:
        for run in runs_in(manifest.parent / "runs"):
            for path in (*run.checkpoints.glob("step-*"), *run.path.glob("final")):
                assert damage(path) == "", told


def test_what_is_compared_is_not_empty(whole):  # noqa: F811
    folder = whole[1]
    assert len(losses_of(folder)) == CALLS["step"]
    assert len(events_of(folder, "saved")) == CALLS["saving"]
    assert weights_of(folder)
    assert RunFolder(folder).was_started


@pytest.mark.fault(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_at_any_moment_leaves_a_run_that_ends_the_same(whole, tmp_path, name):  # noqa: F811
    runs, chance = Runs(whole, tmp_path), random.Random(name)
    for _ in cases(34):
        runs.interrupted(getattr(signal, name), chance)


@pytest.mark.fault(5)
@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_ctrl_c_at_any_moment_leaves_a_run_that_ends_the_same(whole, tmp_path, twice):  # noqa: F811
    runs, chance = Runs(whole, tmp_path), random.Random(twice)
    for _ in cases(25):
        runs.interrupted(signal.SIGINT, chance, twice=twice)
